"""Which of several routers gets a new request: one that has its prefix cached, as long as no other is much freer."""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass

from workers.messages import GenerationRequest

PREFIX_TOKENS = 32
"""Requests whose first tokens are the same share a router, and with them its targets' cached blocks."""
BUSIER = 1.25
MORE_PER_TARGET = 2.0
"""A router is much busier than another from so many times as many sequences, and so many more, for each target."""


@dataclass(frozen=True, slots=True)
class RouterView:
    """What is known of a router: `targets` that take sequences, `sequences` of clients, of which `waiting` wait.

    `drafters` are the names of those it has. One that does not answer may be gone, or stuck.
    """

    name: str
    answers: bool = True
    targets: int = 0
    sequences: int = 0
    waiting: int = 0
    drafters: frozenset[str] = frozenset()

    @property
    def is_usable(self) -> bool:
        """Whether a sequence would be placed on a target now, or in its turn."""
        return self.answers and self.targets > 0

    @property
    def load(self) -> float:
        """Sequences for each target."""
        return self.sequences / max(1, self.targets)


def preferred(
    views: Iterable[RouterView], request: GenerationRequest, most_running: int | None = None
) -> list[RouterView]:
    """Return the routers to ask, the best first: each that is usable; if none is, one that answers; else none.

    First come those that would place the request now, each of which runs `most_running` sequences at most; among them
    those that have the drafter it asks for; among them the one that its prefix belongs to, unless that is much busier
    than the least busy one; then by load.
    """
    known = list(views)
    usable = [view for view in known if view.is_usable]
    if not usable:
        return [view for view in known if view.answers][:1]
    key = _key(request)
    ranks = {view.name: _rank(view, request, most_running) for view in usable}
    best = [view for view in usable if ranks[view.name] == min(ranks.values())]
    home = min(best, key=lambda view: _distance(key, view))
    bound = BUSIER * min(view.load for view in best) + MORE_PER_TARGET
    is_first = home.load <= bound
    return sorted(
        usable, key=lambda view: (ranks[view.name], not (is_first and view is home), view.load, _distance(key, view))
    )


def _rank(view: RouterView, request: GenerationRequest, most_running: int | None) -> tuple[bool, bool]:
    """Whether the request would have to wait there, and would have to do without its drafter."""
    full = view.waiting > 0 or (most_running is not None and view.sequences >= most_running)
    drafter = request.speculation.drafter if request.speculation.enabled else None
    return full, drafter is not None and drafter not in view.drafters


def _key(request: GenerationRequest) -> bytes:
    salt = "" if request.cache_salt is None else request.cache_salt
    return request.prompt[:PREFIX_TOKENS].tobytes() + b"\0" + salt.encode()


def _distance(key: bytes, view: RouterView) -> float:
    """The least distance makes a router a key's home, each as often as it has targets.

    Weighted rendezvous hashing (Thaler and Ravishankar 1998; weights as Schindelhauer and Schomaker 2005): a router
    that comes or goes moves no key between two others.
    """
    digest = hashlib.blake2b(view.name.encode() + b"\0" + key, digest_size=8).digest()
    uniform = (int.from_bytes(digest, "big") + 0.5) / 2.0**64
    return -math.log(uniform) / view.targets
