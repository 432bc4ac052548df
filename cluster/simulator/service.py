"""Targets with sequences, drafters, and a line in front of them, a second at a time."""

from collections import deque
from dataclasses import dataclass, field

from cluster.autoscaling.snapshot import ReplicaCounts
from cluster.simulator.devices import Devices, Round
from cluster.simulator.traffic import Request
from workers.messages import DrafterPoolLoad, RouterLoad

WINDOW_S = 30.0
DRAFTERS = "simulated"


@dataclass(slots=True)
class Sequence:
    """A request in service, from its place on a target on; `first_s` is the time of its first token."""

    request: Request
    placed_s: float
    first_s: float | None = None
    tokens: float = 0.0

    @property
    def most_tokens(self) -> int:
        return self.request.prompt_tokens + self.request.output_tokens


@dataclass(frozen=True, slots=True)
class Served:
    """A finished request; times in milliseconds."""

    end_s: float
    ttft_ms: float
    itl_ms: float


@dataclass(slots=True)
class Replica:
    """A target, drafter or ingress process; a target that drains takes no new sequences and ends with its last one."""

    ready_s: float
    draining: bool = False
    sequences: list[Sequence] = field(default_factory=list)


@dataclass(slots=True)
class Pool:
    """Replicas of one kind. They are paid for from the moment they are asked for, to the end of their last sequence."""

    start_s: float
    replicas: list[Replica] = field(default_factory=list)

    def resize(self, wanted: int, now_s: float) -> int:
        """Start or drain replicas, the youngest first; return how many were started (or, negative, drained)."""
        staying = [replica for replica in self.replicas if not replica.draining]
        for replica in staying[wanted:]:
            replica.draining = True
        self.replicas += [Replica(now_s + self.start_s) for _ in range(wanted - len(staying))]
        self.replicas = [each for each in self.replicas if each.sequences or not each.draining]
        return wanted - len(staying)

    def ready(self, now_s: float) -> list[Replica]:
        return [replica for replica in self.replicas if replica.ready_s <= now_s]

    def counts(self, now_s: float, warm_up_s: float) -> ReplicaCounts:
        staying = [replica for replica in self.replicas if not replica.draining]
        return ReplicaCounts(len(staying), sum(replica.ready_s + warm_up_s <= now_s for replica in staying))


