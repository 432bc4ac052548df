"""The protocol of a link, whatever carries its messages."""

from typing import Literal, Protocol, TypeAlias

from workers.errors import DeadlineExceededError, LinkError
from workers.messages import WorkerRequest, WorkerResponse

LinkKind: TypeAlias = Literal["ray", "zmq"]
LinkChoice: TypeAlias = Literal["auto", "ray", "zmq"]


class Link(Protocol):
    """A way to one worker. Messages are answered in the order they were sent."""

    async def call(self, message: WorkerRequest, deadline_s: float) -> WorkerResponse | None:
        """Send `message`, at once, and return its answer.

        Raises LinkClosedError when the worker is gone, DeadlineExceededError when `deadline_s` seconds pass first,
        LinkError when the worker answered with an error.
        """
        ...


def deadline_exceeded(message: WorkerRequest, deadline_s: float) -> DeadlineExceededError:
    """Return the error of a message that got no answer in time."""
    return DeadlineExceededError(f"no answer to {type(message).__name__} within {deadline_s:g} s")


def worker_failed(reason: str) -> LinkError:
    """Return the error of a message that the worker answered with an error; `reason` is its repr."""
    return LinkError(f"the worker failed: {reason}")
