"""What fits on a device, and what is said where it does not."""

from dataclasses import replace

import pytest

from cluster.accelerators import CATALOGUE
from cluster.known_models import known_shape
from cluster.memory_plan import GIB, WorkerNeed, memory_problems, memory_warnings, plan_memory
from cluster.model_shapes import ModelShape


def shape(name: str) -> ModelShape:
    found = known_shape(name)
    assert found is not None
    return found


TARGET = WorkerNeed(
    key="target",
    shape=shape("Llama-3.1-70B"),
    dtype="bfloat16",
    quantization="none",
    ranks=4,
    pool_bytes=24 * GIB,
    context_tokens=16_384,
    sequences=32,
    step_tokens=800,
    logit_rows=288,
)


def problems(need: WorkerNeed, device: str) -> list[str]:
    return list(memory_problems(plan_memory(need, CATALOGUE[device])))


def test_70b_over_four_gpus_takes_its_share_of_weights_and_kv() -> None:
    plan = plan_memory(TARGET, CATALOGUE["A100-80GB"])
    norms = (2 * 80 + 1) * 8192
    assert plan.weights == 2 * ((70_553_706_496 - norms) // 4 + norms)
    assert plan.token_bytes == 2 * 80 * 2 * 128 * 2
    assert plan.pool_tokens == 24 * GIB // plan.token_bytes // 16 * 16
    assert plan.fits and not problems(TARGET, "A100-80GB")
    assert [line for line in memory_warnings(plan) if line.startswith("target.kv_cache_gib: 314560 tokens are 19.2 ")]


def test_what_does_not_fit_is_named_with_what_would() -> None:
    (line,) = problems(TARGET, "A100-40GB")
    assert line.startswith(
        "target does not fit on 4 x A100-40GB for Llama-3.1-70B in bfloat16 at TP 4: 35.3 GB weights"
    )
    assert "35.3 GB weights per GPU + 25.8 GB KV" in line
    assert "of 42.9 GB. Would fit: kv_cache_gib 4." in line and "4 x A100-80GB or H100 or H200" in line
    # Each remedy does what it says.
    smaller = float(line.split("kv_cache_gib ")[1].split(";")[0])
    assert not problems(replace(TARGET, pool_bytes=int(smaller * GIB), context_tokens=16), "A100-40GB")
    assert problems(replace(TARGET, pool_bytes=int((smaller + 0.1) * GIB), context_tokens=16), "A100-40GB")


def test_more_ranks_and_fewer_bits_are_offered_to_those_who_can_use_them() -> None:
    alone = replace(TARGET, ranks=1, pool_bytes=12 * GIB)
    (line,) = problems(alone, "A100-80GB")
    assert "tensor_parallel_size 2" not in line and "tensor_parallel_size 4 (4 x A100-80GB)" in line
    assert "quantization nf4" in line
    drafter = replace(alone, key="drafters[0]", shape=shape("Qwen2.5-14B"), pool_bytes=4 * GIB)
    (line,) = problems(drafter, "L4")
    assert "quantization int8" in line and "tensor_parallel_size" not in line
    assert problems(replace(drafter, quantization="int8"), "L4") == []


def test_a_context_that_the_pool_cannot_hold_is_a_problem() -> None:
    line = problems(replace(TARGET, pool_bytes=GIB), "A100-80GB")[0]
    assert line.startswith("target.kv_cache_gib: 1 GiB hold 13104 tokens, and one context has 16384: 1.25 GiB needed")
    assert problems(replace(TARGET, pool_bytes=GIB * 5 // 4), "A100-80GB") == []


@pytest.mark.parametrize(("ranks", "counts"), [(3, ["64 attention heads", "8 KV heads"]), (16, ["8 KV heads"])])
def test_heads_must_divide(ranks: int, counts: list[str]) -> None:
    lines = problems(replace(TARGET, ranks=ranks), "H200")
    assert [line.split("divide the ")[1].split(" of ")[0] for line in lines] == counts


def test_processes_share_a_gpu_and_a_cpu_refuses_nothing() -> None:
    small = replace(TARGET, key="drafters[0]", shape=shape("Llama-3.2-1B"), ranks=1, pool_bytes=8 * GIB)
    assert plan_memory(small, CATALOGUE["L4"]).fits
    assert not plan_memory(replace(small, device_share=0.5), CATALOGUE["L4"]).fits
    assert problems(replace(TARGET, ranks=1), "CPU") == []
    assert problems(small, "T4") == ["drafters[0].dtype: T4 has no bfloat16; use float16"]
