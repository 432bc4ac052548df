"""What `/status` tells, put into the words that people read. Knows nothing of Ray."""

from dataclasses import dataclass
from typing import Any

import httpx

from deployments.api_client import ServiceError, get_json


@dataclass(frozen=True, slots=True)
class WorkerLine:
    """One worker. `sequences` and the blocks are None where it did not answer in time.

    A `draining` one gets no sequences any more; of a `silent` one nothing was heard lately.
    """

    name: str
    role: str
    link: str | None
    processes: tuple[int, ...]
    sequences: int | None
    used_blocks: int | None
    cached_blocks: int | None
    total_blocks: int
    draining: bool = False
    silent: bool = False

    @property
    def kv_use(self) -> float | None:
        """Share of the KV blocks that sequences hold, 0 to 1."""
        if self.used_blocks is None or self.total_blocks == 0:
            return None
        return self.used_blocks / self.total_blocks


@dataclass(frozen=True, slots=True)
class DrafterLine:
    """One drafter: the share of its drafts accepted lately, and tokens per verification since it registered."""

    name: str
    benched: bool
    acceptance: float
    accepted_length: float
    verifications: int
    step_ms: float | None


@dataclass(frozen=True, slots=True)
class RouterLine:
    """One of several routers, with the workers that it has. Of one that does not answer all numbers are 0."""

    name: str
    answers: bool
    running: int
    waiting: int
    targets: int
    drafters: int
    rounds: int
    committed_tokens: int


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """A reading of `/status`. `ready` is what `/ready` says; `totals` are sums since the router started.

    `routers` is empty where there is only one.
    """

    ready: bool
    running: int
    waiting: int
    workers: tuple[WorkerLine, ...]
    drafters: tuple[DrafterLine, ...]
    totals: dict[str, float]
    online_check: dict[str, int]
    routers: tuple[RouterLine, ...] = ()


@dataclass(frozen=True, slots=True)
class Pace:
    """Rates over a while; None where nothing happened to tell it."""

    tokens_per_s: float
    acceptance: float | None
    accepted_length: float | None
    round_ms: float | None


async def read_status(client: httpx.AsyncClient) -> ServiceStatus:
    """Ask the service. ServiceError if it does not answer, refuses, or is not Leadout."""
    told = await get_json(client, "/status")
    try:
        ready = (await client.get("/ready")).status_code == httpx.codes.OK
    except httpx.HTTPError:
        ready = False
    try:
        return parse_status(told, ready)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ServiceError(f"{client.base_url} answers /status in other words; is it Leadout?") from error


def parse_status(told: dict[str, Any], ready: bool) -> ServiceStatus:
    """Return what the JSON of `/status` says. KeyError, TypeError or ValueError if it says something else."""
    return ServiceStatus(
        ready=ready,
        running=int(told["running"]),
        waiting=int(told["waiting"]),
        workers=tuple(sorted(map(_worker, told["workers"]), key=lambda line: (line.role != "target", line.name))),
        drafters=tuple(map(_drafter, told.get("drafters", ()))),
        totals={name: float(value) for name, value in told["totals"].items()},
        online_check={name: int(value) for name, value in told.get("online_check", {}).items()},
        routers=tuple(_router(router, told["workers"]) for router in told.get("routers", ())),
    )


def pace(before: ServiceStatus | None, now: ServiceStatus, seconds: float) -> Pace:
    """Return the rates between two readings, `seconds` apart; without `before`, or after a restart, since the start.

    Since the start there is no time, and `tokens_per_s` is 0.
    """
    restarted = before is not None and before.totals.get("rounds", 0) > now.totals.get("rounds", 0)
    earlier = {} if before is None or restarted else before.totals

    def grown(name: str) -> float:
        return now.totals.get(name, 0.0) - earlier.get(name, 0.0)

    drafted, verifications, rounds = grown("draft_tokens"), grown("verifications"), grown("rounds")
    return Pace(
        tokens_per_s=grown("committed_tokens") / seconds if earlier and seconds > 0 else 0.0,
        acceptance=grown("accepted_tokens") / drafted if drafted else None,
        accepted_length=grown("committed_tokens") / verifications if verifications else None,
        round_ms=grown("wall_ms") / rounds if rounds else None,
    )


def _router(told: dict[str, Any], workers: list[dict[str, Any]]) -> RouterLine:
    name = str(told["name"])
    roles = [worker["registration"]["role"] for worker in workers if worker["router"] == name]
    return RouterLine(
        name=name,
        answers=bool(told["answers"]),
        running=int(told["running"]),
        waiting=int(told["waiting"]),
        targets=roles.count("target"),
        drafters=roles.count("draft"),
        rounds=int(told["totals"]["rounds"]),
        committed_tokens=int(told["totals"]["committed_tokens"]),
    )


def _worker(told: dict[str, Any]) -> WorkerLine:
    registration, stats = told["registration"], told["stats"]
    total = int(registration["total_blocks"])
    return WorkerLine(
        name=str(registration["name"]),
        role=str(registration["role"]),
        link=told.get("link"),
        processes=tuple(registration["process_ids"]),
        sequences=None if stats is None else int(stats["sequences"]),
        used_blocks=None if stats is None else int(stats["total_blocks"]) - int(stats["free_blocks"]),
        cached_blocks=None if stats is None else int(stats.get("cached_blocks", 0)),
        total_blocks=total,
        draining=bool(told.get("draining")),
        silent=bool(told.get("silent")),
    )


def _drafter(told: dict[str, Any]) -> DrafterLine:
    step_ms = told["step_ms"]
    return DrafterLine(
        name=str(told["name"]),
        benched=bool(told["benched"]),
        acceptance=float(told["acceptance"]),
        accepted_length=float(told["accepted_length"]),
        verifications=int(told["verifications"]),
        step_ms=None if step_ms is None else float(step_ms),
    )
