"""Seeded traffic: requests as they arrive, and how well drafters do meanwhile."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Request:
    """One request; lengths in tokens."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Trace:
    """What arrives within `duration_s`; `acceptance` gives the acceptance rate at a time."""

    name: str
    duration_s: int
    requests: tuple[Request, ...]
    acceptance: Callable[[float], float]


def diurnal(duration_s: int = 7_200, peak_per_s: float = 16.0, seed: int = 1) -> Trace:
    """A day in short: the rate follows a cosine from an eighth of the peak to the peak and back."""

    def rate(at_s: float) -> float:
        return peak_per_s * (9 - 7 * math.cos(2 * math.pi * at_s / duration_s)) / 16

    return Trace("diurnal", duration_s, _arrivals(rate, peak_per_s, duration_s, seed), lambda _: 0.8)


def bursts(duration_s: int = 5_400, calm_per_s: float = 2.0, burst_per_s: float = 16.0, seed: int = 2) -> Trace:
    """Little traffic, and bursts of three to eight minutes that begin without notice."""
    draw = random.Random(seed)
    spans, at_s = list[tuple[float, float]](), 0.0
    while (at_s := at_s + draw.uniform(300, 900)) < duration_s:
        spans.append((at_s, at_s + draw.uniform(180, 480)))
        at_s = spans[-1][1]

    def rate(at_s: float) -> float:
        return burst_per_s if any(begin <= at_s < end for begin, end in spans) else calm_per_s

    return Trace("bursts", duration_s, _arrivals(rate, burst_per_s, duration_s, seed), lambda _: 0.8)


def drift(duration_s: int = 7_200, per_s: float = 8.0, seed: int = 3) -> Trace:
    """Steady traffic that drafters know less and less: from 0.8 acceptance falls to 0.1 and later returns."""

    def acceptance(at_s: float) -> float:
        place = at_s / duration_s
        fallen = min(1.0, max(0.0, (place - 0.2) / 0.1)) - min(1.0, max(0.0, (place - 0.7) / 0.05))
        return 0.8 - 0.7 * fallen

    return Trace("acceptance drift", duration_s, _arrivals(lambda _: per_s, per_s, duration_s, seed), acceptance)


def _arrivals(rate: Callable[[float], float], most: float, duration_s: int, seed: int) -> tuple[Request, ...]:
    """A Poisson process of changing rate, by thinning one of rate `most` (Lewis and Shedler 1979)."""
    draw, at_s, requests = random.Random(seed), 0.0, list[Request]()
    while (at_s := at_s + draw.expovariate(most)) < duration_s:
        if draw.random() * most < rate(at_s):
            prompt, output = draw.lognormvariate(5.5, 0.6), draw.lognormvariate(5.3, 0.6)
            requests.append(Request(at_s, max(8, int(prompt)), max(4, min(2_048, int(output)))))
    return tuple(requests)
