"""A link over plain Ray actor calls, always available."""

import asyncio
from typing import Any, cast

from ray.exceptions import RayActorError, RayTaskError

from workers.errors import LinkClosedError
from workers.links.base import deadline_exceeded, worker_failed
from workers.messages import WorkerRequest, WorkerResponse


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
            raise deadline_exceeded(message, deadline_s) from error
        except RayActorError as error:
            raise LinkClosedError("the worker's process is gone") from error
        except RayTaskError as error:
            raise worker_failed(repr(error.cause)) from error
