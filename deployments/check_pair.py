"""Whether a drafter suits a target: what their files say, what fits into memory, and what drafting would bring.

The router and both workers run in this process, without Ray and HTTP.
"""

import asyncio
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from cluster.capacity import speed_up
from deployments.in_process import answer_all
from deployments.pair_prompts import BEGINNINGS, QUESTIONS
from deployments.text import TextCodec
from workers.engine.auto_quantization import load_drafter
from workers.engine.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.loading import load_config, needed_bytes, resolve_device
from workers.engine.memory import available_bytes
from workers.engine.pair import PairRow
from workers.engine.step import StepInput
from workers.errors import ConfigurationError, InvalidRequestError
from workers.messages import (
    GenerationRequest,
    SamplingParams,
    SpeculationUsage,
    StopConditions,
    TokenIds,
    token_ids,
)
from workers.router.config import RouterConfig

DRAFT_LENGTHS = (1, 2, 4, 8)
MEASURED_DRAFT_TOKENS = 4
_CONTEXT_TOKENS = 1024
_KV_CACHE_GIB = 0.5
_STEP_CONTEXT_TOKENS = 128
_WARM_UPS, _REPEATS = 2, 5
_DEADLINE_S = 600.0
_REQUEST_TIMEOUT_S = 36_000.0


@dataclass(frozen=True, slots=True)
class PairOptions:
    """How the pair is run: dtype of both, CPU threads, quantisation of the drafter, tokens of each answer."""

    dtype: str = "bfloat16"
    threads: int | None = None
    quantization: str = "none"
    max_tokens: int = 48

    def target(self, model: str) -> EngineConfig:
        """Return the target's engine configuration."""
        return EngineConfig(
            model,
            self.dtype,
            kv_cache_gib=_KV_CACHE_GIB,
            max_context_tokens=_CONTEXT_TOKENS,
            threads=self.threads,
        )

    def drafter(self, model: str) -> EngineConfig:
        """Return the drafter's engine configuration."""
        return replace(self.target(model), quantization=self.quantization, quantised_output=True)


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a run gave. Times in milliseconds, of one sequence.

    `acceptance` is the share of drafts accepted where all before them were; `verify_ms` is by tokens read.
    """

    acceptance: float
    accepted_length: float
    draft_ms: float
    verify_ms: Mapping[int, float]

    def speed_up(self, draft_tokens: int) -> float:
        """Return the expected speed over plain decoding's, messages and draws not counted."""
        verify_ms = self.verify_ms[draft_tokens + 1]
        return speed_up(self.acceptance, draft_tokens, self.draft_ms, verify_ms, self.verify_ms[1])

    @property
    def best_draft_tokens(self) -> int:
        """The draft length, of those measured, with the largest expected speed."""
        return max(DRAFT_LENGTHS, key=self.speed_up)


def memory_row(target: str, drafter: str, options: PairOptions) -> PairRow:
    """Compare what both need on one device with what is free there. Raises ConfigurationError as loading would."""
    drafter_config = options.drafter(drafter)
    # Measuring loads the plain form too.
    plain = options.quantization == "auto"
    device = resolve_device("auto")
    needed = [
        needed_bytes(options.target(target), device),
        needed_bytes(options.target(drafter) if plain else drafter_config, device),
    ]
    available = available_bytes(device)
    first, second = (f"{count / 2**30:.3g} GiB" for count in needed)
    if available is None:
        return PairRow("memory", first, second, note="what is available is not known")
    left = f"{available / 2**30:.3g} GiB available on {device}"
    if sum(needed) > available:
        return PairRow("memory", first, second, problem=f"{sum(needed) / 2**30:.3g} GiB needed on one device, {left}")
    return PairRow("memory", first, second, note=left)


def model_row(target: str, drafter: str) -> PairRow:
    """Name both models' kinds. Raises ConfigurationError when transformers knows one of them not."""
    return PairRow("model", *(str(load_config(model).model_type) for model in (target, drafter)))


