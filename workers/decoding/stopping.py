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
        # Only a tail shorter than the longest stop string can still become part of one.
        self._tail = ""

    def push(self, text: str) -> int | None:
        """Append `text`; return the position in the whole text where the earliest stop string begins, if any."""
        window = self._tail + text
        window_start = self._length - len(self._tail)
        self._length += len(text)
        self._tail = window[-(self._longest - 1) :] if self._longest > 1 else ""
        found = [start for start in (window.find(stop) for stop in self._stop_strings) if start >= 0]
        return window_start + min(found) if found else None

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
            if token in self._conditions.end_token_ids:
                return StopOutcome(index + 1, self._flush(), FinishReason.STOP)
            stop_start = self._push_text(token)
            if stop_start is not None:
                return StopOutcome(index + 1, stop_start, FinishReason.STOP)
            if self._committed_tokens >= self._conditions.max_tokens:
                return self._out_of_budget(index + 1)
        return StopOutcome(len(block), self._matcher.safe_length() if self._matcher else None, None)

    def _push_text(self, token: int) -> int | None:
        if self._matcher is None or self._detokenizer is None:
            return None
        return self._matcher.push(self._detokenizer.push([token]))

    def _out_of_budget(self, kept_tokens: int) -> StopOutcome:
        """End by length; the held-back tail becomes visible unless it completes a stop string."""
        if self._matcher is None or self._detokenizer is None:
            return StopOutcome(kept_tokens, None, FinishReason.LENGTH)
        stop_start = self._matcher.push(self._detokenizer.finish())
        if stop_start is not None:
            return StopOutcome(kept_tokens, stop_start, FinishReason.STOP)
        return StopOutcome(kept_tokens, None, FinishReason.LENGTH)

    def _flush(self) -> int | None:
        """Return what is visible when an end token ends the text: everything, the held-back tail included."""
        if self._matcher is None or self._detokenizer is None:
            return None
        return self._matcher.push(self._detokenizer.finish())
