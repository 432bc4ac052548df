"""How fast the router is on emulated devices: against what can be had at best, under load, and for one target alone."""

import time
from dataclasses import dataclass

from benchmarks.harness import Row
from benchmarks.router_service import (
    DRAFTER_TIMING,
    TARGET_TIMING,
    Answer,
    DrafterLayout,
    ServiceLayout,
    ask_all,
    router_config,
    serving,
    traffic,
)
from benchmarks.router_windows import PLAIN, Load, measure, one_class, spread_of
from workers.emulated.language import AcceptanceProfile
from workers.messages import RoundTotals, SpeculationOptions
from workers.router.config import RouterConfig

MAX_DRAFT_TOKENS = 8
LIKELY_HIT_RATE = 0.7
UNIT = "tokens/s, emulated"
SYNCHRONOUS = {"draft_length_policy": "fixed", "draft_ahead": False, "max_cohorts": 1}


def one_drafter(acceptance: float) -> ServiceLayout:
    """Return one target and one drafter that is right at this rate."""
    return ServiceLayout((DrafterLayout(AcceptanceProfile((acceptance,))),))


# --- bounds -------------------------------------------------------------------------------------------------


def accepted_length(acceptance: float, draft_tokens: int) -> float:
    """Return the tokens that a verification of k drafts commits: (1 - a^(k+1)) / (1 - a); Leviathan et al. 2023."""
    return float((1 - acceptance ** (draft_tokens + 1)) / (1 - acceptance))


def round_ms(draft_tokens: int, hit_rate: float = 0.0) -> float:
    """Return the least time of a round of one sequence.

    T (h max(1, k c) + (1 - h)(1 + k c)): T the verification, c a draft in units of it, h how often the drafts were
    there already.
    """
    verify_ms = TARGET_TIMING.step_ms(draft_tokens + 1)
    draft_ms = DRAFTER_TIMING.passes_ms([1] * draft_tokens, 1)
    return hit_rate * max(verify_ms, draft_ms) + (1 - hit_rate) * (verify_ms + draft_ms)


def best_draft_tokens(acceptance: float, hit_rate: float = 0.0) -> int:
    """Return the k whose bound is highest, k + 1 passes being counted where drafts are there already.

    The bound hides k; but behind drafts that are all accepted, which a hit mostly is, the last of these is read first.
    """

    def time_ms(draft_tokens: int) -> float:
        verify_ms = TARGET_TIMING.step_ms(draft_tokens + 1)
        ahead_ms = DRAFTER_TIMING.passes_ms([1] * (draft_tokens + 1), 1)
        return hit_rate * max(verify_ms, ahead_ms) + (1 - hit_rate) * round_ms(draft_tokens)

    return max(range(MAX_DRAFT_TOKENS + 1), key=lambda k: accepted_length(acceptance, k) / time_ms(k))


