"""Tasks that belong to the router and to no request."""

import asyncio
from collections.abc import Coroutine
from contextvars import Context
from typing import Any, TypeVar

T = TypeVar("T")


def detached_task(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Run `work` in an empty context.

    Ray finds out through context variables which request submits a call, and cancels the calls of a cancelled request
    with it. A release that is sent because a request was cancelled must outlive it, and so must the rounds.
    """
    return asyncio.get_running_loop().create_task(work, context=Context())
