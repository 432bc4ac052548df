"""Checking that drafts change no id: a service answers every prompt with and without them. Knows nothing of Ray."""

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from deployments.api_client import open_client, post_json
from deployments.prompt_file import FilePrompt
from workers.decoding.comparison import Difference, first_difference
from workers.errors import LeadoutError
from workers.messages import Verification


class VerifyError(LeadoutError):
    """The comparison cannot be made; one line says why."""


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """What requests ask for where their lines do not: prompt i (from 0) gets the seed `seed` + i.

    A prompt is asked once at each of `temperatures`, or once at its own. `concurrency` requests are in flight at once.
    """

    temperatures: tuple[float, ...] = (0.0, 0.8)
    max_tokens: int = 128
    seed: int = 0
    verification: Verification = Verification.COUPLED
    concurrency: int = 8


@dataclass(frozen=True, slots=True)
class Case:
    """One request to be answered twice; its two bodies differ in `speculation` alone."""

    where: str
    endpoint: str
    body: dict[str, Any]
    speculation: dict[str, Any]

    @property
    def temperature(self) -> float:
        """The temperature of both answers."""
        return float(self.body["temperature"])

    def request(self, drafted: bool) -> dict[str, Any]:
        """Return the body that asks for the answer with or without drafts."""
        return self.body | {"speculation": self.speculation | {"enabled": True} if drafted else {"enabled": False}}


@dataclass(frozen=True, slots=True)
class Answer:
    """The ids of each choice of an answer, and what speculation did for all of them."""

    choices: tuple[tuple[int, ...], ...]
    verifications: int
    draft_tokens: int

    @property
    def tokens(self) -> int:
        """Tokens of all choices."""
        return sum(map(len, self.choices))


