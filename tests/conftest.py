"""What holds for all tests: one thread each, one process for all that start a service, no property against time."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

END_TO_END = "tests/end_to_end/"
# How long an example takes says something of the machine only, and a failure can be seen again.
settings.register_profile("any machine", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


class SharedFixtures(LoadScopeScheduling):
    """Keeps together what shares models, processes or a service: the tests of a module, and all end-to-end tests."""

    def _split_scope(self, nodeid: str) -> str:
        return END_TO_END if nodeid.startswith(END_TO_END) else nodeid.split("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> SharedFixtures:
    """Schedule so wherever there are several test processes."""
    return SharedFixtures(config, log)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small are slower with several, and tests share the machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
