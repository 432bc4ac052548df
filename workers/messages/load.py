"""What the router tells whoever decides how many workers there should be."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class DrafterPoolLoad:
    """The drafters of one name: how many are registered, how many of them are benched, and their sequences."""

    name: str
    workers: int
    benched: int
    sequences: int


@dataclass(frozen=True, slots=True)
class RouterLoad:
    """The router's load now (counts), and over the last `window_s` seconds (times and shares).

    `running` and `waiting` count sequences of clients, `undrafted` those that run and want drafts while no drafter has
    room for them. `kv_use` is the promised share of each target's KV blocks, 0 to 1.

    Times are 95th percentiles in milliseconds, None where the window has no sample: `queue_wait_ms` from a request's
    arrival to its first place on a target, those that wait yet included; `ttft_ms` to its first token; `itl_ms` from
    one answer to the next, per token.

    `exposed_draft_wait` is the share of rounds' time that was spent waiting for drafts, `drafters_busy` how many
    drafters were computing proposals on average (of those that worked for one round only the slowest counts), and
    `late_drafts` the share of proposals that a round did not wait for.
    `draft_tokens` is the mean draft of the drafters per verification (0 where k = 0 was chosen all along), and
    `accepted_length` the mean number of tokens of one; `verifications` says how many there were.
    """

    window_s: float = 0.0
    running: int = 0
    waiting: int = 0
    undrafted: int = 0
    kv_use: tuple[float, ...] = ()
    queue_wait_ms: float | None = None
    ttft_ms: float | None = None
    itl_ms: float | None = None
    exposed_draft_wait: float = 0.0
    drafters_busy: float = 0.0
    late_drafts: float = 0.0
    draft_tokens: float = 0.0
    accepted_length: float | None = None
    verifications: int = 0
    drafter_pools: tuple[DrafterPoolLoad, ...] = ()

    @property
    def streams(self) -> int:
        """Requests that somebody waits for."""
        return self.running + self.waiting

    def drafter_pool(self, name: str) -> DrafterPoolLoad:
        """Return the load of the drafters of this name, which need not exist."""
        return next((pool for pool in self.drafter_pools if pool.name == name), DrafterPoolLoad(name, 0, 0, 0))

    def as_metrics(self) -> dict[str, float]:
        """Return the same as named numbers, which is what Serve carries; `from_metrics` reads them."""
        simple = {name: getattr(self, name) for name in _SIMPLE_FIELDS}
        metrics = {name: float(value) for name, value in simple.items() if value is not None}
        metrics |= {f"kv_use/{index}": value for index, value in enumerate(self.kv_use)}
        for pool in self.drafter_pools:
            metrics |= {f"drafters/{pool.name}/{name}": float(getattr(pool, name)) for name in _POOL_FIELDS}
        return metrics

    @classmethod
    def from_metrics(cls, metrics: Mapping[str, float]) -> "RouterLoad":
        """Return what `as_metrics` told; other numbers are ignored."""
        counts = {name: int(metrics[name]) for name in _COUNTS if name in metrics}
        others = {name: metrics[name] for name in _SIMPLE_FIELDS - _COUNTS if name in metrics}
        names = sorted({name.split("/")[1] for name in metrics if name.startswith("drafters/")})
        uses = sorted((int(name.split("/")[1]), value) for name, value in metrics.items() if name.startswith("kv_use/"))
        pools = [
            DrafterPoolLoad(name, *(int(metrics[f"drafters/{name}/{count}"]) for count in _POOL_FIELDS))
            for name in names
        ]
        known: dict[str, Any] = {**counts, **others}
        return cls(**known, kv_use=tuple(use for _, use in uses), drafter_pools=tuple(pools))


_POOL_FIELDS = ("workers", "benched", "sequences")
_COUNTS = frozenset({"running", "waiting", "undrafted", "verifications"})
_SIMPLE_FIELDS = frozenset(field.name for field in fields(RouterLoad)) - {"kv_use", "drafter_pools"}
