"""The follower process of the tensor-parallel tests: `python -m tests.engine.tensor_parallel_peer FOLDER PORT TIMEOUT`.

It joins after an empty line. Its exit status says how following ended: 0 stopped, 3 the link closed, 4 refused at
start-up.
"""

import sys

import torch

from workers.engine.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.tensor_parallel import TensorParallelRank, follow
from workers.errors import ConfigurationError, LinkClosedError


def load(folder: str, rank: int, port: int, timeout_s: float) -> Engine:
    """Load one of two ranks."""
    config = EngineConfig(folder, device="cpu", kv_cache_gib=0.001, tensor_parallel_size=2, threads=1)
    return Engine.load(config, TensorParallelRank(rank, 2, "127.0.0.1", port, timeout_s))


def wait_for_go() -> None:
    """Say that all is imported, and wait for a line from the test."""
    print("imported", flush=True)
    sys.stdin.readline()


def main() -> int:
    folder, port, timeout_s = sys.argv[1:]
    wait_for_go()
    torch.set_num_threads(1)
    try:
        engine = load(folder, 1, int(port), float(timeout_s))
        follow(engine)
    except LinkClosedError:
        return 3
    except ConfigurationError:
        return 4
    engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
