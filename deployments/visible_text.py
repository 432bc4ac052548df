"""What clients may see of a choice so far: its text, the log-probabilities that belong to it, and the echoed prompt."""

from dataclasses import dataclass
from itertools import accumulate

from deployments.logprobs import TokenEntry, TokenPlaces, VisibleEntries, entries_of
from deployments.text import TextCodec
from workers.messages import (
    NO_TOKENS,
    FinishReason,
    GenerationRequest,
    SpeculationUsage,
    TokenChunk,
    TokenIds,
)


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one round added to a choice. `text` is empty while it is held back; `token_ids` counts every token.

    `finish_reason` and `usage` are set on the last delta only. `entries` belong to tokens that begin in `text`, or
    that have no text of their own.
    """

    text: str
    token_ids: TokenIds
    finish_reason: FinishReason | None = None
    usage: SpeculationUsage | None = None
    entries: tuple[TokenEntry, ...] = ()


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """A prompt that is shown before its completion, and where in its text each of its tokens begins."""

    text: str
    text_offsets: tuple[int, ...]


def echo_of_ids(codec: TextCodec, prompt: TokenIds) -> EchoedPrompt:
    """Return the echo of a prompt that was given as token ids."""
    detokenizer, places = codec.detokenizer(NO_TOKENS), TokenPlaces(codec.decode)
    text: list[str] = []
    offsets: list[int] = []
    for token in prompt.tolist():
        text.append(detokenizer.push([token]))
        offsets += places.push(token, text[-1])
    text.append(detokenizer.finish())
    offsets += places.finish(text[-1])
    return EchoedPrompt("".join(text), tuple(offsets))


def echo_of_text(codec: TextCodec, prompt: str, ids: TokenIds) -> EchoedPrompt:
    """Return the echo of a prompt that was given as text, which its tokens do not always read as again."""
    echoed = echo_of_ids(codec, ids)
    if echoed.text == prompt:
        return echoed
    # The encoder's own account may leave a token's leading space out, and gives added tokens no place of their own.
    return EchoedPrompt(prompt, tuple(accumulate(codec.token_starts(prompt), max)))


class PromptEcho:
    """Gathers the prompt's log-probabilities, if they are wanted, until the prompt can be told as one delta."""

    def __init__(self, request: GenerationRequest, echoed: EchoedPrompt) -> None:
        self._prompt = request.prompt.tolist()
        self._echoed = echoed
        self._wants_entries = request.prompt_logprobs
        self._entries = [TokenEntry(self._prompt[0])]
        self._told = False

    def add(self, chunk: TokenChunk) -> TextDelta | None:
        """Return the prompt as soon as all of it is known; None before and afterwards."""
        if self._told:
            return None
        if self._wants_entries and chunk.prompt_logprobs is not None:
            start = len(self._entries)
            tokens = self._prompt[start : start + len(chunk.prompt_logprobs)]
            self._entries += entries_of(tokens, chunk.prompt_logprobs)
        complete = not self._wants_entries or len(self._entries) == len(self._prompt)
        if not complete and not len(chunk.token_ids) and chunk.finish_reason is None:
            return None
        self._told = True
        return TextDelta(self._echoed.text, NO_TOKENS, entries=self._placed() if self._wants_entries else ())

    def _placed(self) -> tuple[TokenEntry, ...]:
        if len(self._entries) != len(self._prompt):
            raise RuntimeError("the router did not report the log-probabilities of the whole prompt")
        return tuple(
            TokenEntry(entry.token_id, offset, entry.logprob, entry.top)
            for entry, offset in zip(self._entries, self._echoed.text_offsets, strict=True)
        )


class VisibleText:
    """The text of one completion, let out as far as the router allows: beyond may lie the beginning of a stop.

    It stands `offset` characters after the beginning of the choice's text.
    """

    def __init__(self, request: GenerationRequest, codec: TextCodec, offset: int = 0) -> None:
        self._end_token_ids = request.stop.end_token_ids
        self._detokenizer = codec.detokenizer(request.prompt)
        self._offset = offset
        self._shown_characters = 0
        self._held_back = ""
        self._entries = VisibleEntries(TokenPlaces(codec.decode, offset)) if request.logprobs is not None else None

    def add(self, chunk: TokenChunk) -> TextDelta:
        """Return the delta of `chunk`."""
        shown_ids = chunk.token_ids.tolist()
        # An end id hides itself only if the tokenizer calls it special, which not all do.
        if chunk.finish_reason is FinishReason.STOP and shown_ids and shown_ids[-1] in self._end_token_ids:
            shown_ids.pop()
        texts = [self._detokenizer.push([token]) for token in shown_ids]
        tail = self._detokenizer.finish() if chunk.finish_reason is not None else ""
        text = "".join([self._held_back, *texts, tail])
        limit = chunk.visible_characters
        allowed = len(text) if limit is None else max(0, limit - self._shown_characters)
        visible, self._held_back = text[:allowed], text[allowed:]
        self._shown_characters += len(visible)
        entries = self._visible_entries(chunk, shown_ids, texts, tail)
        usage = chunk.usage if chunk.finish_reason is not None else None
        return TextDelta(visible, chunk.token_ids, chunk.finish_reason, usage, entries)

    def _visible_entries(
        self, chunk: TokenChunk, shown_ids: list[int], texts: list[str], tail: str
    ) -> tuple[TokenEntry, ...]:
        """Return the entries that may be told: a token that begins in visible text and ends beyond it is one of them.

        So a stop string takes away the entries of tokens that only belong to it or come after it.
        """
        if self._entries is None:
            return ()
        self._entries.add(chunk, shown_ids, texts)
        if chunk.finish_reason is not None:
            self._entries.finish(tail)
        limit = chunk.visible_characters
        return self._entries.take(None if limit is None else self._offset + limit)