@dataclass(frozen=True, slots=True)
class Pass:
    """The answers to some cases, in their order, and the seconds that all of them took together."""

    answers: list[Answer]
    wall_s: float

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second over all requests in flight."""
        return sum(answer.tokens for answer in self.answers) / self.wall_s


@dataclass(frozen=True, slots=True)
class FoundDifference:
    """A choice that differs: `difference.first` was answered with drafts, `.second` without."""

    where: str
    temperature: float
    seed: int
    choice: int
    difference: Difference


@dataclass(frozen=True, slots=True)
class Comparison:
    """The cases of one temperature. `tokens` counts those compared: up to the first difference where there is one."""

    temperature: float
    prompts: int
    answers: int
    tokens: int
    differences: tuple[FoundDifference, ...]
    draft_tokens: int
    accepted_length: float
    drafted_tokens_per_s: float
    plain_tokens_per_s: float


def plan_cases(prompts: Sequence[FilePrompt], options: VerifyOptions) -> list[Case]:
    """Return what is to be asked, by rising temperature. VerifyError where ids need not be equal."""
    cases = []
    for index, prompt in enumerate(prompts):
        fields = dict(prompt.fields)
        speculation = {"verification": options.verification.value} | fields.pop("speculation", {})
        defaults: dict[str, Any] = {"seed": options.seed + index, "return_token_ids": True}
        if "max_completion_tokens" not in fields:
            defaults["max_tokens"] = options.max_tokens
        own = fields.get("temperature")
        for temperature in options.temperatures if own is None else (own,):
            if not math.isfinite(temperature):
                raise VerifyError(f"{prompt.where}: the temperature must be finite")
            if temperature > 0 and speculation["verification"] == Verification.RATIO:
                raise VerifyError(
                    f"{prompt.where}: ratio verification keeps ids at temperature 0 only, not at {temperature:g}; "
                    "above, it keeps their distribution"
                )
            body = defaults | fields | {"temperature": temperature}
            cases.append(Case(prompt.where, prompt.endpoint, body, speculation))
    return sorted(cases, key=lambda case: case.temperature)


async def verify(
    url: str, cases: Sequence[Case], concurrency: int, answered: Callable[[], None], api_key: str | None = None
) -> list[Comparison]:
    """Ask every case twice, temperature by temperature, first all with drafts and then all without.

    `answered` is called after each answer. Raises ServiceError when the service cannot be reached or refuses a request,
    and VerifyError when it does not draft.
    """
    comparisons = []
    async with open_client(url, api_key) as client:
        for temperature in sorted({case.temperature for case in cases}):
            group = [case for case in cases if case.temperature == temperature]
            drafted = await _ask_all(client, group, True, concurrency, answered)
            plain = await _ask_all(client, group, False, concurrency, answered)
            comparisons.append(compare(group, drafted, plain))
    if not any(comparison.draft_tokens for comparison in comparisons):
        raise VerifyError(
            f"{url} verified no drafts, so this proves nothing; has it a drafter, and max_tokens above 1?"
        )
    return comparisons


def compare(cases: Sequence[Case], drafted: Pass, plain: Pass) -> Comparison:
    """Compare two passes over cases of one temperature, choice by choice."""
    tokens, answers, differences = 0, 0, []
    for case, one, other in zip(cases, drafted.answers, plain.answers, strict=True):
        for choice, (first, second) in enumerate(zip(one.choices, other.choices, strict=True)):
            difference = first_difference(first, second)
            answers += 1
            tokens += len(first) if difference is None else difference.position + 1
            if difference is not None:
                found = FoundDifference(case.where, case.temperature, case.body["seed"], choice, difference)
                differences.append(found)
    verifications = sum(answer.verifications for answer in drafted.answers)
    committed = sum(answer.tokens for answer in drafted.answers)
    return Comparison(
        temperature=cases[0].temperature,
        prompts=len(cases),
        answers=answers,
        tokens=tokens,
        differences=tuple(differences),
        draft_tokens=sum(answer.draft_tokens for answer in drafted.answers),
        accepted_length=committed / max(1, verifications),
        drafted_tokens_per_s=drafted.tokens_per_s,
        plain_tokens_per_s=plain.tokens_per_s,
    )


def verdict(comparisons: Iterable[Comparison]) -> tuple[bool, str]:
    """Return whether all answers are equal, and the line that says so or names the first difference."""
    comparisons = list(comparisons)
    answers = sum(comparison.answers for comparison in comparisons)
    differences = [found for comparison in comparisons for found in comparison.differences]
    if not differences:
        tokens = sum(comparison.tokens for comparison in comparisons)
        return True, f"LOSSLESS: {answers:,} answers, {tokens:,} tokens identical"
    first = differences[0]
    return False, (
        f"DIFFERENT: {len(differences):,} of {answers:,} answers; first {first.where} "
        f"(temperature {first.temperature:g}, seed {first.seed}, choice {first.choice}) at token "
        f"{first.difference.position}: {_shown(first.difference.first)} with drafts, "
        f"{_shown(first.difference.second)} without"
    )


def _shown(token: int | None) -> str:
    return "the end" if token is None else f"id {token}"


async def _ask_all(
    client: httpx.AsyncClient, cases: Sequence[Case], drafted: bool, concurrency: int, answered: Callable[[], None]
) -> Pass:
    answers: dict[int, Answer] = {}
    to_ask = iter(enumerate(cases))

    async def ask_one_after_another() -> None:
        for index, case in to_ask:
            answers[index] = await _ask(client, case, drafted)
            answered()

    began = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(cases))):
                group.create_task(ask_one_after_another())
    except ExceptionGroup as errors:
        # The first failure cancels the others; those that failed with it say nothing new.
        raise errors.exceptions[0] from None
    return Pass([answers[index] for index in range(len(cases))], time.perf_counter() - began)


async def _ask(client: httpx.AsyncClient, case: Case, drafted: bool) -> Answer:
    answer = await post_json(client, case.endpoint, case.request(drafted), what=case.where)
    try:
        return parse_answer(answer)
    except (KeyError, TypeError) as error:
        raise VerifyError(f"{client.base_url} answers without token ids or usage; is it Leadout?") from error


def parse_answer(answer: dict[str, Any]) -> Answer:
    """Return what is compared of an answer's JSON. KeyError or TypeError if it is not there."""
    speculation = answer["usage"]["speculation"]
    return Answer(
        tuple(tuple(choice["token_ids"]) for choice in answer["choices"]),
        speculation["verifications"],
        speculation["draft_tokens"],
    )