class SimulatedService:
    """The queueing model; sums of the last seconds make the load that a router would tell."""

    def __init__(self, devices: Devices, targets: int = 1, drafters: int = 1) -> None:
        self.devices = devices
        self.targets, self.drafters = Pool(devices.target_start_s), Pool(devices.drafter_start_s)
        self.ingress = Pool(devices.ingress_start_s)
        for pool, count in ((self.targets, targets), (self.drafters, drafters), (self.ingress, 1)):
            pool.replicas = [Replica(0.0) for _ in range(count)]
        self.waiting: deque[Request] = deque()
        self.served: list[Served] = []
        self._latencies: deque[tuple[float, str, float]] = deque()
        self._rounds: deque[tuple[float, float, float, float, float, float]] = deque()

    @property
    def running(self) -> int:
        """Sequences that have a target."""
        return sum(len(replica.sequences) for replica in self.targets.replicas)

    @property
    def streams(self) -> int:
        """Requests that are not through yet."""
        return self.running + len(self.waiting)

    def second(self, now_s: float, arriving: list[Request], acceptance: float) -> None:
        """Let a second pass: requests arrive, find a place, and grow."""
        self.waiting += arriving
        read_tokens = self._place(now_s)
        ready = [replica for replica in self.targets.ready(now_s) if replica.sequences]
        share = len(self.drafters.ready(now_s)) / max(1, len(ready))
        for replica in ready:
            # Prompts take their share of the target's time.
            read_ms = read_tokens.get(id(replica), 0) * self.devices.target_token_ms
            slowed = 1 / (1 - min(0.8, read_ms / 1e3))
            self._grow(replica, self.devices.best_round(len(replica.sequences), acceptance, share), slowed, now_s)

    def load(self, now_s: float) -> RouterLoad:
        """Return what the router would tell of the last seconds."""
        for history in (self._latencies, self._rounds):
            while history and history[0][0] < now_s - WINDOW_S:
                history.popleft()
        waits = [(now_s - request.arrival_s) * 1e3 for request in self.waiting]
        sums = [sum(entry[place] for entry in self._rounds) for place in range(1, 6)]
        wall_ms, exposed_ms, draft_ms, verifications, drafted = sums
        ready = self.targets.ready(now_s)
        drafters = len(self.drafters.ready(now_s))
        pools = (DrafterPoolLoad(DRAFTERS, drafters, 0, self.running),) if drafters else ()
        return RouterLoad(
            window_s=WINDOW_S,
            running=self.running,
            waiting=len(self.waiting),
            kv_use=tuple(self._kv_use(replica) for replica in ready),
            queue_wait_ms=_p95([*self._recent("wait"), *waits]),
            ttft_ms=_p95(self._recent("ttft")),
            itl_ms=_p95(self._recent("itl")),
            exposed_draft_wait=exposed_ms / wall_ms if wall_ms else 0.0,
            drafters_busy=draft_ms / (WINDOW_S * 1e3),
            draft_tokens=drafted / verifications if verifications else 0.0,
            verifications=int(verifications),
            drafter_pools=pools,
        )

    def _place(self, now_s: float) -> dict[int, int]:
        """Place those that wait, in order; return the prompt tokens that each target has to read."""
        read_tokens: dict[int, int] = {}
        ready = [replica for replica in self.targets.ready(now_s) if not replica.draining]
        while self.waiting and ready:
            request = self.waiting[0]
            sequence = Sequence(request, max(now_s, request.arrival_s))
            replica = min(ready, key=lambda each: len(each.sequences))
            full = len(replica.sequences) >= self.devices.max_batch
            if full or self._kv_use(replica, sequence) > 1.0:
                break
            self.waiting.popleft()
            replica.sequences.append(sequence)
            read_tokens[id(replica)] = read_tokens.get(id(replica), 0) + request.prompt_tokens
            self._latencies.append((now_s, "wait", (sequence.placed_s - request.arrival_s) * 1e3))
        return read_tokens

    def _kv_use(self, replica: Replica, another: Sequence | None = None) -> float:
        tokens = sum(sequence.request.prompt_tokens + sequence.tokens for sequence in replica.sequences)
        return (tokens + (another.most_tokens if another else 0)) / self.devices.kv_tokens

    def _grow(self, replica: Replica, best: Round, slowed: float, now_s: float) -> None:
        cycle_ms = best.cycle_ms * slowed
        tokens = best.tokens * 1e3 / cycle_ms
        rounds = 1e3 / cycle_ms
        batch = len(replica.sequences)
        self._rounds.append(
            (
                now_s,
                1e3,
                best.exposed_ms * rounds,
                best.draft_ms * rounds,
                batch * rounds,
                batch * rounds * best.draft_tokens,
            )
        )
        self._latencies.append((now_s, "itl", cycle_ms / best.tokens))
        for sequence in replica.sequences:
            if sequence.first_s is None:
                read_ms = sequence.request.prompt_tokens * self.devices.target_token_ms
                sequence.first_s = sequence.placed_s + (read_ms + cycle_ms) / 1e3
                self._latencies.append((now_s, "ttft", (sequence.first_s - sequence.request.arrival_s) * 1e3))
            sequence.tokens += tokens
        for sequence in [each for each in replica.sequences if each.tokens >= each.request.output_tokens]:
            replica.sequences.remove(sequence)
            self._finish(sequence, tokens, now_s)

    def _finish(self, sequence: Sequence, tokens_per_s: float, now_s: float) -> None:
        request = sequence.request
        assert sequence.first_s is not None
        end_s = now_s + 1 - (sequence.tokens - request.output_tokens) / tokens_per_s
        itl_ms = max(0.0, end_s - sequence.placed_s) * 1e3 / request.output_tokens
        self.served.append(Served(end_s, (sequence.first_s - request.arrival_s) * 1e3, itl_ms))

    def _recent(self, kind: str) -> list[float]:
        return [value for _, name, value in self._latencies if name == kind]


def _p95(values: list[float]) -> float | None:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))] if ordered else None
