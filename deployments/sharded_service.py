"""Several routers as one generation service: each request has one of them for its life, and all say how they are."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from deployments.generation import GenerationService
from deployments.known_router import ANSWER_WITHIN_S, LOST_AFTER_S, KnownRouter
from deployments.merged_status import merged_metrics, merged_status
from deployments.router_choice import preferred
from workers.errors import RouterLostError, UnavailableError
from workers.messages import GenerationEvent, GenerationFailed, GenerationRequest, MetricsSnapshot, RouterStatus
from workers.router.detached import detached_task

STATS_WITHIN_S = 4.0
"""A router waits for its workers' stats for 2 s."""
REFUSED = 429
T = TypeVar("T")


class ShardedService:
    """A generation service over routers, by their names; nothing waits for one that is down while another answers.

    A request goes to a router that has a target for it, by `preferred`, and to the next if that one is full. Each
    router runs `most_running` sequences at most, if that is known.
    """

    def __init__(self, routers: Mapping[str, GenerationService], most_running: int | None = None) -> None:
        self._routers = [KnownRouter(name, service) for name, service in routers.items()]
        self._most_running = most_running

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        """See `GenerationService.generate`. RouterLostError when its router is lost, or none answers.

        Also when its router has lost its last target, and another one has some.
        """
        refusal: GenerationFailed | None = None
        for router in await self._to_ask(request):
            refusal = None
            async with aclosing(router.generate(request, partial(self._is_usable_beside, router))) as events:  # type: ignore[type-var]
                async for event in events:
                    if isinstance(event, GenerationFailed) and event.status == REFUSED:
                        refusal = event
                        break
                    yield event
            if refusal is None:
                return
        if refusal is None:
            raise RouterLostError("no router answers")
        yield refusal

    async def status(self, with_worker_stats: bool = False) -> RouterStatus:
        """See `GenerationService.status`: of all routers that answer. UnavailableError if none does."""
        if with_worker_stats:
            answers = await self._answers(lambda router: router.service.status(True))
        else:
            await self._look()
            answers = {
                router.name: router.status for router in self._routers if router.status is not None and router.answers
            }
        if not answers:
            raise UnavailableError("no router is available")
        return merged_status([router.name for router in self._routers], answers)

    async def metrics(self) -> MetricsSnapshot:
        """See `GenerationService.metrics`: of all routers that answer. UnavailableError if none does."""
        answers = await self._answers(lambda router: router.service.metrics())
        if not answers:
            raise UnavailableError("no router is available")
        return merged_metrics(answers)

    async def _to_ask(self, request: GenerationRequest) -> list[KnownRouter]:
        """Return the routers for a request, the best first. Asks again how they are if none is known to be usable."""
        for router in self._routers:
            if router.is_due:
                router.ask()
        if not any(router.view().is_usable for router in self._routers):
            await self._look()
        by_name = {router.name: router for router in self._routers}
        patience_s = ANSWER_WITHIN_S if any(router.answers for router in self._routers) else LOST_AFTER_S
        views = [router.view(patience_s) for router in self._routers]
        return [by_name[view.name] for view in preferred(views, request, self._most_running)]

    def _is_usable_beside(self, router: KnownRouter) -> bool:
        """Whether another router could take its requests."""
        return any(other.view().is_usable for other in self._routers if other is not router)

    async def _look(self) -> None:
        """Ask all routers how they are, and wait for those that answered before; if none did, for any."""
        asked = {router.ask(): router for router in self._routers}
        awaited = [task for task, router in asked.items() if router.answers or router.is_unknown]
        await asyncio.wait(awaited or asked, timeout=ANSWER_WITHIN_S)

    async def _answers(self, question: Callable[[KnownRouter], Coroutine[Any, Any, T]]) -> dict[str, T]:
        """Return what the routers that answer say, by their names; who takes too long or fails is left out."""
        await self._look()
        asked = {router.name: detached_task(question(router)) for router in self._routers if router.answers}
        if asked:
            await asyncio.wait(asked.values(), timeout=STATS_WITHIN_S)
        for task in asked.values():
            task.cancel()
        return {
            name: task.result()
            for name, task in asked.items()
            if task.done() and not task.cancelled() and task.exception() is None
        }
