"""Who serves, and what the router tells of itself."""

from dataclasses import dataclass
from enum import StrEnum

from workers.messages.steps import WorkerStats


class WorkerRole(StrEnum):
    """What a worker does."""

    DRAFT = "draft"
    TARGET = "target"


@dataclass(frozen=True, slots=True)
class WorkerRegistration:
    """What the router must know of a worker. `name` is the drafter's or the served model's name."""

    worker_id: str
    role: WorkerRole
    name: str
    process_ids: tuple[int, ...]
    vocabulary_size: int
    context_length: int
    block_tokens: int
    total_blocks: int


@dataclass(frozen=True, slots=True)
class LinkAddress:
    """Where a worker listens for routers, `tcp://host:port`, and its public key, by which they know it."""

    endpoint: str
    public_key: bytes


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """One registered worker as the router sees it; `link` is what carries its messages, where that is known.

    A `draining` worker gets no sequences any more. Of a `silent` one nothing was heard lately: it is dead or stuck.
    `router` is the router that owns it, where there are several.
    """

    registration: WorkerRegistration
    stats: WorkerStats | None
    link: str | None = None
    draining: bool = False
    silent: bool = False
    router: str | None = None


@dataclass(frozen=True, slots=True)
class RoundTotals:
    """Sums over all rounds since the router started; times in milliseconds.

    `draft_wait_ms` and `verify_wait_ms` are what the router waited for answers, `draft_compute_ms` and
    `verify_compute_ms` what the workers computed meanwhile; `wall_ms` is whole rounds. `preemptions` counts how often a
    sequence had to give up its KV blocks to older ones.

    `ahead_hits` counts the proposals that were drafted while the verification before them ran, `ahead_misses` those for
    which that was in vain; `late_drafts` the proposals that a round did not wait for, `looked_up_tokens` the drafts
    that targets proposed themselves.
    """

    rounds: int = 0
    wall_ms: float = 0.0
    draft_wait_ms: float = 0.0
    draft_compute_ms: float = 0.0
    verify_wait_ms: float = 0.0
    verify_compute_ms: float = 0.0
    verifications: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    committed_tokens: int = 0
    preemptions: int = 0
    ahead_hits: int = 0
    ahead_misses: int = 0
    late_drafts: int = 0
    looked_up_tokens: int = 0


@dataclass(frozen=True, slots=True)
class DrafterReport:
    """What has become of one drafter's proposals.

    `acceptance` is the share of drafts accepted lately, of those whose predecessors were, and `acceptance_by_class` the
    same for each class of traffic. Sums since it registered: of `verifications` proposals `drafted_per_position` had
    more than j tokens, of which `accepted_per_position` were accepted. `step_ms` is the time of a draft step of one
    sequence, None before one was measured. A `benched` drafter costs more than it brings and is tried now and then.
    """

    worker_id: str
    name: str
    benched: bool
    acceptance: float
    acceptance_by_class: dict[str, float]
    accepted_length: float
    verifications: int
    drafted_per_position: tuple[int, ...]
    accepted_per_position: tuple[int, ...]
    step_ms: float | None


@dataclass(frozen=True, slots=True)
class OnlineCheckTotals:
    """What became of the finished requests that were chosen to be decoded again without drafts.

    `checked` were compared, `mismatched` of them differed; `compared_tokens` are theirs. `skipped` had nothing to
    compare: no drafts, or ratio verification at a temperature above 0. `dropped` found no room in time, or failed.
    `postponed` counts how often a check made room for a client. `pending` is how many wait or run now.
    """

    checked: int = 0
    mismatched: int = 0
    compared_tokens: int = 0
    skipped: int = 0
    dropped: int = 0
    postponed: int = 0
    pending: int = 0


@dataclass(frozen=True, slots=True)
class RouterReport:
    """One of several routers: whether it `answers`, and if so its own part of what is told of all of them."""

    name: str
    answers: bool
    running: int = 0
    waiting: int = 0
    totals: RoundTotals = RoundTotals()


@dataclass(frozen=True, slots=True)
class RouterStatus:
    """A snapshot of the router; `running` and `waiting` count sequences of clients.

    `loading`: no target has registered yet. `draining`: the service shuts down and takes no new requests. Of several
    routers it is what they say together, and each of them is one of `routers`, which is empty otherwise.
    """

    running: int
    waiting: int
    workers: tuple[WorkerReport, ...]
    totals: RoundTotals = RoundTotals()
    online_check: OnlineCheckTotals = OnlineCheckTotals()
    drafters: tuple[DrafterReport, ...] = ()
    loading: bool = False
    draining: bool = False
    routers: tuple[RouterReport, ...] = ()

    @property
    def can_answer(self) -> bool:
        """Whether at least one target is registered and alive."""
        return any(not worker.silent for worker in self._targets)

    @property
    def takes_requests(self) -> bool:
        """Whether a request that came now would be placed on a target, now or in its turn."""
        return not self.draining and self.open_targets > 0

    @property
    def open_targets(self) -> int:
        """How many targets a new sequence could be placed on."""
        return sum(not (worker.silent or worker.draining) for worker in self._targets)

    @property
    def _targets(self) -> list[WorkerReport]:
        return [worker for worker in self.workers if worker.registration.role is WorkerRole.TARGET]
