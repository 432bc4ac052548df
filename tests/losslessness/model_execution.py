"""Whole rounds of one tiny model in every way in which its execution can be arranged; all but Ray and HTTP."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deployments.in_process import InProcessLink, registration
from tests.engine.whole_rounds import Outcome, generate, run_rounds
from tests.fakes import byte_tokenizer
from workers.decoding.detokenizer import IncrementalDetokenizer
from workers.drafters.model_drafter import ModelDrafter
from workers.engine.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.kv_pool import KVPool
from workers.engine.loading import LoadedModel, load_model
from workers.engine.tensor_parallel import RankGroup, TensorParallelRank, join
from workers.engine.verifier import Verifier
from workers.messages import (
    GenerationRequest,
    SamplingParams,
    SpeculationOptions,
    StopConditions,
    VerifyRequest,
    WorkerRequest,
    WorkerResponse,
    WorkerRole,
    token_ids,
)
from workers.router.config import RouterConfig
from workers.router.router import Router

BLOCK_TOKENS = 2
ROOMY_BLOCKS, SCARCE_BLOCKS = 240, 24
CHUNK_TOKENS, WHOLE_PROMPTS = 8, 512
MAX_TOKENS, DRAFT_TOKENS = 12, 3
DRAFTERS = {"random": 3.0, "noisy": 0.02, "own": 0.0}
"""Drafters that are hardly ever right, often right and always right, by the noise added to the target's weights."""
_SHARED = [(5 * position) % 83 + 3 for position in range(16)]
_TAILS = (3, 1, 4, 2, 6, 5)
_GREEDY = SamplingParams(temperature=0.0)
_SAMPLINGS = (
    *[_GREEDY] * len(DRAFTERS),
    SamplingParams(temperature=0.5, seed=11),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seed=12),
    SamplingParams(temperature=1.0, seed=13),
)


@dataclass(frozen=True)
class Case:
    """How the requests are run: which of the things that must not change the text take place."""

    prefix_caching: bool
    chunked: bool
    scarce: bool


PLAIN = Case(prefix_caching=False, chunked=False, scarce=False)


@dataclass(frozen=True)
class Result:
    """The ids of each request, and what took place; drafts and accepted drafts are by drafter."""

    ids: list[list[int]]
    prefix_hits: int
    preemptions: int
    most_chunks: int
    drafted: dict[str, int]
    accepted: dict[str, int]
    blocks_left: bool


@dataclass(frozen=True)
class Share:
    """A loaded model, or one rank's share of it, with a KV pool that engines of different sizes take turns in."""

    loaded: LoadedModel
    pool: KVPool
    group: RankGroup | None = None

    @classmethod
    def load(cls, folder: str, rank: TensorParallelRank | None = None) -> "Share":
        """Load the model, with the other ranks if it is split."""
        group = None if rank is None else join(rank, torch.device("cpu"))
        size = 1 if rank is None else rank.world_size
        loaded = load_model(EngineConfig(folder, device="cpu", kv_cache_gib=0.001, tensor_parallel_size=size))
        pool = KVPool.create(loaded.kv_shape, ROOMY_BLOCKS, BLOCK_TOKENS, loaded.device)
        if group is not None:
            group.open()
        return cls(loaded, pool, group)

    def engine(self, blocks: int = ROOMY_BLOCKS, prefix_caching: bool = False) -> Engine:
        """An engine over the first `blocks` blocks, which are all free."""
        return Engine(self.loaded, self.pool, blocks, self.group, prefix_caching)


class WatchingLink(InProcessLink):
    """Counts the steps that only read, by sequence: all chunks of a prompt but the last."""

    def __init__(self, worker: Any) -> None:
        super().__init__(worker)
        self.chunks: Counter[int] = Counter()

    async def call(self, message: WorkerRequest, deadline_s: float) -> WorkerResponse | None:
        if isinstance(message, VerifyRequest):
            self.chunks.update(item.sequence_id for item in message.items if not item.sample)
        return await super().call(message, deadline_s)