@dataclass(frozen=True, slots=True)
class Run:
    """Requests answered one after the other."""

    seconds: float
    answers: list[Answer]
    totals: RoundTotals
    propose_steps: int
    late_ms: float

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second."""
        return sum(len(answer.ids) for answer in self.answers) / self.seconds

    @property
    def accepted_length(self) -> float:
        """Tokens per verification."""
        return self.totals.committed_tokens / self.totals.verifications

    @property
    def hit_rate(self) -> float:
        """The share of rounds for which nobody had to ask for drafts."""
        return 1 - self.propose_steps / self.totals.rounds

    @property
    def overhead_ms(self) -> float:
        """What a synchronous round took beside the devices, whose waking up late is left out."""
        totals = self.totals
        return (totals.wall_ms - totals.draft_compute_ms - totals.verify_compute_ms - self.late_ms) / totals.rounds


async def one_by_one(
    acceptance: float, config: RouterConfig, quick: bool, speculation: SpeculationOptions | None = None
) -> Run:
    """Answer some requests at concurrency 1."""
    # Long answers: the bounds are of rounds that follow each other, not of prompts and last rounds.
    count, tokens = (1, 256) if quick else (2, 1_536)
    requests = [traffic(index, tokens, speculation=speculation or SpeculationOptions()) for index in range(count)]
    async with serving(one_drafter(acceptance), config) as service:
        began = time.perf_counter()
        answers = await ask_all(service.router, requests, concurrency=1)
        seconds = time.perf_counter() - began
        return Run(seconds, answers, await service.totals(), service.propose_steps, service.late_ms)


async def bounds(quick: bool) -> list[Row]:
    """Concurrency 1: plain, synchronous and drafting ahead."""
    config = router_config(max_draft_tokens=0, **SYNCHRONOUS)
    plain = await one_by_one(0.8, config, quick, PLAIN)
    bound = 1e3 / round_ms(0)
    rows = [Row("bounds: k = 0", plain.tokens_per_s, UNIT, bound, plain.tokens_per_s / bound)]
    for acceptance in (0.6, 0.8, 0.95):
        for ahead in (False, True):
            rows += await _bound(acceptance, ahead, quick)
    return rows


async def _bound(acceptance: float, ahead: bool, quick: bool) -> list[Row]:
    draft_tokens = best_draft_tokens(acceptance, LIKELY_HIT_RATE if ahead else 0.0)
    config = router_config(max_draft_tokens=draft_tokens, **SYNCHRONOUS | {"draft_ahead": ahead})
    case = f"bounds: a = {acceptance:g}, k = {draft_tokens}, {'drafting ahead' if ahead else 'synchronous'}"
    run = await one_by_one(acceptance, config, quick)
    expected = accepted_length(acceptance, draft_tokens)
    bound = expected * 1e3 / round_ms(draft_tokens, run.hit_rate if ahead else 0.0)
    # The same with the accepted length that these requests happened to have: what the router itself is to blame for.
    own = bound * run.accepted_length / expected
    last = (
        Row(f"{case}: hit rate", run.hit_rate, "") if ahead else Row(f"{case}: overhead", run.overhead_ms, "ms/round")
    )
    return [
        Row(case, run.tokens_per_s, UNIT, bound, run.tokens_per_s / bound),
        Row(f"{case}, bound of the accepted length seen", run.tokens_per_s, UNIT, own, run.tokens_per_s / own),
        Row(f"{case}: accepted length", run.accepted_length, "tokens", expected, run.accepted_length / expected),
        last,
        Row(f"{case}: devices waking up late", run.late_ms / run.totals.rounds, "ms/round"),
    ]


# --- load ---------------------------------------------------------------------------------------------------


async def load(quick: bool) -> list[Row]:
    """The goodput policy against every fixed k, at several loads and acceptance rates; arms take turns."""
    concurrencies, rates = ((1, 16), (0.3, 0.8)) if quick else ((1, 4, 16, 64), (0.3, 0.6, 0.8, 0.95))
    rows: list[Row] = []
    for concurrency in concurrencies:
        for rate in rates:
            rows += await _load(concurrency, rate, quick)
    return rows


async def _load(concurrency: int, acceptance: float, quick: bool) -> list[Row]:
    lengths, repeats, warm_s, measure_s = ((0, 4, 8), 1, 0.5, 1.5) if quick else ((0, 2, 4, 6, 8), 2, 2.0, 3.0)
    arms = {f"k = {k}": router_config(**SYNCHRONOUS, max_draft_tokens=k) for k in lengths}
    arms["goodput"] = router_config(**SYNCHRONOUS | {"draft_length_policy": "goodput"})
    arms["as served"] = router_config()
    case = f"load: {concurrency} streams, a = {acceptance:g}"
    speeds: dict[str, list[float]] = {arm: [] for arm in arms}
    for _ in range(repeats):
        for arm, config in arms.items():
            window = await measure(one_drafter(acceptance), config, Load(concurrency, one_class, warm_s, measure_s))
            speeds[arm].append(window.tokens_per_s)
    spreads = {arm: spread_of(values) for arm, values in speeds.items()}
    fixed = [arm for arm in arms if arm.startswith("k = ")]
    rows = [Row(f"{case}: {arm}", spreads[arm].value, UNIT) for arm in fixed]
    rows.append(Row(f"{case}: spread", max(spread.spread for spread in spreads.values()), "share of the median"))
    plain, best = spreads["k = 0"].value, max(fixed, key=lambda arm: spreads[arm].value)
    for arm in ("goodput", "as served"):
        value = spreads[arm].value
        rows.append(Row(f"{case}: {arm}, bound {best}", value, UNIT, spreads[best].value, value / spreads[best].value))
        rows.append(Row(f"{case}: {arm}, bound k = 0", value, UNIT, plain, value / plain))
    return rows


# --- busy ---------------------------------------------------------------------------------------------------


async def busy(quick: bool) -> list[Row]:
    """How much of its time one target works, with one cohort and with several that take turns."""
    streams, draft_tokens = 32, 4
    warm_s, measure_s = (0.7, 2.0) if quick else (3.0, 15.0)
    verify_ms = TARGET_TIMING.step_ms(streams * (draft_tokens + 1))
    alone = verify_ms / (verify_ms + DRAFTER_TIMING.passes_ms([streams] * draft_tokens, streams))
    rows: list[Row] = []
    for cohorts, bound in ((1, alone), (2, 1.0), (4, 1.0)):
        config = router_config(**SYNCHRONOUS | {"max_draft_tokens": draft_tokens, "max_cohorts": cohorts})
        case = f"busy: {streams} streams, k = {draft_tokens}, cohorts up to {cohorts}"
        window = await measure(one_drafter(0.8), config, Load(streams, one_class, warm_s, measure_s))
        rows += [
            Row(f"{case}: target is busy", window.busy_share, "of its time", bound, window.busy_share / bound),
            Row(case, window.tokens_per_s, UNIT),
            *window.health(case),
        ]
    return rows
