"""What clients get, in OpenAI's shapes: whole answers and the chunks of streamed ones.

Typed dictionaries rather than the `openai` package's models, whose import takes longer than that of all the rest.
"""

import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Protocol, TypeAlias, TypedDict

from deployments.generation import ChoiceDelta
from deployments.logprobs import TokenEntry, Wording, no_logprobs
from deployments.visible_text import TextDelta
from workers.messages import FinishReason, SpeculationUsage

Json: TypeAlias = dict[str, Any]


class SpeculationReport(TypedDict):
    """What speculation did for an answer; the draft counts never include corrections or bonus tokens."""

    verifications: int
    draft_tokens: int
    accepted_tokens: int
    accepted_length: float
    accepted_per_position: list[int]
    drafter: str | None
    fallback_rounds: int


class PromptTokensDetails(TypedDict):
    """Of the prompt's tokens, those that the target had cached already."""

    cached_tokens: int


class Usage(TypedDict):
    """Tokens of all choices of an answer together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    speculation: SpeculationReport


def speculation_report(usages: Sequence[SpeculationUsage]) -> SpeculationReport:
    """Sum the usages of several choices; `accepted_length` is committed tokens per verification, 0.0 without any."""
    verifications = sum(usage.verifications for usage in usages)
    committed = sum(usage.committed_tokens for usage in usages)
    per_position = zip_longest(*(usage.accepted_per_position for usage in usages), fillvalue=0)
    return SpeculationReport(
        verifications=verifications,
        draft_tokens=sum(usage.draft_tokens for usage in usages),
        accepted_tokens=sum(usage.accepted_tokens for usage in usages),
        accepted_length=round(committed / verifications, 4) if verifications else 0.0,
        accepted_per_position=[sum(counts) for counts in per_position],
        drafter=next((usage.drafter for usage in usages if usage.drafter is not None), None),
        fallback_rounds=sum(usage.fallback_rounds for usage in usages),
    )


@dataclass(slots=True)
class UsageTally:
    """Adds up an answer's usage while its deltas pass by. Each prompt has `choices_per_prompt` choices in a row."""

    prompt_tokens: int
    choices_per_prompt: int = 1
    completion_tokens: int = 0
    speculation: list[SpeculationUsage] = field(default_factory=list)
    cached_tokens: dict[int, int] = field(default_factory=dict)
    finish_reasons: dict[int, FinishReason] = field(default_factory=dict)

    def add(self, item: ChoiceDelta) -> None:
        """Count the tokens of `item`, shown or not."""
        self.completion_tokens += len(item.delta.token_ids)
        if item.delta.finish_reason is not None:
            self.finish_reasons[item.index] = item.delta.finish_reason
        usage = item.delta.usage
        if usage is not None:
            self.speculation.append(usage)
            # A prompt counts once, so what one of its choices had to read was not cached.
            prompt = item.index // self.choices_per_prompt
            cached = self.cached_tokens.get(prompt, usage.cached_prompt_tokens)
            self.cached_tokens[prompt] = min(cached, usage.cached_prompt_tokens)

    def total(self) -> Usage:
        """Return the sums so far."""
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            total_tokens=self.prompt_tokens + self.completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self.cached_tokens.values())),
            speculation=speculation_report(self.speculation),
        )


@dataclass(frozen=True, slots=True)
class FinishedChoice:
    """One whole choice of an answer."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    entries: tuple[TokenEntry, ...] = ()


def join_choices(deltas: Iterable[ChoiceDelta]) -> list[FinishedChoice]:
    """Join the deltas of all choices, in the order of their index."""
    by_choice: dict[int, list[TextDelta]] = {}
    for item in deltas:
        by_choice.setdefault(item.index, []).append(item.delta)
    return [_join(by_choice[index]) for index in sorted(by_choice)]


def _join(deltas: Sequence[TextDelta]) -> FinishedChoice:
    finish_reason = deltas[-1].finish_reason
    assert finish_reason is not None, "a choice without an end"
    return FinishedChoice(
        "".join(delta.text for delta in deltas),
        [token for delta in deltas for token in delta.token_ids.tolist()],
        finish_reason,
        tuple(entry for delta in deltas for entry in delta.entries),
    )


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What all parts of one answer share. `created` is in seconds since 1970."""

    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def part(self, kind: str, choices: list[Json], **usage: Usage | None) -> Json:
        """Return an answer, or one chunk of it."""
        return {
            "id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices, **usage
        }  # fmt: skip