def measure_pair(target: str, drafter: str, options: PairOptions, step: Callable[[str], None]) -> Measurement:
    """Load both models and run them; `step` is told what happens. Raises ConfigurationError when one cannot run."""
    step(f"Loading target {target}")
    target_engine = Engine.load(options.target(target))
    step(f"Loading drafter {drafter} (quantization {options.quantization})")
    drafter_engine = load_drafter(options.drafter(drafter))
    if target_engine.vocabulary_size != drafter_engine.vocabulary_size:
        raise ConfigurationError(
            f"target {target} has {target_engine.vocabulary_size} token ids, drafter {drafter} has "
            f"{drafter_engine.vocabulary_size}"
        )
    step("Timing single steps")
    verify_ms = {count: _step_ms(target_engine, count) for count in (1, *(k + 1 for k in DRAFT_LENGTHS))}
    draft_ms = _step_ms(drafter_engine, 1)
    step("Answering prompts")
    acceptance, accepted_length = answer_prompts(
        target_engine, drafter_engine, TextCodec.load(target), options.max_tokens
    )
    return Measurement(acceptance, accepted_length, draft_ms, verify_ms)


def answer_prompts(target: Engine, drafter: Engine, codec: TextCodec, max_tokens: int) -> tuple[float, float]:
    """Answer the built-in prompts greedily, with 4 drafts a round.

    Returns the acceptance of a draft whose predecessors were accepted, and the accepted length.
    """
    limit = min(target.context_length, drafter.context_length) // 2
    prompts = [prompt[:limit] for prompt in _prompts(codec)]
    config = RouterConfig(MEASURED_DRAFT_TOKENS, propose_deadline_s=_DEADLINE_S, verify_deadline_s=_DEADLINE_S)
    requests = _requests(target, codec, prompts, max_tokens)
    return _summary(asyncio.run(answer_all(target, drafter, codec, config, requests)))


def _step_ms(engine: Engine, new_tokens: int) -> float:
    """Return the median time of a step that reads `new_tokens` of one sequence after some context."""
    context = min(_STEP_CONTEXT_TOKENS, engine.context_length - new_tokens)
    if context < 1:
        raise ConfigurationError(f"a context of {engine.context_length} tokens is too short to measure")
    ids = token_ids([index % engine.vocabulary_size for index in range(context + new_tokens)])
    engine.start(0)
    engine.forward([StepInput(0, 0, ids[:context], 1)])
    durations = []
    for _ in range(_WARM_UPS + _REPEATS):
        began = time.perf_counter()
        engine.forward([StepInput(0, context, ids[context:], new_tokens)]).cpu()
        durations.append((time.perf_counter() - began) * 1e3)
    engine.release((0,))
    return statistics.median(durations[_WARM_UPS:])


def _prompts(codec: TextCodec) -> list[TokenIds]:
    try:
        return [codec.encode_chat([{"role": "user", "content": text}]) for text in QUESTIONS]
    except InvalidRequestError:  # no chat template, or one for other roles
        return [codec.encode(text) for text in BEGINNINGS]


def _requests(
    target: Engine, codec: TextCodec, prompts: Sequence[TokenIds], max_tokens: int
) -> list[GenerationRequest]:
    """Return greedy requests, as long as the context allows."""
    return [
        GenerationRequest(
            str(index),
            prompt,
            SamplingParams(temperature=0.0, seed=index),
            StopConditions(min(max_tokens, target.context_length - len(prompt) - 1), codec.end_token_ids),
            timeout_s=_REQUEST_TIMEOUT_S,
        )
        for index, prompt in enumerate(prompts)
    ]


def _summary(usages: Sequence[SpeculationUsage]) -> tuple[float, float]:
    """Return the acceptance of a draft whose predecessors were accepted, and the accepted length."""
    drafted, accepted, verifications, committed = (
        sum(counts)
        for counts in zip(
            *((each.draft_tokens, each.accepted_tokens, each.verifications, each.committed_tokens) for each in usages),
            strict=True,
        )
    )
    rate = accepted / drafted if drafted else 0.0
    return _acceptance_of_one(rate), committed / max(verifications, 1)


def _acceptance_of_one(rate: float) -> float:
    """Return the a for which `rate` of the drafts of a whole chain is accepted: the mean of a, a², … a^k."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        mean = sum(middle ** (place + 1) for place in range(MEASURED_DRAFT_TOKENS)) / MEASURED_DRAFT_TOKENS
        low, high = (middle, high) if mean < rate else (low, middle)
    return high
