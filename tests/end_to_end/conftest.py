"""One service for all end-to-end tests."""

from collections.abc import Iterator

import pytest

from benchmarks.harness import Service, running_service, tiny_pair_config
from models.corpus import held_out_prompts
from tests.end_to_end.collector import Collector, collecting


@pytest.fixture(scope="package")
def collector() -> Iterator[Collector]:
    """Takes the spans of the service."""
    with collecting() as running:
        yield running


@pytest.fixture(scope="package")
def service(collector: Collector) -> Iterator[Service]:
    """The shipped configuration, but always drafting, for all at once. It traces for clients that trace.

    Left to itself it does not draft where that does not pay, as on a machine that is busy with other tests.
    """
    config = tiny_pair_config(
        telemetry={"endpoint": collector.endpoint, "sample_ratio": 0.0},
        speculation={"draft_length_policy": "fixed", "bench_drafters": False, "max_cohorts": 1},
    )
    with running_service(config) as running:
        yield running


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    """Prompts from modules that the pair was not trained on."""
    return held_out_prompts(24)
