"""How long tests wait for what should come at once."""

import time
from collections.abc import Callable

HANG_S = 120.0
"""Only a hang takes this long, however busy the machine is; pytest ends a test somewhat later."""


def wait_until(condition: Callable[[], bool]) -> None:
    """Look again and again until `condition` holds; fail after `HANG_S`."""
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, "not reached in time"
        time.sleep(0.05)
