"""What holds for all tests: one thread each, and one process for all that start a service."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from xdist.scheduler import LoadScopeScheduling

END_TO_END = "tests/end_to_end/"


class OneProcessForServices(LoadScopeScheduling):
    """Hands each test to any process, but all end-to-end tests to one: each other would start a service of its own."""

    def _split_scope(self, nodeid: str) -> str:
        return END_TO_END if nodeid.startswith(END_TO_END) else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OneProcessForServices:
    """Schedule so wherever there are several test processes."""
    return OneProcessForServices(config, log)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small are slower with several, and tests share the machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
