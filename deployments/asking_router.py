"""Asking the router what it knows, for no longer than whoever asks can wait."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from workers.errors import UnavailableError

T = TypeVar("T")


async def ask_router(question: Coroutine[Any, Any, T], timeout_s: float) -> T:
    """Return the answer. UnavailableError if it does not come in time, or the router cannot be reached."""
    asking = asyncio.ensure_future(question)
    # Not `wait_for`, which would go on waiting for a call that does not heed its cancellation.
    await asyncio.wait({asking}, timeout=timeout_s)
    if not asking.done():
        asking.cancel()
        raise UnavailableError(f"The router has not answered for {timeout_s:g} s.")
    if asking.cancelled() or asking.exception() is not None:
        raise UnavailableError("The router cannot be reached.")
    return asking.result()
