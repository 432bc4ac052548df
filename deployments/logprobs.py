"""Log-probabilities of tokens, aligned with the text that a client sees, and how OpenAI words them."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, TypeAlias

from deployments.token_bytes import TokenBytes
from workers.messages import TokenChunk, TokenLogprobs

IMPOSSIBLE = -9999.0
"""What stands for a probability of 0, as in vLLM: JSON has no infinity, and clients expect a number."""
# A character has at most four bytes. Tokens of longer runs without a whole character are garbage and share a place.
MAX_LOCATED_RUN = 64
Json: TypeAlias = dict[str, Any]
Wording: TypeAlias = Callable[[Sequence["TokenEntry"]], Json | None]


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """What is told of one token: the position in the text at which its own begins, and how likely it was.

    `top` is pairs of the likeliest token ids and their log-probabilities. The first token of a prompt has neither.
    """

    token_id: int
    text_offset: int = 0
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] | None = None


def entries_of(token_ids: Sequence[int], logprobs: TokenLogprobs | None) -> list[TokenEntry]:
    """Return the entries of `token_ids`, the first of those that `logprobs` belongs to, with no place yet."""
    if not token_ids:
        return []
    if logprobs is None:
        raise RuntimeError("the router did not report the log-probabilities it was asked for")
    chosen, top_ids, top = logprobs.chosen.tolist(), logprobs.top_ids.tolist(), logprobs.top.tolist()
    return [
        TokenEntry(
            token,
            logprob=max(chosen[row], IMPOSSIBLE),
            top=tuple((other, max(value, IMPOSSIBLE)) for other, value in zip(top_ids[row], top[row], strict=True)),
        )
        for row, token in enumerate(token_ids)
    ]


class TokenPlaces:
    """Finds where in a growing text, which is `offset` characters long at first, each token's own text begins.

    A token that adds nothing by itself is placed with the character that it turns out to belong to.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], offset: int = 0) -> None:
        self._decode = decode
        self._length = offset
        self._run: list[int] = []

    def push(self, token_id: int, text: str) -> list[int]:
        """Take in a token that made `text` certain; return the places, in order, of the tokens that now have one."""
        self._run.append(token_id)
        return self.finish(text) if text else []

    def finish(self, text: str) -> list[int]:
        """Append `text`; return the places of all tokens that have none yet."""
        run, places, place = self._run, [], 0
        for index in range(len(run)):
            # What the tokens before it read as, and still do, was there without it.
            if 0 < index <= MAX_LOCATED_RUN and text:
                place = max(place, _common_prefix(self._decode(run[:index]), text))
            places.append(self._length + place)
        self._length += len(text)
        self._run = []
        return places


class VisibleEntries:
    """Holds each token's entry back until some of its text may be shown."""

    def __init__(self, places: TokenPlaces) -> None:
        self._places = places
        self._unplaced: deque[TokenEntry] = deque()
        self._placed: deque[TokenEntry] = deque()

    def add(self, chunk: TokenChunk, shown_ids: Sequence[int], texts: Sequence[str]) -> None:
        """Take in the first tokens of `chunk`, the shown ones, and the text that each made certain."""
        self._unplaced.extend(entries_of(shown_ids, chunk.logprobs))
        for token, text in zip(shown_ids, texts, strict=True):
            self._place(self._places.push(token, text))

    def finish(self, tail: str) -> None:
        """No token follows, and `tail` is the rest of the text."""
        self._place(self._places.finish(tail))

    def take(self, limit: int | None) -> tuple[TokenEntry, ...]:
        """Return the next entries: of tokens that begin before position `limit`, or of all that have a place."""
        taken = tuple(takewhile(lambda entry: limit is None or entry.text_offset < limit, self._placed))
        for _ in taken:
            self._placed.popleft()
        return taken

    def _place(self, places: Sequence[int]) -> None:
        for place in places:
            self._placed.append(replace(self._unplaced.popleft(), text_offset=place))


def no_logprobs(entries: Sequence[TokenEntry]) -> None:
    """Say nothing: the client did not ask."""


def completion_logprobs(tokens: TokenBytes) -> Wording:
    """Return the wording of /v1/completions: lists of equal length."""

    def word(entries: Sequence[TokenEntry]) -> Json:
        return {
            "tokens": [tokens.text_of(entry.token_id) for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [_by_text(entry, tokens) for entry in entries],
            "text_offset": [entry.text_offset for entry in entries],
        }

    return word


def chat_logprobs(tokens: TokenBytes) -> Wording:
    """Return the wording of /v1/chat/completions: one object per token."""

    def token(token_id: int, logprob: float | None) -> Json:
        raw = tokens.bytes_of(token_id)
        return {"token": tokens.text_of(token_id), "logprob": logprob, "bytes": list(raw)}

    def word(entries: Sequence[TokenEntry]) -> Json:
        content = [
            token(entry.token_id, entry.logprob) | {"top_logprobs": [token(*other) for other in entry.top or ()]}
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    return word


def _by_text(entry: TokenEntry, tokens: TokenBytes) -> dict[str, float] | None:
    """Return the log-probabilities by text: of tokens that read alike the likeliest, but always the chosen one."""
    if entry.top is None or entry.logprob is None:
        return None
    by_text: dict[str, float] = {}
    for token_id, logprob in entry.top:
        by_text.setdefault(tokens.text_of(token_id), logprob)
    by_text[tokens.text_of(entry.token_id)] = entry.logprob
    return by_text


def _common_prefix(one: str, other: str) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
