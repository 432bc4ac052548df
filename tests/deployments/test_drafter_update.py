"""What may be changed of a drafter while the service runs, and what becomes of its worker then."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from deployments.app import wire
from deployments.config import DrafterSection, parse_config
from deployments.drafter_update import updated_section
from deployments.pools import DraftPool
from deployments.preflight import ServedModel
from deployments.supervision import StartedWorker
from tests.deployments.test_supervision import REGISTRATION, NotedWorker, RecordingRouter
from tests.limits import HANG_S
from workers.errors import ConfigurationError
from workers.telemetry.config import BY_ENVIRONMENT

SECTION = DrafterSection(name="tiny", model="models/tiny-code/draft", dtype="float32", num_cpus=0.5)


def test_an_update_changes_the_keys_that_it_names_and_no_other() -> None:
    updated = updated_section(SECTION, {"quantization": "int8", "emulated": {"step_ms": 9.0}})
    assert updated == SECTION.model_copy(update={"quantization": "int8", "emulated": updated.emulated})
    assert updated.emulated is not None and updated.emulated.step_ms == 9.0
    assert updated_section(SECTION, {}) == SECTION


@pytest.mark.parametrize(
    ("user_config", "complaint"),
    [
        ({"modell": "x"}, "drafter tiny: user_config.modell: Extra inputs"),
        ({"kv_cache_gib": -1.0}, "drafter tiny: user_config.kv_cache_gib: Input should be greater than 0"),
        ({"emulated": {"step_ms": "9"}}, "user_config.emulated.step_ms"),
        ({"num_gpus": 1.0}, "drafter tiny: user_config.num_gpus cannot be changed while the drafter runs"),
        ({"replicas": 2}, "user_config.replicas cannot be changed"),
        (["model"], "drafter tiny: user_config must have keys"),
    ],
)
def test_what_an_update_cannot_mean_is_refused_by_name(user_config: object, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        updated_section(SECTION, user_config)


def test_an_update_drains_the_old_worker_before_the_new_one_starts_and_only_if_something_changed(
    tmp_path: Path,
) -> None:
    async def run() -> None:
        router: Any = RecordingRouter()
        pool = DraftPool(SECTION, router, 10.0, 10.0, BY_ENVIRONMENT, SECTION.model)
        started: list[DrafterSection] = []

        async def start() -> StartedWorker:
            started.append(pool._running)
            router.calls.append("started")
            return NotedWorker(REGISTRATION, None, (), ended=router.calls)

        pool._start_worker = start  # type: ignore[method-assign]
        await pool.reconfigure({})
        await pool.reconfigure({})
        assert router.calls == ["started", "register"]
        await pool.reconfigure({"quantization": "int8"})
        assert router.calls[-5:] == ["drain", "unregister", "killed", "started", "register"]
        assert [section.quantization for section in started] == ["none", "int8"]
        with pytest.raises(ConfigurationError):
            await pool.reconfigure({"model": str(tmp_path)})
        assert router.calls.count("drain") == 1  # what cannot serve replaces nothing
        await pool.reconfigure({})
        assert started[-1].quantization == "none"
        retiring = pool.__del__()
        assert retiring is not None
        await retiring

    asyncio.run(asyncio.wait_for(run(), HANG_S))


def test_every_drafter_of_an_application_is_updated_by_its_own_deployment() -> None:
    drafters = [{"name": name, "model": "m"} for name in ("small", "smaller")]
    found: dict[str, Any] = {}

    def collect(application: Any) -> None:
        deployment = application._bound_deployment
        found[deployment.name] = deployment._deployment_config.user_config
        for argument in deployment.init_args:
            for bound in argument if isinstance(argument, list) else [argument]:
                if hasattr(bound, "_bound_deployment"):
                    collect(bound)

    collect(wire(parse_config({"target": {"model": "m"}, "drafters": drafters}), ServedModel("{}", 10, 32)))
    # What Serve is given at first is what it calls `reconfigure` with, so that there is a worker.
    assert {name for name, told in found.items() if told == {}} == {"DraftPool-small", "DraftPool-smaller"}
