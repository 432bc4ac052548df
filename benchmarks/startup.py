"""How long `leadout serve` takes until /ready answers, on an installed checkout.

`make bench BENCH=startup` (three starts), `QUICK=1` for one.
"""

import argparse
import time
from statistics import median

from benchmarks.harness import Row, report, running_service, tiny_pair_config


def seconds_to_ready(tensor_parallel_size: int) -> float:
    """Start the embedded pair once and stop it again."""
    began = time.perf_counter()
    with running_service(tiny_pair_config(target={"tensor_parallel_size": tensor_parallel_size}), with_drafters=False):
        return time.perf_counter() - began


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    starts = 1 if parser.parse_args().quick else 3
    rows = [
        Row(
            f"start to /ready, {size} target process(es)",
            median(seconds_to_ready(size) for _ in range(starts)),
            "s",
            bound=30.0,
        )
        for size in (1, 2)
    ]
    report("startup", rows)


if __name__ == "__main__":
    main()
