"""How messages reach a worker: one small protocol, over Ray actor calls or over ZeroMQ.

Importing this package imports neither of the two.
"""

from workers.links.base import Link, LinkKind

__all__ = ["Link", "LinkKind"]
