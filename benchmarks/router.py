"""The router on emulated devices: real rounds over synthetic workers that take the time of a 70B and a 1B model.

`make bench BENCH=router` takes half an hour, `QUICK=1` under three minutes. `ARGS="--sections bounds,load"` runs
some sections; with `--ray` overhead is measured through Ray actors, too. Every id is compared with plain decoding's,
and the run fails if one differs. All speeds are emulated: acceptance rates and device times are given, not measured.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable

import uvloop

from benchmarks.harness import Row, report
from benchmarks.router_ray import overhead_with_ray
from benchmarks.router_scale import overhead, scale
from benchmarks.router_speed import bounds, busy, load
from benchmarks.router_traffic import cohorts, drafters

SWITCH_INTERVAL_S = 0.0005
"""How long an emulated device that wakes up may wait for a thread that computes. Python's own 5 ms are a whole step."""

Section = Callable[[bool], Awaitable[list[Row]]]
SECTIONS: dict[str, Section] = {
    "bounds": bounds,
    "overhead": overhead,
    "load": load,
    "busy": busy,
    "cohorts": cohorts,
    "scale": scale,
    "drafters": drafters,
}


def chosen(names: str) -> list[str]:
    """Return the names of sections in `names`, separated by commas. Raises ArgumentTypeError for an unknown one."""
    asked = [name.strip() for name in names.split(",")]
    if unknown := [name for name in asked if name not in SECTIONS]:
        raise argparse.ArgumentTypeError(f"there is no section {unknown[0]!r}; there are {', '.join(SECTIONS)}")
    return asked


async def run(names: list[str], quick: bool, with_ray: bool) -> list[Row]:
    """Run the sections one after the other."""
    rows: list[Row] = []
    for name in names:
        began = time.perf_counter()
        rows += await SECTIONS[name](quick)
        if name == "overhead" and with_ray:
            rows += await overhead_with_ray(quick)
        print(f"{name}: {time.perf_counter() - began:.0f} s, all ids are those of plain decoding")
    return rows


def main() -> None:
    """Run the benchmark. WrongTextError ends it where an id is not plain decoding's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--sections", type=chosen, default=list(SECTIONS))
    parser.add_argument("--ray", action="store_true")
    parser.add_argument("--name", default="router", help="of the results file, for sections that run by themselves")
    options = parser.parse_args()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    # The loop that Ray gives the router.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        report(options.name, runner.run(run(options.sections, options.quick, options.ray)))


if __name__ == "__main__":
    main()
