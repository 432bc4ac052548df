"""The threads that OpenMP computes with on CPUs: gone with who began them, and no hindrance to other processes."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
SPINS = 2000
"""How often a thread without work looks for some before it sleeps: microseconds, not the milliseconds of GNU's default.

A step of a model hands out work hundreds of times, and who sleeps has to be woken each time. But a drafter and a target
on the same cores, each spinning while it waits for its own threads, hold each other up (BENCH=compute_threads).
"""


def wait_briefly() -> None:
    """Set how OpenMP's threads wait, unless the environment says so already; to be called before torch is imported."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPINS))


def in_own_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread of its own and return, or raise, what it does.

    OpenMP keeps a team of threads for every thread that has ever computed, and with more of them than cores it lets
    none spin. So whoever loads a model in one thread and runs it in another ends the first.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="load") as pool:
        return pool.submit(work).result()
