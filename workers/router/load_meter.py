"""The router's load over the last seconds: waits and latencies of requests, and what rounds spent their time on."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from workers.messages import DrafterPoolLoad, GenerationEvent, RoundTotals, RouterLoad, TokenChunk
from workers.router.peer import Peer
from workers.router.roster import Roster
from workers.router.running import RunningSequence

PERCENTILE = 0.95
MOST_SAMPLES = 4_096


class _Samples:
    """Values of the last seconds, the newest `MOST_SAMPLES` of them."""

    def __init__(self) -> None:
        self._values: deque[tuple[float, float]] = deque(maxlen=MOST_SAMPLES)

    def add(self, now_s: float, value: float) -> None:
        self._values.append((now_s, value))

    def since(self, begin_s: float) -> list[float]:
        while self._values and self._values[0][0] < begin_s:
            self._values.popleft()
        return [value for _, value in self._values]


class LoadMeter:
    """Sees every event that goes to a client; a report looks back `window_s` seconds, but not beyond the start."""

    def __init__(self, window_s: float, clock: Callable[[], float]) -> None:
        self._window_s = window_s
        self._clock = clock
        self._queue_wait_ms, self._ttft_ms, self._itl_ms = _Samples(), _Samples(), _Samples()
        self._history: deque[tuple[float, RoundTotals]] = deque([(clock(), RoundTotals())])

    def observe(self, running: RunningSequence, event: GenerationEvent) -> None:
        """Note when tokens of a client's sequence went out."""
        if not isinstance(event, TokenChunk) or not len(event.token_ids):
            return
        now = self._clock()
        if running.answered_s is None:
            if not running.sequence.request.is_answered:
                self._ttft_ms.add(now, (now - running.admitted_s) * 1e3)
            if running.left_line_s is not None:
                self._queue_wait_ms.add(now, (running.left_line_s - running.admitted_s) * 1e3)
        else:
            self._itl_ms.add(now, (now - running.answered_s) * 1e3 / len(event.token_ids))
        running.answered_s = now

    def report(
        self,
        running: Sequence[RunningSequence],
        waiting: Sequence[RunningSequence],
        targets: Sequence[Peer],
        drafters: Roster,
        totals: RoundTotals,
    ) -> RouterLoad:
        """Return the load of now and of the window; `running` may have online checks, which are not counted."""
        now = self._clock()
        begin_s = now - self._window_s
        # What waits now and was never placed is the best news of a queue that stands still.
        waits = self._queue_wait_ms.since(begin_s)
        waits += [(now - each.admitted_s) * 1e3 for each in waiting if each.left_line_s is None]
        earlier_s, earlier = self._earlier(now, totals)
        clients = [each for each in running if not each.is_check]
        lack = [each for each in clients if each.wants_drafts and each.sequence.drafter.worker_id is None]
        return RouterLoad(
            window_s=now - earlier_s,
            running=len(clients),
            waiting=len(waiting),
            undrafted=len(lack) if drafters else 0,
            kv_use=tuple(1 - peer.ledger.free_blocks / max(1, peer.ledger.total_blocks) for peer in targets),
            queue_wait_ms=_percentile(waits),
            ttft_ms=_percentile(self._ttft_ms.since(begin_s)),
            itl_ms=_percentile(self._itl_ms.since(begin_s)),
            drafter_pools=_pools(drafters, clients),
            **_shares(earlier, totals, now - earlier_s),
        )

    def _earlier(self, now_s: float, totals: RoundTotals) -> tuple[float, RoundTotals]:
        """Return the sums at the beginning of the window, and remember those of now."""
        history = self._history
        while len(history) > 1 and history[1][0] <= now_s - self._window_s:
            history.popleft()
        history.append((now_s, totals))
        return history[0]


def _shares(earlier: RoundTotals, now: RoundTotals, seconds: float) -> dict[str, Any]:
    """Return what the rounds between two sums say of drafting."""
    wall_ms = now.wall_ms - earlier.wall_ms
    verifications = now.verifications - earlier.verifications
    drafted = now.draft_tokens - now.looked_up_tokens - earlier.draft_tokens + earlier.looked_up_tokens
    committed = now.committed_tokens - earlier.committed_tokens
    shares: dict[str, Any] = {"verifications": verifications}
    if seconds > 0:
        shares["drafters_busy"] = (now.draft_compute_ms - earlier.draft_compute_ms) / (seconds * 1e3)
    if wall_ms > 0:
        shares["exposed_draft_wait"] = min(1.0, (now.draft_wait_ms - earlier.draft_wait_ms) / wall_ms)
    if verifications > 0:
        shares["late_drafts"] = min(1.0, (now.late_drafts - earlier.late_drafts) / verifications)
        shares["draft_tokens"] = drafted / verifications
        shares["accepted_length"] = committed / verifications
    return shares


def _pools(drafters: Roster, clients: Sequence[RunningSequence]) -> tuple[DrafterPoolLoad, ...]:
    workers: dict[str, list[str]] = {}
    for worker_id, peer in drafters.items():
        workers.setdefault(peer.registration.name, []).append(worker_id)
    drafted = [each.sequence.drafter.worker_id for each in clients]
    return tuple(
        DrafterPoolLoad(
            name,
            len(ids),
            sum(not drafters.is_usable(worker_id) for worker_id in ids),
            sum(worker_id in ids for worker_id in drafted),
        )
        for name, ids in sorted(workers.items())
    )


def _percentile(values: list[float]) -> float | None:
    """Return the 95th percentile, which is one of the values; None without any."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(PERCENTILE * len(ordered)))] if ordered else None
