"""What happens in the router as metrics: one method for each thing that happens, called where it does."""

from functools import lru_cache
from typing import TYPE_CHECKING

from workers.decoding.trees import proposal_depth
from workers.messages import (
    FinishReason,
    Proposal,
    VerifiedItem,
    VerifyRequest,
    VerifyResponse,
    WorkerRegistration,
    WorkerRole,
)
from workers.metrics.catalogue import CATALOGUE, DRAFTER, LOOKUP_DRAFTER, PAIR, TARGET, MetricType
from workers.metrics.store import MetricStore

if TYPE_CHECKING:
    from workers.router.totals import RoundClock

CANCELLED = "cancelled"
OUTCOMES = (
    *(reason.value for reason in FinishReason),
    CANCELLED,
    "timeout",
    "overloaded",
    "context_length_exceeded",
    "service_unavailable",
    "shutting_down",
    "draining",
    "sequence_fault",
    "poison_request",
    "internal_error",
)


class MetricsRecorder:
    """Counts into a store. Series of what is there exist with 0 before anything happens. Checks are never counted."""

    def __init__(self, longest_draft: int = 0, looks_up: bool = False) -> None:
        self.store = MetricStore()
        self._longest_draft = longest_draft
        self._names: dict[WorkerRole, set[str]] = {role: set() for role in WorkerRole}
        if looks_up:
            self._names[WorkerRole.DRAFT].add(LOOKUP_DRAFTER)
        for metric in CATALOGUE:
            if not metric.labels:
                self.store.declare(metric.name)
        for outcome in OUTCOMES:
            self.store.declare("requests", (outcome,))
        for role in WorkerRole:
            self.store.declare("worker_failures", (role.value,))

    # --- workers --------------------------------------------------------------------------------------------

    def registered(self, registration: WorkerRegistration) -> None:
        """Declare the series of a worker, and of each pair that it makes."""
        self._names[registration.role].add(registration.name)
        drafters, targets = self._names[WorkerRole.DRAFT], self._names[WorkerRole.TARGET]
        pairs = [(drafter, target) for drafter in drafters for target in targets]
        subjects: dict[tuple[str, ...], list[tuple[str, ...]]] = {
            PAIR: [*pairs],
            TARGET: [(name,) for name in targets],
            DRAFTER: [(name,) for name in drafters - {LOOKUP_DRAFTER}],
        }
        for metric in CATALOGUE:
            if metric.type is not MetricType.GAUGE:
                for labels in subjects.get(metric.labels, ()):
                    self.store.declare(metric.name, labels)
        for pair in pairs:
            for labels in _positions(pair, self._longest_draft):
                self.store.declare("spec_decode_num_draft_tokens_per_pos", labels)
                self.store.declare("spec_decode_num_accepted_tokens_per_pos", labels)

    def failed(self, role: WorkerRole) -> None:
        """A worker failed."""
        self.store.add("worker_failures", (role.value,))

    def benched(self, drafter: str) -> None:
        """A drafter is left out from now on."""
        self.store.add("drafter_benchings", (drafter,))

    # --- rounds ---------------------------------------------------------------------------------------------

    def drafted(self, drafter: str, compute_ms: float) -> None:
        """A drafter answered with drafts for a round."""
        self.store.observe("draft_seconds", compute_ms / 1e3, (drafter,))

    def drafted_ahead(self, drafter: str | None, hit: bool) -> None:
        """What had been drafted ahead was of use, or not."""
        self.store.add("ahead_hits" if hit else "ahead_misses", (drafter or "",))

    def fell_back(self, target: str) -> None:
        """A sequence wanted drafts and had no drafter."""
        self.store.add("fallback_rounds", (target,))

    def verified(
        self, target: str, drafter: str, chosen: int, proposal: Proposal, verified: VerifiedItem, committed: int
    ) -> None:
        """One sequence's verification was committed; `chosen` is the draft length that was decided on."""
        store = self.store
        store.add("verifications", (target,))
        store.add("generation_tokens", (target,), committed)
        store.observe("spec_decode_draft_length", chosen, (target,))
        drafted = len(proposal) or verified.looked_up
        if not drafted:
            return
        if verified.looked_up:
            drafter = LOOKUP_DRAFTER
            store.add("looked_up_tokens", (target,), drafted)
        # A sequence that ends within its drafts keeps fewer than the target accepted.
        pair, accepted = (drafter, target), min(verified.accepted, committed)
        store.add("spec_decode_num_drafts", pair)
        store.add("spec_decode_num_draft_tokens", pair, drafted)
        store.add("spec_decode_num_accepted_tokens", pair, accepted)
        store.observe("spec_decode_accepted_length", accepted + 1, pair)
        for labels in _positions(pair, proposal_depth(proposal) or verified.looked_up):
            store.add("spec_decode_num_draft_tokens_per_pos", labels)
        for labels in _positions(pair, accepted):
            store.add("spec_decode_num_accepted_tokens_per_pos", labels)

    def round_ended(
        self, target: str, clock: "RoundClock", request: VerifyRequest, response: VerifyResponse, plain_ms: float | None
    ) -> None:
        """A round of clients' sequences ended; `plain_ms` is what one token for each would take without drafts."""
        store, labels, wall_ms = self.store, (target,), clock.wall_ms()
        store.observe("round_seconds", wall_ms / 1e3, labels)
        store.observe("round_draft_wait_seconds", clock.draft_wait_ms / 1e3, labels)
        store.observe("round_verify_seconds", clock.verify_compute_ms / 1e3, labels)
        queued_ms = max(0.0, clock.verify_wait_ms - clock.verify_compute_ms)
        store.observe("round_verify_queue_seconds", queued_ms / 1e3, labels)
        overhead_ms = max(0.0, wall_ms - clock.draft_wait_ms - clock.verify_wait_ms)
        store.observe("round_overhead_seconds", overhead_ms / 1e3, labels)
        if plain_ms is not None and all(item.sample and len(item.committed) == 1 for item in request.items):
            tokens = sum(len(item.token_ids) for item in response.items)
            store.add("decode_seconds", labels, wall_ms / 1e3)
            store.add("plain_decode_seconds", labels, plain_ms * tokens / len(request.items) / 1e3)

    def placed(self, waited_s: float) -> None:
        """A sequence has its first target."""
        self.store.observe("request_queue_seconds", waited_s)


@lru_cache(maxsize=1024)
def _positions(pair: tuple[str, str], depth: int) -> tuple[tuple[str, str, str], ...]:
    """The labels of the first `depth` positions."""
    return tuple((*pair, str(position)) for position in range(depth))
