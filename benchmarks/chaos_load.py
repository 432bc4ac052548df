"""The load of a failure drill: requests of every kind, what came of each, and whether it is what had to come."""

import asyncio
import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.load import SEEDED, completion_body
from benchmarks.raw_http import Answer, BrokenAnswerError, chunks, connected, read_head

ANSWER_TIMEOUT_S = 300.0
REGEX = "(import|def|class|return) [a-z_]{3,12}(, [a-z_]{3,12}){4,60}"
SPECIAL: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0},
    {"n": 3},
    {"logprobs": 2},
    {"presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.1},
    {"structured_outputs": {"regex": REGEX}},
    {"stop": ["\n\n\n", "return None"], "min_tokens": 8},
    {"temperature": 1.1, "top_k": 40, "min_p": 0.02, "logit_bias": {"10": -2}},
)
"""What requests of the load ask for besides a seeded sample, one after the other."""


@dataclass(frozen=True, slots=True)
class DrillRequest:
    """A request, and after how many parts of its stream the client leaves, if it does."""

    body: dict[str, Any]
    leaves_after: int | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice of an answer: whole, or as far as it came."""

    ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: str | None = None
    logprobs: int = 0

    def plus(self, part: dict[str, Any]) -> "Choice":
        """Return the choice with what an event of its stream adds."""
        told = (part.get("logprobs") or {}).get("tokens", ())
        return Choice(
            (*self.ids, *part.get("token_ids", ())),
            self.text + part["text"],
            part["finish_reason"] or self.finish_reason,
            self.logprobs + len(told),
        )

    def begins(self, whole: "Choice") -> bool:
        """Whether `whole` goes on from what came of this choice."""
        return whole.ids[: len(self.ids)] == self.ids and whole.text.startswith(self.text)


@dataclass(slots=True)
class Outcome:
    """What came of a request: its choices by index, what its usage counted, and an error if it ended with one.

    `came_s` is when it was sent and when each part came, in seconds of the monotonic clock.
    """

    request: DrillRequest
    choices: dict[int, Choice] = field(default_factory=dict)
    completion_tokens: int | None = None
    error: str | None = None
    came_s: list[float] = field(default_factory=list)

    def note(self, event: dict[str, Any]) -> None:
        """Add an event of a stream, or a whole answer."""
        for part in event["choices"]:
            index = part["index"]
            self.choices[index] = self.choices.get(index, Choice()).plus(part)
        if usage := event.get("usage"):
            self.completion_tokens = usage["completion_tokens"]

    @property
    def left(self) -> bool:
        """Whether the client went before the end."""
        return self.request.leaves_after is not None and self.completion_tokens is None


def drill_requests(seed: int, prompts: Sequence[str], max_tokens: int) -> list[DrillRequest]:
    """Return one request per prompt, seeded, of all kinds; most are streamed."""
    chance, special = random.Random(seed), itertools.cycle(SPECIAL)
    return [
        DrillRequest(
            completion_body(prompt, SEEDED | {"seed": chance.randrange(2**31)}, True, chance.randint(24, max_tokens))
            | next(special)
            | ({"stream": True, "stream_options": {"include_usage": True}} if chance.random() < 0.85 else {})
        )
        for prompt in prompts
    ]


async def ask(url: str, request: DrillRequest) -> Outcome:
    """Send a request and read its answer, or leave when it is time to. Errors are part of the outcome."""
    outcome = Outcome(request)
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S), connected(url, request.body) as (answer, reader):
            outcome.came_s.append(answer.began_s)
            await _read(outcome, answer, reader)
    except TimeoutError:
        outcome.error = f"no end within {ANSWER_TIMEOUT_S:g} s"
    except (BrokenAnswerError, OSError, EOFError, ValueError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    return outcome


async def _read(outcome: Outcome, answer: Answer, reader: asyncio.StreamReader) -> None:
    await read_head(answer, reader)
    streamed = outcome.request.body.get("stream", False)
    async for event in chunks(answer, reader):
        if answer.status != 200:
            outcome.error = f"status {answer.status}: {event.get('error')}"
            return
        outcome.note(event)
        outcome.came_s.append(answer.chunk_s[-1])
        if streamed and len(answer.chunks) == outcome.request.leaves_after:
            return


def difference(outcome: Outcome, undisturbed: Outcome) -> str | None:
    """Say in what a finished outcome is not the undisturbed one's, or one that was left not its beginning; or None.

    The values of log-probabilities are not compared: they may depend on what else was in a step. Their number is.
    """
    if outcome.left:
        strayed = [i for i, choice in outcome.choices.items() if not choice.begins(undisturbed.choices[i])]
        return f"what came of choices {strayed} is no beginning of what had to come" if strayed else None
    if outcome.choices.keys() != undisturbed.choices.keys():
        return f"choices {sorted(outcome.choices)} instead of {sorted(undisturbed.choices)}"
    for index, choice in outcome.choices.items():
        if choice != undisturbed.choices[index]:
            return f"choice {index} is {choice}, undisturbed {undisturbed.choices[index]}"
    if outcome.completion_tokens != undisturbed.completion_tokens:
        return f"{outcome.completion_tokens} tokens counted instead of {undisturbed.completion_tokens}"
    return None


def longest_pauses(outcomes: Iterable[Outcome], faults: Sequence[tuple[float, str, float]]) -> dict[str, float]:
    """Return the longest time that a stream gave nothing, in seconds, by the fault that it is put down to.

    `faults` are times of the monotonic clock, kinds and how long each lasts, in order. A pause belongs to the fault
    that lasts as it begins, or else to the first within it, or else to the last one before; before all, to none: "".
    """
    longest: dict[str, float] = {}
    for outcome in outcomes:
        if not outcome.request.body.get("stream"):
            continue
        for began, ended in itertools.pairwise(outcome.came_s):
            before = [(kind, at_s + lasts_s) for at_s, kind, lasts_s in faults if at_s <= began]
            within = [kind for at_s, kind, _ in faults if began < at_s <= ended]
            kind = before[-1][0] if before else ""
            if within and not (before and before[-1][1] >= began):
                kind = within[0]
            longest[kind] = max(longest.get(kind, 0.0), ended - began)
    return longest


async def ask_all(url: str, requests: Iterable[DrillRequest], at_once: int) -> list[Outcome]:
    """Ask every request, `at_once` of them at a time."""
    limit = asyncio.Semaphore(at_once)

    async def one(request: DrillRequest) -> Outcome:
        async with limit:
            return await ask(url, request)

    return list(await asyncio.gather(*map(one, requests)))


async def keep_asking(
    url: str, requests: Sequence[DrillRequest], at_once: int, chance: random.Random, over: asyncio.Event
) -> list[tuple[int, Outcome]]:
    """Keep `at_once` requests under way until `over`, then let them end; return each one's index and outcome.

    One in eight of the streams is left by its client.
    """
    outcomes: list[tuple[int, Outcome]] = []

    async def client() -> None:
        while not over.is_set():
            index = chance.randrange(len(requests))
            request = requests[index]
            if request.body.get("stream") and chance.random() < 1 / 8:
                request = DrillRequest(request.body, chance.randint(1, 12))
            outcomes.append((index, await ask(url, request)))
            # Nobody gains from asking a service that refuses as fast as it can.
            await asyncio.sleep(1.0 if outcomes[-1][1].error else 0.0)

    await asyncio.gather(*(client() for _ in range(at_once)))
    return outcomes
