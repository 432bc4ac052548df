"""Two routers of a real service, each with a target of two ranks and a drafter, answer one population of clients."""

import asyncio
import threading
from collections import Counter

import httpx
import psutil
import pytest

from benchmarks.harness import Service, running_service, tiny_pair_config
from tests.end_to_end.requests import GREEDY, SEEDED, TIMEOUT, ask_all, body, ids_of, stream
from tests.end_to_end.test_lifecycle import is_idle
from tests.limits import wait_until

TWO = {"replicas": 2}
ROUTERS, ROLES = ("Router-0", "Router-1"), ("target", "draft")


def owned_workers(service: Service) -> Counter[tuple[str, str]]:
    """How many workers of each role each router has."""
    return Counter((entry["router"], entry["registration"]["role"]) for entry in service.status()["workers"])


def process_of(service: Service, router: str) -> psutil.Process:
    """The process of a router."""
    processes = psutil.Process(service.process.pid).children(recursive=True)
    [found] = [each for each in processes if f"ServeReplica:leadout:{router}" in " ".join(each.cmdline())]
    return found


@pytest.mark.timeout(600)
def test_two_routers_give_the_ids_of_one_share_clients_and_cancels_and_one_may_die(
    service: Service, prompts: list[str]
) -> None:
    requests = [body(prompt, GREEDY if index % 2 else SEEDED, max_tokens=24) for index, prompt in enumerate(prompts)]
    by_one = list(map(ids_of, ask_all(service, requests)))
    target = TWO | {"tensor_parallel_size": 2}
    with running_service(tiny_pair_config(target=target, drafters=TWO, router=TWO)) as several:
        # It is ready with the first target.
        wait_until(lambda: owned_workers(several) == {(router, role): 1 for router in ROUTERS for role in ROLES})
        ranks = [entry["registration"]["process_ids"] for entry in several.status()["workers"]]
        assert sorted(map(len, ranks)) == [1, 1, 2, 2]
        processes = {router: process_of(several, router) for router in ROUTERS}

        together = list(map(ids_of, ask_all(several, requests, at_once=16)))
        assert together == by_one
        assert all(report["totals"]["committed_tokens"] for report in several.status()["routers"])
        alone = list(map(ids_of, ask_all(several, requests[:8], at_once=1)))
        assert together[:8] == alone

        async def leave_after_two(client: httpx.AsyncClient, prompt: str) -> None:
            chunks = stream(client, body(prompt, SEEDED | {"ignore_eos": True}, max_tokens=400))
            await anext(chunks)
            await anext(chunks)
            await chunks.aclose()  # type: ignore[attr-defined]

        async def leave_all() -> None:
            async with httpx.AsyncClient(base_url=several.url, timeout=TIMEOUT) as client:
                await asyncio.gather(*(leave_after_two(client, prompt) for prompt in prompts[:8]))

        asyncio.run(leave_all())
        wait_until(lambda: len(owned_workers(several)) == 4 and is_idle(several))
        killing = threading.Timer(1.0, processes["Router-0"].kill)
        killing.start()
        again = list(map(ids_of, ask_all(several, requests, at_once=16)))
        killing.join()
        assert again == together
        assert [list(map(ids_of, ask_all(several, requests[:4])))] == [together[:4]]
