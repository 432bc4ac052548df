"""OpenMP's threads: those of a thread that loads a model end with it, and none keeps a core from others for long."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import HANG_S
from workers.compute_threads import SPINS, in_own_thread

ROOT = Path(__file__).parents[2]
PROGRAM = """
import os, time
import torch
from workers.compute_threads import in_own_thread

def compute():
    return float((torch.ones(600, 600) @ torch.ones(600, 600)).sum())

def threads():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(2)
before, deadline = threads(), time.monotonic() + 100
assert in_own_thread(compute) == 600.0 ** 3
while threads() > before and time.monotonic() < deadline:
    time.sleep(0.01)
left = threads() - before
compute()
print(left, threads() - before)
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads by /proc")
def test_the_threads_of_a_model_that_was_loaded_are_gone() -> None:
    told = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, check=True, capture_output=True, timeout=HANG_S)
    left, begun_here = map(int, told.stdout.split())
    assert left == 0
    assert begun_here > 0, "OpenMP begins no threads, so nothing was shown"


@pytest.mark.parametrize(
    ("environment", "shown"),
    [
        ({}, f"GOMP_SPINCOUNT = '{SPINS}'"),
        ({"GOMP_SPINCOUNT": "7"}, "GOMP_SPINCOUNT = '7'"),
        ({"OMP_WAIT_POLICY": "passive"}, "GOMP_SPINCOUNT = '0'"),
    ],
)
def test_workers_tell_openmp_how_to_wait_unless_the_environment_does(environment: dict[str, str], shown: str) -> None:
    program = (
        "import workers.draft_worker, workers.target_worker; from workers.compute_threads import wait_briefly; "
        "wait_briefly(); import torch"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    told = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=kept | environment | {"OMP_DISPLAY_ENV": "verbose"},
        check=True,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert shown in told.stderr


def test_an_error_comes_back_as_it_is() -> None:
    def fails() -> None:
        raise KeyError("weights")

    with pytest.raises(KeyError, match="weights"):
        in_own_thread(fails)