def requests() -> list[GenerationRequest]:
    """Prompts that begin alike: with each of the drafters one that is continued greedily, and one that is sampled."""
    return [
        GenerationRequest(
            f"request-{index}",
            token_ids([*_SHARED, *((11 * index + 7 * position) % 83 + 5 for position in range(tail))]),
            sampling,
            StopConditions(MAX_TOKENS),
            SpeculationOptions(drafter=tuple(DRAFTERS)[index % len(DRAFTERS)]),
        )
        for index, (tail, sampling) in enumerate(zip(_TAILS, _SAMPLINGS, strict=True))
    ]


def is_greedy(request: GenerationRequest) -> bool:
    return request.sampling.temperature == 0


def plain_ids(target: Share) -> list[list[int]]:
    """What the requests give one after the other, without drafts, prefix cache, chunks and preemption."""

    async def run() -> list[list[int]]:
        router, _, _ = await _service(target.engine(), {}, PLAIN)
        outcomes = [await generate(router, request) for request in requests()]
        await router.close()
        return [outcome.ids for outcome in outcomes]

    return run_rounds(run)


def run_case(target: Share, drafters: Mapping[str, Share], case: Case) -> Result:
    """Run all requests at once, those after the first when that has begun to answer."""
    engine = target.engine(SCARCE_BLOCKS if case.scarce else ROOMY_BLOCKS, case.prefix_caching)
    engines = {name: share.engine(prefix_caching=case.prefix_caching) for name, share in drafters.items()}

    async def run() -> Result:
        router, link, workers = await _service(engine, engines, case)
        first, *others = requests()
        early = asyncio.create_task(generate(router, first))
        while not early.done() and (await router.status()).totals.committed_tokens == 0:
            await asyncio.sleep(0)
        outcomes = await asyncio.gather(early, *(generate(router, request) for request in others))
        await asyncio.sleep(0.02)
        totals = (await router.status()).totals
        await router.close()
        stats = [worker.stats() for worker in workers]
        return Result(
            [outcome.ids for outcome in outcomes],
            stats[0].prefix_cache_hits,
            totals.preemptions,
            max(link.chunks.values(), default=0) + 1,
            _by_drafter(outcomes, "draft_tokens"),
            _by_drafter(outcomes, "accepted_tokens"),
            any(stat.sequences or stat.free_blocks != stat.total_blocks for stat in stats),
        )

    return run_rounds(run)


async def _service(
    engine: Engine, drafters: Mapping[str, Engine], case: Case
) -> tuple[Router, WatchingLink, list[Verifier | ModelDrafter]]:
    config = RouterConfig(
        max_draft_tokens=DRAFT_TOKENS if drafters else 0,
        prefill_chunk_tokens=CHUNK_TOKENS if case.chunked else WHOLE_PROMPTS,
        prefill_latency_factor=1e6,  # beside streams, too, `prefill_chunk_tokens` alone decides
    )
    tokenizer = byte_tokenizer().backend_tokenizer
    router = Router(config, lambda prompt: IncrementalDetokenizer(tokenizer, prompt.tolist()))
    workers: list[Verifier | ModelDrafter] = [Verifier(engine)]
    link = WatchingLink(workers[0])
    await router.register(registration(WorkerRole.TARGET, engine), link)
    for name, drafter in drafters.items():
        workers.append(ModelDrafter(drafter))
        await router.register(registration(WorkerRole.DRAFT, drafter, name), InProcessLink(workers[-1]))
    return router, link, workers


def _by_drafter(outcomes: Sequence[Outcome], count: str) -> dict[str, int]:
    sums = dict.fromkeys(DRAFTERS, 0)
    for outcome in outcomes:
        if outcome.usage.drafter is not None:
            sums[outcome.usage.drafter] += getattr(outcome.usage, count)
    return sums


def load_drafters(folder: Path) -> dict[str, Share]:
    """Load the drafters that are saved inside the target's folder."""
    return {name: Share.load(str(folder / name)) for name in DRAFTERS}
