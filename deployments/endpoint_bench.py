"""Measuring an OpenAI-compatible endpoint by its streams, at rising concurrency. Knows nothing of Ray."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import httpx

from deployments.api_client import ServiceError, first_model, stream_events, text_of
from deployments.pair_prompts import BEGINNINGS, QUESTIONS
from deployments.prompt_file import CHAT, COMPLETIONS, FilePrompt

REQUESTS_PER_STREAM = 4
LEAST_REQUESTS = 8


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What to ask. `requests` are made at each of `concurrencies`; without it, four for each stream, at least eight.

    Fields of a prompt go before `max_tokens` and `temperature`. Without `model`, the first that the endpoint lists.
    """

    concurrencies: tuple[int, ...] = (1, 2, 4, 8, 16)
    requests: int | None = None
    max_tokens: int = 64
    temperature: float = 0.0
    model: str | None = None

    def requests_at(self, concurrency: int) -> int:
        """Return how many requests are made at `concurrency`."""
        return self.requests or max(LEAST_REQUESTS, REQUESTS_PER_STREAM * concurrency)


@dataclass(frozen=True, slots=True)
class Sample:
    """One answered request. `events_s` are the times of the events that showed text, from its being sent.

    `tokens` is what `usage` counted, or the number of those events where the endpoint sends no usage (`counted` false).
    `verifications` and `accepted` come from `usage.speculation`; both are 0 without it.
    """

    events_s: tuple[float, ...]
    end_s: float
    tokens: int
    counted: bool
    verifications: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_length: float = 0.0


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of milliseconds, by linear interpolation between the nearest two."""

    p50: float
    p95: float
    p99: float
    mean: float


@dataclass(frozen=True, slots=True)
class Level:
    """What one concurrency gave. None stands for what no request could tell.

    `ttft_ms`: from sending to the first text. `itl_ms`: between events that show text, each of which may hold several
    tokens. `tpot_ms`: from first to last event, per further token. `request_ms`: to the end of the stream.
    `errors` counts failures by status, or `broken`. `accepted_length`: tokens per verification.
    """

    concurrency: int
    requests: int
    wall_s: float
    output_tokens: int
    tokens_per_s: float
    requests_per_s: float
    ttft_ms: Percentiles | None
    itl_ms: Percentiles | None
    tpot_ms: Percentiles | None
    request_ms: Percentiles | None
    accepted_length: float | None
    acceptance: float | None
    tokens_counted: bool
    errors: dict[str, int]


def built_in_prompts(chat: bool) -> list[FilePrompt]:
    """Return the prompts of `leadout check-pair`: questions for chats, beginnings for completions."""
    if chat:
        messages = [[{"role": "user", "content": question}] for question in QUESTIONS]
        return [FilePrompt(f"built-in:{index}", CHAT, {"messages": each}) for index, each in enumerate(messages)]
    return [FilePrompt(f"built-in:{index}", COMPLETIONS, {"prompt": each}) for index, each in enumerate(BEGINNINGS)]


async def bench(
    client: httpx.AsyncClient,
    prompts: Sequence[FilePrompt],
    options: BenchOptions,
    answered: Callable[[int], None],
    clock: Callable[[], float] = time.perf_counter,
) -> list[Level]:
    """Measure level by level, after one request that warms up; its failure is raised.

    `answered` is told the concurrency after each request. Raises ServiceError also where no request of any level was
    answered.
    """
    model = options.model or await first_model(client)
    bodies = [(prompt.endpoint, _body(prompt, model, options)) for prompt in prompts]
    await _ask(client, *bodies[0], clock)
    levels = [await _level(client, bodies, options, each, answered, clock) for each in options.concurrencies]
    if not any(level.output_tokens for level in levels):
        raise ServiceError(f"{client.base_url} answered no request of the sweep: {levels[0].errors}")
    return levels


def summary(concurrency: int, wall_s: float, samples: Sequence[Sample], errors: dict[str, int] | None = None) -> Level:
    """Return what `samples`, answered at `concurrency` in `wall_s` seconds, amount to."""
    tokens = sum(sample.tokens for sample in samples)
    verifications = sum(sample.verifications for sample in samples)
    drafted = sum(sample.draft_tokens for sample in samples)
    # An answer's own accepted length weighs as much as its verifications.
    committed = sum(sample.accepted_length * sample.verifications for sample in samples)
    firsts = [sample.events_s[0] for sample in samples if sample.events_s]
    gaps = [later - earlier for sample in samples for earlier, later in pairwise(sample.events_s)]
    paces = [
        (sample.events_s[-1] - sample.events_s[0]) / (sample.tokens - 1)
        for sample in samples
        if len(sample.events_s) > 1 and sample.tokens > 1
    ]
    return Level(
        concurrency=concurrency,
        requests=len(samples),
        wall_s=wall_s,
        output_tokens=tokens,
        tokens_per_s=tokens / wall_s if wall_s > 0 else 0.0,
        requests_per_s=len(samples) / wall_s if wall_s > 0 else 0.0,
        ttft_ms=percentiles(firsts),
        itl_ms=percentiles(gaps),
        tpot_ms=percentiles(paces),
        request_ms=percentiles([sample.end_s for sample in samples]),
        accepted_length=committed / verifications if verifications else None,
        acceptance=sum(sample.accepted_tokens for sample in samples) / drafted if drafted else None,
        tokens_counted=all(sample.counted for sample in samples),
        errors=dict(errors or {}),
    )


def percentiles(seconds: Sequence[float]) -> Percentiles | None:
    """Return the percentiles in milliseconds; None of nothing."""
    if not seconds:
        return None
    ordered = sorted(1000 * value for value in seconds)
    p50, p95, p99 = (_percentile(ordered, share) for share in (0.5, 0.95, 0.99))
    return Percentiles(p50, p95, p99, mean=sum(ordered) / len(ordered))


def _percentile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def _body(prompt: FilePrompt, model: str, options: BenchOptions) -> dict[str, Any]:
    limit = {} if "max_completion_tokens" in prompt.fields else {"max_tokens": options.max_tokens}
    defaults = {"model": model, "temperature": options.temperature, **limit}
    return {**defaults, **prompt.fields, "stream": True, "stream_options": {"include_usage": True}}


async def _level(
    client: httpx.AsyncClient,
    bodies: Sequence[tuple[str, dict[str, Any]]],
    options: BenchOptions,
    concurrency: int,
    answered: Callable[[int], None],
    clock: Callable[[], float],
) -> Level:
    samples: list[Sample] = []
    errors: Counter[str] = Counter()
    to_ask = iter([bodies[index % len(bodies)] for index in range(options.requests_at(concurrency))])

    async def ask_one_after_another() -> None:
        for endpoint, body in to_ask:
            try:
                samples.append(await _ask(client, endpoint, body, clock))
            except ServiceError as error:
                errors["broken" if error.status is None else str(error.status)] += 1
            answered(concurrency)

    began = clock()
    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(ask_one_after_another())
    return summary(concurrency, clock() - began, samples, dict(errors))


async def _ask(client: httpx.AsyncClient, endpoint: str, body: dict[str, Any], clock: Callable[[], float]) -> Sample:
    began = clock()
    times: list[float] = []
    usage: dict[str, Any] = {}
    try:
        async for event in stream_events(client, endpoint, body):
            if text_of(event):
                times.append(clock() - began)
            usage = event.get("usage") or usage
        return _sample(tuple(times), clock() - began, usage)
    except (AttributeError, TypeError, ValueError) as error:
        raise ServiceError(f"{client.base_url} does not stream as OpenAI's API does") from error


def _sample(times: tuple[float, ...], end_s: float, usage: dict[str, Any]) -> Sample:
    tokens = usage.get("completion_tokens")
    told = usage.get("speculation") or {}
    return Sample(
        events_s=times,
        end_s=end_s,
        tokens=len(times) if tokens is None else int(tokens),
        counted=tokens is not None,
        verifications=int(told.get("verifications", 0)),
        draft_tokens=int(told.get("draft_tokens", 0)),
        accepted_tokens=int(told.get("accepted_tokens", 0)),
        accepted_length=float(told.get("accepted_length", 0.0)),
    )
