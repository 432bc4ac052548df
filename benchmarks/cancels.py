"""Requests cancelled at random moments, and what the service still holds afterwards: nothing.

`make bench BENCH=cancels` sends 2,000 (`QUICK=1`: 200), 32 at a time to 8 running sequences, so that most have to wait.
Each is of a random kind: streamed or whole, one choice or several, with a short prompt or one that is read in many
chunks; and its connection is dropped at a random moment: within the body, after a random time or at a random chunk.
Seeded. Afterwards no sequence, no KV block and no place among the concurrent requests may be taken, and plain requests
have the ids that they had before. Exits with 1 otherwise.
"""

import argparse
import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import Row, Service, report, running_service, tiny_pair_config
from benchmarks.idle import wait_until_idle
from benchmarks.load import GREEDY, SEEDED, completion_body, run_load
from benchmarks.processes import rss_mib
from benchmarks.raw_http import BrokenAnswerError, chunks, connected, read_head
from models.corpus import held_out_prompts

REQUESTS, FEW_REQUESTS = 2_000, 200
SEED = 20_261_130
AT_ONCE, RUNNING, WAITING = 32, 8, 512
# Exactly as many requests are sent at once in the end: a place that was never given back would be missed.
PLACES = 64
CHUNK_TOKENS = 64
MAX_TOKENS = 300
LATEST_S = 1.5
FORGIVEN_GROWTH = 1.05


@dataclass(frozen=True, slots=True)
class Cancelled:
    """A request and when its client leaves: within the body, after so many chunks, or after so many seconds."""

    body: dict[str, Any]
    within_body: bool
    after_chunks: int | None
    after_s: float


def random_request(chance: random.Random, prompts: Sequence[str], number: int) -> Cancelled:
    """Return a request of a random kind."""
    prompt = chance.choice(prompts)
    if chance.random() < 0.25:
        prompt = "".join(chance.sample(prompts, 4))[:1_800]
    body = completion_body(prompt, SEEDED | {"seed": number}, chance.random() < 0.9, MAX_TOKENS)
    body |= {"stream": chance.random() < 0.7, "ignore_eos": True, "n": chance.choice([1, 1, 1, 2, 4])}
    return Cancelled(
        body,
        within_body=chance.random() < 0.05,
        after_chunks=chance.randint(1, 12) if body["stream"] and chance.random() < 0.5 else None,
        after_s=chance.choice([0.0, chance.uniform(0, 0.05), chance.uniform(0, LATEST_S)]),
    )


async def leave(url: str, request: Cancelled) -> str:
    """Send a request and drop its connection; return how far it had come."""
    state = "nothing had come"
    try:
        async with connected(url, request.body, cut=request.within_body) as (answer, reader):
            if request.within_body:
                return "the body was not sent"
            async with asyncio.timeout(None if request.after_chunks else request.after_s):
                await read_head(answer, reader)
                if answer.status != 200:
                    return f"status {answer.status}"
                state = "some of it had come"
                async for _ in chunks(answer, reader):
                    if len(answer.chunks) == request.after_chunks:
                        return state
    except TimeoutError:
        return state
    except BrokenAnswerError as error:
        return f"broken: {error}"
    return "it was finished"


async def cancel_all(url: str, requests: Sequence[Cancelled]) -> Counter[str]:
    """Send and leave all requests, AT_ONCE of them in flight together; count how far they had come."""
    limit = asyncio.Semaphore(AT_ONCE)

    async def one(request: Cancelled) -> str:
        async with limit:
            return await leave(url, request)

    return Counter(await asyncio.gather(*map(one, requests)))


def measure(service: Service, requests: Sequence[Cancelled], prompts: Sequence[str]) -> tuple[list[Row], bool]:
    """Cancel everything and look at what is left; the second value is whether all is well."""
    plain = [completion_body(prompt, GREEDY, True, 16) for prompt in prompts[:PLACES]]
    expected = run_load(service, plain, RUNNING).token_ids
    # The memory is looked at after the first tenth, which touches what is touched once.
    first = len(requests) // 10
    states = asyncio.run(cancel_all(service.url, requests[:first]))
    before = rss_mib(service.process.pid)
    states += asyncio.run(cancel_all(service.url, requests[first:]))
    left = wait_until_idle(service)
    after = rss_mib(service.process.pid)
    wrong = sum(ids != known for ids, known in zip(run_load(service, plain, PLACES).token_ids, expected, strict=True))
    unasked = sum(count for state, count in states.items() if state.startswith(("status", "broken")))
    rows = [
        *(Row(f"left when {state}", count, "requests") for state, count in sorted(states.items())),
        Row("refused or broken", unasked, "requests", bound=0),
        *left.rows(),
        Row("other ids than before", wrong, "requests", bound=0),
        Row("RSS of all, before", before["all"], "MiB"),
        Row("RSS of all, after", after["all"], "MiB", FORGIVEN_GROWTH * before["all"], after["all"] / before["all"]),
    ]
    return rows, not (left.any or wrong or unasked)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    count = FEW_REQUESTS if parser.parse_args().quick else REQUESTS
    chance, prompts = random.Random(SEED), held_out_prompts(PLACES)
    requests = [random_request(chance, prompts, number) for number in range(count)]
    config = tiny_pair_config(
        router={
            "max_running_sequences": RUNNING,
            "max_waiting_sequences": WAITING,
            "prefill_chunk_tokens": CHUNK_TOKENS,
        },
        target={"kv_cache_gib": 0.0625},
        drafters={"kv_cache_gib": 0.03125},
        ingress={"max_concurrent_per_key": PLACES},
    )
    with running_service(config) as service:
        rows, well = measure(service, requests, prompts)
    report("cancels", rows)
    if not well:
        raise SystemExit("something is left, or an answer was wrong")


if __name__ == "__main__":
    main()