class AnswerFormat(Protocol):
    """How an endpoint words its answers."""

    @property
    def head(self) -> AnswerHead:
        """The part that every object of the answer repeats."""
        ...

    def answer(self, choices: Sequence[FinishedChoice], usage: Usage) -> Json:
        """Return the whole answer."""
        ...

    def opening(self) -> list[Json]:
        """Return the choices of the chunks that open the choices' streams, if there are any."""
        ...

    def chunks(self, item: ChoiceDelta) -> list[Json]:
        """Return the choices of the chunks that tell of one delta; none if there is nothing to show."""
        ...

    @property
    def chunk_kind(self) -> str:
        """The `object` of a chunk."""
        ...


@dataclass(frozen=True, slots=True)
class CompletionFormat:
    """Answers of /v1/completions; each choice names its seed, and with `token_ids` the ids of its tokens."""

    head: AnswerHead
    seeds: Sequence[int]
    token_ids: bool = False
    logprobs: Wording = no_logprobs
    chunk_kind: str = "text_completion"

    def answer(self, choices: Sequence[FinishedChoice], usage: Usage) -> Json:
        """Return the whole answer."""
        worded = [
            _text_choice(index, choice.text, choice.finish_reason, self.logprobs(choice.entries))
            | {"seed": self.seeds[index], **self._ids(choice.token_ids)}
            for index, choice in enumerate(choices)
        ]
        return self.head.part("text_completion", worded, usage=usage)

    def opening(self) -> list[Json]:
        """Completions open with their first text."""
        return []

    def chunks(self, item: ChoiceDelta) -> list[Json]:
        """Return one text chunk, unless it would say nothing; the last one of a choice has its seed."""
        delta = item.delta
        if not (delta.text or delta.entries or delta.finish_reason or self.token_ids):
            return []
        logprobs = self.logprobs(delta.entries) if delta.entries else None
        choice = _text_choice(item.index, delta.text, delta.finish_reason, logprobs)
        seed = {"seed": self.seeds[item.index]} if delta.finish_reason else {}
        return [choice | seed | self._ids(delta.token_ids.tolist())]

    def _ids(self, token_ids: list[int]) -> Json:
        return {"token_ids": token_ids} if self.token_ids else {}


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """Answers of /v1/chat/completions; each choice names its seed, and with `token_ids` the ids of its tokens."""

    head: AnswerHead
    seeds: Sequence[int]
    token_ids: bool = False
    logprobs: Wording = no_logprobs
    chunk_kind: str = "chat.completion.chunk"

    def answer(self, choices: Sequence[FinishedChoice], usage: Usage) -> Json:
        """Return the whole answer."""
        worded: list[Json] = [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": self.logprobs(choice.entries),
                "finish_reason": choice.finish_reason,
                "seed": self.seeds[index],
                **self._ids(choice.token_ids),
            }
            for index, choice in enumerate(choices)
        ]
        return self.head.part("chat.completion", worded, usage=usage)

    def opening(self) -> list[Json]:
        """Each choice of a conversation opens by saying who speaks."""
        return [_message_choice(index, {"role": "assistant", "content": ""}) for index in range(len(self.seeds))]

    def chunks(self, item: ChoiceDelta) -> list[Json]:
        """Return a content chunk if there is text, then the finish chunk, which has the seed, if it is the end."""
        delta = item.delta
        ids = self._ids(delta.token_ids.tolist())
        logprobs = self.logprobs(delta.entries) if delta.entries else None
        content = [_message_choice(item.index, {"content": delta.text}, logprobs=logprobs) | ids]
        if not (delta.text or delta.entries or ids):
            content = []
        if not delta.finish_reason:
            return content
        return [*content, _message_choice(item.index, {}, delta.finish_reason) | {"seed": self.seeds[item.index]}]

    def _ids(self, token_ids: list[int]) -> Json:
        return {"token_ids": token_ids} if self.token_ids else {}


def answer_id(prefix: str) -> str:
    """Return a fresh id such as "cmpl-<hex>"."""
    return f"{prefix}-{uuid.uuid4().hex}"


def model_card(name: str, context_length: int, created: int) -> Json:
    """Return an entry of /v1/models; `max_model_len` is vLLM's name of the context length."""
    return {
        "id": name, "object": "model", "created": created, "owned_by": "leadout", "max_model_len": context_length
    }  # fmt: skip


def _text_choice(index: int, text: str, finish_reason: FinishReason | None, logprobs: Json | None) -> Json:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def _message_choice(
    index: int, delta: Json, finish_reason: FinishReason | None = None, logprobs: Json | None = None
) -> Json:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
