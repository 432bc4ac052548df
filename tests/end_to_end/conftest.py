"""One service for all end-to-end tests, and another with a tensor-parallel target."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.harness import Service, running_service, tiny_pair_config
from models.corpus import held_out_prompts


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Services take the whole machine: they run one after the other, in one of the test processes."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("end_to_end"))


@pytest.fixture(scope="package")
def service() -> Iterator[Service]:
    """The shipped configuration, as `make serve` runs it."""
    with running_service(tiny_pair_config()) as running:
        yield running


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    """Prompts from modules that the pair was not trained on."""
    return held_out_prompts(24)
