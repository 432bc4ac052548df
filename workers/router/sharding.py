"""Which of several routers owns which workers, and which of them serves a request.

A router schedules only what it owns: some targets, and of each kind of drafter a share in proportion to its targets. A
request stays with the router that it was given to, since nobody asks for it again; for a new one the choice depends on
its key alone, so that requests which begin alike can be sent to where their prefix is cached.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

Owners = Mapping[str, str]
"""The router of each worker, by ids."""


def share_out(
    routers: Sequence[str], targets: Sequence[str], drafters: Mapping[str, Sequence[str]], current: Owners
) -> dict[str, str]:
    """Return the owner of every worker; `drafters` are ids by the drafters' name, and `current` what held so far.

    The numbers of targets differ by one at most, and those of drafters of one name from their proportion by less than
    one. Of what `current` says as much stays as these bounds allow. Without routers nobody owns anything.
    """
    if not routers:
        return {}
    owners = _dealt(targets, _quotas(routers, len(targets), dict.fromkeys(routers, 1), targets, current), current)
    owned = {router: sum(owner == router for owner in owners.values()) for router in routers}
    weights = owned if any(owned.values()) else dict.fromkeys(routers, 1)
    for ids in drafters.values():
        owners |= _dealt(ids, _quotas(routers, len(ids), weights, ids, current), current)
    return owners


def router_for(key: str, targets_owned: Mapping[str, int]) -> str | None:
    """Return the router for a new request with this key, each as often as it has targets; None if none has any.

    Weighted rendezvous hashing (Thaler and Ravishankar 1998; weights as Schindelhauer and Schomaker 2005): a router
    that comes or goes moves no key between two others.
    """
    able = sorted(router for router, targets in targets_owned.items() if targets > 0)
    return min(able, key=lambda router: -math.log(_uniform(key, router)) / targets_owned[router], default=None)


def _uniform(key: str, router: str) -> float:
    """Return a number above 0 and below 1 that depends on both, the same in every process."""
    digest = hashlib.blake2b(f"{router}\0{key}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") + 0.5) / 2.0**64


def _quotas(
    routers: Sequence[str], count: int, weights: Mapping[str, int], ids: Iterable[str], current: Owners
) -> dict[str, int]:
    """Share `count` out by weight, rounded down; what is left goes to those that have more than that already."""
    held = dict.fromkeys(routers, 0)
    for worker_id in ids:
        if (owner := current.get(worker_id)) in held:
            held[owner] += 1
    total = sum(weights.values())
    exact = {router: Fraction(count * weights[router], total) for router in routers}
    quotas = {router: math.floor(share) for router, share in exact.items()}
    fractional = [router for router in routers if exact[router] > quotas[router]]
    fractional.sort(key=lambda router: (held[router] <= quotas[router], quotas[router] - exact[router], router))
    for router in fractional[: count - sum(quotas.values())]:
        quotas[router] += 1
    return quotas


def _dealt(ids: Iterable[str], quotas: Mapping[str, int], current: Owners) -> dict[str, str]:
    """Leave workers where they are as far as quotas allow, and deal out the others."""
    room, owners, homeless = dict(quotas), dict[str, str](), list[str]()
    for worker_id in sorted(ids):
        owner = current.get(worker_id)
        if owner is not None and room.get(owner, 0) > 0:
            room[owner] -= 1
            owners[worker_id] = owner
        else:
            homeless.append(worker_id)
    for worker_id in homeless:
        owner = max(sorted(room), key=lambda router: room[router])
        room[owner] -= 1
        owners[worker_id] = owner
    return owners
