"""Where a completion ends: end tokens, stop strings and the token budget, inside blocks as well as between them."""

from collections.abc import Callable
from dataclasses import dataclass

from workers.decoding.detokenizer import IncrementalDetokenizer
from workers.messages import FinishReason, StopConditions, TokenIds


@dataclass(frozen=True, slots=True)
class StopOutcome:
    """How much of a block is kept: its first `kept_tokens`, and the text that may be shown so far.

    `visible_characters` counts characters of the whole completion; None where no stop string is watched.
    """

    kept_tokens: int
    visible_characters: int | None
    finish_reason: FinishReason | None


class StopStringMatcher:
    """Watches a growing text for the first occurrence of any stop string."""

    def __init__(self, stop_strings: tuple[str, ...]) -> None:
        self._stop_strings = stop_strings
        self._longest = max(map(len, stop_strings))
        self._length = 0
        self._ignored = 0
        # Only a tail shorter than the longest stop string can still become part of one.
        self._tail = ""

    def push(self, text: str) -> int | None:
        """Append `text`; return the position in the whole text where the earliest stop string begins, if any."""
        window_start = self._length - len(self._tail)
        window = self._append(text)
        ignored = max(0, self._ignored - window_start)
        starts = (window.find(stop, max(0, ignored - len(stop) + 1)) for stop in self._stop_strings)
        found = [start for start in starts if start >= 0]
        return window_start + min(found) if found else None

    def ignore(self, text: str) -> None:
        """Append `text`, in which a stop string may begin but not end."""
        self._append(text)
        self._ignored = self._length

    def _append(self, text: str) -> str:
        """Return what is to be searched: `text` and the tail before it."""
        window = self._tail + text
        self._length += len(text)
        self._tail = window[-(self._longest - 1) :] if self._longest > 1 else ""
        return window

    def safe_length(self) -> int:
        """Return how many characters cannot turn into a part of a stop string any more."""
        for held in range(len(self._tail), 0, -1):
            if any(stop.startswith(self._tail[-held:]) for stop in self._stop_strings):
                return self._length - held
        return self._length


class StopChecker:
    """Decides, as tokens are committed, where one completion ends."""

    def __init__(self, conditions: StopConditions, make_detokenizer: Callable[[], IncrementalDetokenizer]) -> None:
        self._conditions = conditions
        self._committed_tokens = 0
        self._matcher = StopStringMatcher(conditions.stop_strings) if conditions.stop_strings else None
        self._detokenizer = make_detokenizer() if conditions.stop_strings else None

    def push(self, block: TokenIds) -> StopOutcome:
        """Return how much of `block` to commit. Nothing may be pushed after an outcome with a finish reason."""
        for index, token in enumerate(block.tolist()):
            self._committed_tokens += 1
            if self._may_stop and token in self._conditions.end_token_ids:
                return StopOutcome(index + 1, self._flush(), FinishReason.STOP)
            stop_start = self._push_text(token)
            if stop_start is not None:
                return StopOutcome(index + 1, stop_start, FinishReason.STOP)
            if self._committed_tokens >= self._conditions.max_tokens:
                return self._out_of_budget(index + 1)
        return StopOutcome(len(block), self._matcher.safe_length() if self._matcher else None, None)

    @property
    def _may_stop(self) -> bool:
        """Whether the newest token may end the completion (as in vLLM, vllm/v1/engine/detokenizer.py)."""
        return self._committed_tokens > self._conditions.min_tokens

    def _push_text(self, token: int) -> int | None:
        return None if self._detokenizer is None else self._watch(self._detokenizer.push([token]))

    def _watch(self, text: str) -> int | None:
        """Return where a stop string begins that `text` completes."""
        if self._matcher is None:
            return None
        if self._may_stop:
            return self._matcher.push(text)
        self._matcher.ignore(text)
        return None

    def _out_of_budget(self, kept_tokens: int) -> StopOutcome:
        """End by length; the held-back tail becomes visible unless it completes a stop string."""
        stop_start = self._flush()
        if stop_start is not None:
            return StopOutcome(kept_tokens, stop_start, FinishReason.STOP)
        return StopOutcome(kept_tokens, None, FinishReason.LENGTH)

    def _flush(self) -> int | None:
        """Return what is visible when the text ends: everything, unless the held-back tail completes a stop string."""
        return None if self._detokenizer is None else self._watch(self._detokenizer.finish())
