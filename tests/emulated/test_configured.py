"""A deployment's workers take the time that its configuration gives them."""

from pathlib import Path

import pytest

from deployments.config import LeadoutConfig, parse_config
from tests.emulated.conftest import StandingClock
from tests.in_process import save_byte_llama
from tests.limits import HANG_S
from workers.draft_worker import DraftWorker
from workers.errors import ConfigurationError
from workers.messages import (
    ProposeItem,
    ProposeRequest,
    ProposeResponse,
    SamplingParams,
    VerifyItem,
    VerifyRequest,
    VerifyResponse,
    token_ids,
)
from workers.target_worker import TargetWorker

PROMPT = token_ids([1, 2, 3, 4])


def config(folder: Path, target: dict[str, float] | None, drafter: dict[str, float] | None) -> LeadoutConfig:
    model = {"model": str(folder), "dtype": "float32", "kv_cache_gib": 0.01}
    drafters = [model | {"name": "tiny", "emulated": drafter}]
    return parse_config({"target": model | {"emulated": target}, "drafters": drafters})


def test_emulated_workers_say_that_a_step_took_the_emulated_time(tmp_path: Path, clock: StandingClock) -> None:
    save_byte_llama(tmp_path)
    both = config(
        tmp_path, {"base_ms": 700.0, "token_ms": 1.0}, {"step_ms": 600.0, "row_ms": 0.0, "read_token_ms": 0.0}
    )
    drafter = DraftWorker("drafter", "tiny", both.drafters[0].spec())
    target = TargetWorker("target", "tiny", both.target.engine_config(), rank=0)
    drafter.load()
    target.load(("", 0), timeout_s=HANG_S)
    sampling = SamplingParams(temperature=0)
    proposed = drafter.handle(ProposeRequest((ProposeItem(1, 0, 0, PROMPT, 1, sampling, 4),)))
    verified = target.handle(VerifyRequest((VerifyItem(1, 0, 0, PROMPT, sampling=sampling, prompt_tokens=4),)))
    assert isinstance(proposed, ProposeResponse) and isinstance(verified, VerifyResponse)
    assert (proposed.compute_ms, verified.compute_ms) == (600.0, 704.0)
    assert clock.now_s * 1e3 == pytest.approx(600.0 + 704.0)


def test_without_the_key_nothing_is_emulated(tmp_path: Path) -> None:
    plain = config(tmp_path, None, None)
    assert plain.target.engine_config().emulated is None
    assert plain.drafters[0].spec().emulated is None


def test_impossible_times_are_refused_by_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"target\.emulated\.base_ms"):
        config(tmp_path, {"base_ms": -1.0}, None)
