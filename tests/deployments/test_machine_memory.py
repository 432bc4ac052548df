"""A deployment that this machine cannot hold is refused before anything starts, with keys and both numbers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from deployments.config import LeadoutConfig, parse_config
from deployments.local_service import local_service
from deployments.machine_memory import check_machine_memory
from tests.engine.whole_rounds import noisy_copy
from tests.in_process import save_byte_llama
from workers.engine.loading import memory_need
from workers.errors import ConfigurationError

POOL = 2**28


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a drafter of the same shape in its folder `draft`."""
    folder = tmp_path_factory.mktemp("model")
    noisy_copy(save_byte_llama(folder), folder / "draft", 0.02)
    return folder


def deployment(model: Path, drafters: int = 1, **target: Any) -> LeadoutConfig:
    """Pools of a quarter of a GiB."""
    common: dict[str, Any] = {"dtype": "float32", "kv_cache_gib": 0.25, "device": "cpu"}
    return parse_config(
        {
            "target": {"model": str(model), **common, **target},
            "drafters": [{"model": str(model / "draft"), "name": f"d{index}", **common} for index in range(drafters)],
        }
    )


def weights(model: Path, **options: Any) -> int:
    """Bytes of the weights in one process."""
    return memory_need(deployment(model, **options).target.engine_config(), torch.device("cpu")).weights


def refused_with(config: LeadoutConfig, available: int, monkeypatch: pytest.MonkeyPatch) -> str | None:
    monkeypatch.setattr("deployments.machine_memory.total_bytes", lambda device: available)
    try:
        check_machine_memory(config)
    except ConfigurationError as error:
        return str(error)
    return None


def test_one_process_that_is_too_large_is_named_by_its_key(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = refused_with(deployment(model, kv_cache_gib=3.0), 2**30, monkeypatch)
    assert message is not None and "\n" not in message
    assert message.startswith(f"target.kv_cache_gib: one process of {model} needs 3 GiB (")
    assert "3 GiB of KV pool" in message and message.endswith("1 GiB are available on cpu")
    large = deployment(model)
    large = large.model_copy(update={"drafters": [large.drafters[0].model_copy(update={"kv_cache_gib": 2.0})]})
    message = refused_with(large, 2**30, monkeypatch)
    assert message is not None and message.startswith("drafters[0].kv_cache_gib: ")


def test_all_workers_of_the_machine_are_added_up(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exactly = 2 * weights(model) + 4 * POOL
    # Two drafters with one model share its weights, as the two replicas of the target do.
    config = deployment(model, drafters=2, replicas=2)
    assert refused_with(config, exactly, monkeypatch) is None
    message = refused_with(config, exactly - 1, monkeypatch)
    assert message is not None and "\n" not in message
    for part in ("target.kv_cache_gib 0.25 in 2 process(es)", "drafters[1].kv_cache_gib 0.25 in 1", "available"):
        assert part in message


def test_converted_weights_count_once_per_process(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = deployment(model, drafters=0, dtype="bfloat16", replicas=3)
    exactly = 3 * weights(model, dtype="bfloat16") + 3 * POOL
    assert refused_with(config, exactly, monkeypatch) is None
    assert refused_with(config, exactly - 1, monkeypatch) is not None


def test_the_ranks_of_a_target_share_its_weights_and_have_pools_of_their_own(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = deployment(model, drafters=0, tensor_parallel_size=2)
    exactly = weights(model) // 2 * 2 + 2 * POOL
    assert refused_with(config, exactly, monkeypatch) is None
    assert refused_with(config, exactly - 1, monkeypatch) is not None


def test_what_is_not_known_refuses_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.machine_memory.total_bytes", lambda device: None)
    check_machine_memory(deployment(model, kv_cache_gib=10_000.0))
    # A form that is yet to be chosen may be the smallest.
    config = deployment(model)
    auto = config.model_copy(update={"drafters": [config.drafters[0].model_copy(update={"quantization": "auto"})]})
    plain, smallest = (refused_with(each, 2 * weights(model) + 2 * POOL - 1, monkeypatch) for each in (config, auto))
    assert plain is not None and smallest is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has what is asked for")
def test_a_device_that_the_machine_does_not_have_is_named_by_its_key(model: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"^target\.device: .*no CUDA device"):
        check_machine_memory(deployment(model, device="cuda"))


def test_a_service_is_refused_before_anything_starts(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("started")

    monkeypatch.setattr("deployments.local_cluster.local_ray", fail)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    path = tmp_path / "serve.yaml"
    path.write_text(
        f"""
applications:
  - import_path: deployments.app:build_app
    args: {{target: {{model: {model}, dtype: float32, kv_cache_gib: 1000000, device: cpu}}}}
"""
    )
    with pytest.raises(ConfigurationError, match=r"^target\.kv_cache_gib: .*GiB are available on cpu$"):
        local_service(path, None, None).__enter__()
