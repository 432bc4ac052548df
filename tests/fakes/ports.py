"""Ports that nobody else gets between their choice and their use."""

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def kept_port() -> Iterator[int]:
    """Yield a free port of 127.0.0.1, and keep it from all others who ask for any free one until the block ends.

    Who is told of it can listen there, as servers do with SO_REUSEADDR: the port is bound here, but nobody listens.
    """
    with socket.socket() as keeper:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind(("127.0.0.1", 0))
        yield keeper.getsockname()[1]
