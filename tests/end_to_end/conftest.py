"""One service for all end-to-end tests, and another with a tensor-parallel target."""

from collections.abc import Iterator

import pytest

from benchmarks.harness import Service, running_service, tiny_pair_config
from models.corpus import held_out_prompts


@pytest.fixture(scope="package")
def service() -> Iterator[Service]:
    """The shipped configuration, as `make serve` runs it."""
    with running_service(tiny_pair_config()) as running:
        yield running


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    """Prompts from modules that the pair was not trained on."""
    return held_out_prompts(24)
