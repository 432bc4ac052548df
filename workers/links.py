"""How messages reach a worker: one small protocol, and its implementation over Ray actor calls."""

import asyncio
from typing import Any, Protocol, cast

from ray.exceptions import RayActorError, RayTaskError

from workers.errors import DeadlineExceededError, LinkClosedError, LinkError
from workers.messages import WorkerRequest, WorkerResponse


class Link(Protocol):
    """A way to one worker. Messages are answered in the order they were sent."""

    async def call(self, message: WorkerRequest, deadline_s: float) -> WorkerResponse | None:
        """Send `message` and return its answer.

        Raises LinkClosedError when the worker is gone, DeadlineExceededError when `deadline_s` seconds pass first,
        LinkError when the worker answered with an error.
        """
        ...


class RayLink:
    """A link over plain Ray actor calls: `actor` has one method, `handle(message)`.

    Never retried by Ray: a message changes KV state, so only the router may decide to send it again.
    """

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def call(self, message: WorkerRequest, deadline_s: float) -> WorkerResponse | None:
        """See `Link.call`."""
        try:
            reference = self._actor.handle.remote(message)
            return cast("WorkerResponse | None", await asyncio.wait_for(reference, deadline_s))
        except TimeoutError as error:
            name = type(message).__name__
            raise DeadlineExceededError(f"no answer to {name} within {deadline_s:g} s") from error
        except RayActorError as error:
            raise LinkClosedError("the worker's process is gone") from error
        except RayTaskError as error:
            raise LinkError(f"the worker failed: {error.cause!r}") from error
