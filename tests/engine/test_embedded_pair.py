"""The embedded pair is one that speculation pays for."""

from benchmarks.harness import ROOT
from deployments.in_process import answer_all
from deployments.text import TextCodec
from models.corpus import held_out_prompts
from tests.engine.whole_rounds import run_rounds
from workers.engine.config import EngineConfig
from workers.engine.engine import Engine
from workers.messages import GenerationRequest, SamplingParams, StopConditions
from workers.router.config import RouterConfig

PAIR = ROOT / "models" / "tiny-code"


def test_accepted_length_on_held_out_code_is_at_least_2_8() -> None:
    codec = TextCodec.load(str(PAIR / "target"))
    target, drafter = (
        Engine.load(EngineConfig(str(PAIR / part), "float32", "cpu", 0.25)) for part in ("target", "draft")
    )
    requests = [
        GenerationRequest(prompt, codec.encode(prompt), SamplingParams(temperature=0.0), StopConditions(max_tokens=64))
        for prompt in held_out_prompts(24)
    ]
    usages = run_rounds(lambda: answer_all(target, drafter, codec, RouterConfig(max_draft_tokens=4), requests))
    committed = sum(usage.committed_tokens for usage in usages)
    assert committed / sum(usage.verifications for usage in usages) >= 2.8
