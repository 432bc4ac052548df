"""How long streams stall while a long prompt arrives: read in pieces that fit their steps, against read at once.

`make bench BENCH=prefill` (`QUICK=1`: fewer prompts) runs router, target and first drafter of a Serve config file in
threads of this process, without Ray and HTTP: the embedded pair, or `ARGS="--config FILE --prompt-tokens N"`. Arrivals
of both kinds take turns, so that drift of the machine cancels.
"""

import argparse
import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median

import yaml

from benchmarks.harness import ROOT, Row, report
from deployments.config import LeadoutConfig, WorkerSection, parse_config
from deployments.in_process import registration
from deployments.preflight import resolve_models
from deployments.text import TextCodec
from models.corpus import held_out_prompts
from workers.decoding.detokenizer import IncrementalDetokenizer
from workers.drafters.model_drafter import ModelDrafter
from workers.emulated.thread_link import ThreadLink
from workers.engine.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.verifier import Verifier
from workers.messages import (
    GenerationFailed,
    GenerationRequest,
    SamplingParams,
    StopConditions,
    TokenIds,
    WorkerRole,
    token_ids,
)
from workers.router.config import RouterConfig
from workers.router.router import Router

STREAMS = 4
STREAM_PROMPT_TOKENS = 32
DEADLINE_S = 600.0
"""A large model reads a long prompt at once for minutes on a slow machine."""
WARM_UP_ROUNDS = 8
"""What each stream has had before the long prompt arrives: enough to know its usual gaps."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The engines of a deployment, and text to ask about."""

    target: Engine
    drafter: Engine | None
    codec: TextCodec
    text: TokenIds


@dataclass(slots=True)
class Arrival:
    """When tokens of the streams came (seconds, one list per stream), and when the long prompt was being read."""

    token_times_s: list[list[float]] = field(default_factory=lambda: [[] for _ in range(STREAMS)])
    began_s: float = 0.0
    first_token_s: float = 0.0

    def gaps_ms(self, while_reading: bool) -> list[float]:
        """Return the streams' gaps that began before the prompt arrived, or those that were open while it was read."""
        return [
            (after - before) * 1e3
            for times in self.token_times_s
            for before, after in pairwise(times)
            if (after > self.began_s and before < self.first_token_s if while_reading else after <= self.began_s)
        ]

    @property
    def reading_ms(self) -> float:
        """The time to the long prompt's first token."""
        return (self.first_token_s - self.began_s) * 1e3


def load_pair(config: LeadoutConfig) -> Pair:
    """Load target and first drafter. Prefixes are not cached: both kinds of arrival read the same prompts."""
    codec = TextCodec.load(config.target.model)
    drafter = Engine.load(_without_cache(config.drafters[0])) if config.drafters else None
    text = [token for prompt in held_out_prompts(380) for token in codec.encode(prompt).tolist()]
    return Pair(Engine.load(_without_cache(config.target)), drafter, codec, token_ids(text))


def _without_cache(section: WorkerSection) -> EngineConfig:
    return replace(section.engine_config(), prefix_caching=False)


