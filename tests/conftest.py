"""What holds for all tests: one thread each, and one process for all that start a service."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

END_TO_END = Path(__file__).parent / "end_to_end"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several test processes, one runs all end-to-end tests: each other would start a service of its own."""
    for item in items:
        if END_TO_END in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("end_to_end"))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small are slower with several, and tests share the machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
