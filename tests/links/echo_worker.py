"""A process with one server, for tests that kill or stop it: `python -m tests.links.echo_worker ROUTER_KEY`.

Writes its address and key as one line, then answers until it is killed. A release of sequences (n, ...) takes n ms.
It takes no router for gone that is silent: a test that stops it, or is stopped itself, may take any time over it.
"""

import sys
import time

from tests.limits import HANG_S
from workers.links import curve
from workers.links.zmq_server import ZmqServer
from workers.messages import ReleaseRequest, WorkerRequest, WorkerResponse, WorkerStats


def answer(message: WorkerRequest) -> WorkerResponse | None:
    """Take as long as the message says."""
    if isinstance(message, ReleaseRequest) and message.sequence_ids:
        time.sleep(message.sequence_ids[0] / 1000)
        return None
    return WorkerStats(0, 7, 7)


if __name__ == "__main__":
    curve.SILENCE_MS = int(HANG_S * 1000)
    address = ZmqServer("127.0.0.1", answer).admit(sys.argv[1].encode())
    print(address.endpoint, address.public_key.decode(), flush=True)
    sys.stdin.read()