@contextlib.asynccontextmanager
async def serving(pair: Pair, config: RouterConfig) -> AsyncIterator[Router]:
    """A router over the pair that has answered one long prompt before, as a service in use has."""
    router = Router(config, lambda prompt: IncrementalDetokenizer(pair.codec.backend, prompt.tolist()))
    links = [ThreadLink(Verifier(pair.target))]
    await router.register(registration(WorkerRole.TARGET, pair.target), links[0])
    if pair.drafter is not None:
        links.append(ThreadLink(ModelDrafter(pair.drafter)))
        await router.register(registration(WorkerRole.DRAFT, pair.drafter), links[1])
    await _take(router, _asked(pair, 0, pair.target.context_length // 2, 16), [])
    yield router
    await router.close()
    for link in links:
        await asyncio.to_thread(link.close)


def _asked(pair: Pair, number: int, prompt_tokens: int, max_tokens: int) -> GenerationRequest:
    """A greedy request whose prompt is the text from somewhere on."""
    start = (number * 997) % (len(pair.text) - prompt_tokens)
    prompt = pair.text[start : start + prompt_tokens]
    return GenerationRequest(
        str(number), prompt, SamplingParams(temperature=0.0), StopConditions(max_tokens), timeout_s=36_000
    )


async def _take(router: Router, asked: GenerationRequest, times_s: list[float]) -> None:
    """Note when tokens come."""
    async for event in router.generate(asked):
        if isinstance(event, GenerationFailed):
            raise RuntimeError(event.message)
        times_s.append(time.perf_counter())


async def one_arrival(router: Router, pair: Pair, number: int, prompt_tokens: int) -> Arrival:
    """Let a prompt arrive while the streams run; they may have half the context, so that they outlast it."""
    arrival, max_tokens = Arrival(), pair.target.context_length // 2
    streams = [
        asyncio.create_task(_take(router, _asked(pair, number * 10 + index, STREAM_PROMPT_TOKENS, max_tokens), times))
        for index, times in enumerate(arrival.token_times_s)
    ]
    while min(map(len, arrival.token_times_s)) < WARM_UP_ROUNDS:
        await asyncio.sleep(0.001)
    arrival.began_s = time.perf_counter()
    times: list[float] = []
    await _take(router, _asked(pair, number * 10 + 5, prompt_tokens, 1), times)
    arrival.first_token_s = times[0]
    while min(stream[-1] for stream in arrival.token_times_s) < arrival.first_token_s:
        await asyncio.sleep(0.001)
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    return arrival


async def measure(
    pair: Pair, configs: dict[str, RouterConfig], prompt_tokens: int, repeats: int
) -> dict[str, list[Arrival]]:
    """Return the arrivals of each configuration."""
    arrivals: dict[str, list[Arrival]] = {name: [] for name in configs}
    async with contextlib.AsyncExitStack() as stack:
        routers = {name: await stack.enter_async_context(serving(pair, config)) for name, config in configs.items()}
        for number in range(1, repeats + 1):
            for name, router in routers.items():
                arrivals[name].append(await one_arrival(router, pair, number, prompt_tokens))
                worst = max(arrivals[name][-1].gaps_ms(while_reading=True))
                print(f"{name}, arrival {number}: worst gap {worst:.0f} ms", flush=True)
    return arrivals


def rows_of(arrivals: dict[str, list[Arrival]], factor: float) -> Iterator[Row]:
    """Yield medians over the arrivals; the ratio of a worst gap is to the usual gap before the prompt came."""
    for name, measured in arrivals.items():
        usual = median(gap for arrival in measured for gap in arrival.gaps_ms(while_reading=False))
        worst = median(max(arrival.gaps_ms(while_reading=True)) for arrival in measured)
        yield Row(f"{name}: usual gap of {STREAMS} streams", usual, "ms")
        yield Row(f"{name}: worst gap while the prompt is read", worst, "ms", bound=factor * usual, ratio=worst / usual)
        yield Row(f"{name}: time to the prompt's first token", median(a.reading_ms for a in measured), "ms")
    at_once, in_pieces = (
        [max(arrival.gaps_ms(while_reading=True)) for arrival in measured] for measured in arrivals.values()
    )
    ratios = [pieces / whole for whole, pieces in zip(at_once, in_pieces, strict=True)]
    yield Row("worst gap in pieces / at once", median(ratios), "ratio", ratio=median(ratios))


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--config", type=Path, default=ROOT / "deployments" / "tiny-code.yaml")
    parser.add_argument("--prompt-tokens", type=int, help="of the prompt that arrives; default: nearly the context")
    parser.add_argument("--repeats", type=int, help="prompts of each kind; default: 8, 2 with --quick")
    options = parser.parse_args()
    content = yaml.safe_load(options.config.read_text())
    config = resolve_models(parse_config(content["applications"][0]["args"]))
    pair = load_pair(config)
    limits = config.router_config()
    at_once = RouterConfig(
        limits.max_draft_tokens,
        prefill_chunk_tokens=pair.target.context_length,
        prefill_latency_factor=1e9,
        verify_deadline_s=DEADLINE_S,
    )
    in_pieces = RouterConfig(
        limits.max_draft_tokens,
        prefill_chunk_tokens=limits.prefill_chunk_tokens,
        prefill_latency_factor=limits.prefill_latency_factor,
        verify_deadline_s=DEADLINE_S,
    )
    configs = {"at once": at_once, f"in pieces, factor {limits.prefill_latency_factor:g}": in_pieces}
    prompt_tokens = options.prompt_tokens or pair.target.context_length - 1
    repeats = options.repeats or (2 if options.quick else 8)
    arrivals = asyncio.run(measure(pair, configs, prompt_tokens, repeats))
    print(f"prompt of {prompt_tokens} tokens", flush=True)
    report("prefill", list(rows_of(arrivals, limits.prefill_latency_factor)))


if __name__ == "__main__":
    main()
