"""How the router deals with traffic that differs: easy and hard requests, and drafters that suit one, or none."""

from benchmarks.harness import Row
from benchmarks.router_service import (
    Answer,
    Clients,
    DrafterLayout,
    EmulatedService,
    ServiceLayout,
    ask_all,
    router_config,
    serving,
    traffic,
)
from benchmarks.router_speed import UNIT, one_drafter
from benchmarks.router_windows import Load, half_and_half, measure, one_class, spread_of, without_drafts
from workers.emulated.language import AcceptanceProfile
from workers.emulated.timing import DrafterTiming

EASY, HARD = 0.95, 0.4
GOOD_AT = ("good at class 0", "good at class 1")


async def cohorts(quick: bool) -> list[Row]:
    """Easy and hard requests half and half, in two cohorts: of similar acceptance against at random.

    The drafter is half as fast as elsewhere: where drafting is hidden behind the other cohort's verification, nobody
    waits for longer chains anyway.
    """
    streams, repeats = 16, 2 if quick else 5
    load = Load(streams, half_and_half, *((1.0, 2.0) if quick else (4.0, 8.0)))
    layout = ServiceLayout((DrafterLayout(AcceptanceProfile((EASY, HARD)), timing=DrafterTiming(step_ms=8)),))
    rows = []
    for policy in ("acceptance_window", "goodput"):
        overrides = {"draft_length_policy": policy, "draft_ahead": False}
        arms = {name: router_config(grouping=name, **overrides) for name in ("acceptance", "random")}
        speeds: dict[str, list[float]] = {name: [] for name in arms}
        for _ in range(repeats):
            for name, config in arms.items():
                speeds[name].append((await measure(layout, config, load)).tokens_per_s)
        spreads = {name: spread_of(values) for name, values in speeds.items()}
        case = f"cohorts: {streams} streams, half a = {EASY:g}, half a = {HARD:g}, {policy}"
        grouped, random = spreads["acceptance"].value, spreads["random"].value
        rows += [
            Row(f"{case}: random", random, UNIT),
            Row(f"{case}: spread", max(spread.spread for spread in spreads.values()), "share of the median"),
            Row(f"{case}: grouped by acceptance, bound random", grouped, UNIT, random, grouped / random),
        ]
    return rows


async def drafters(quick: bool) -> list[Row]:
    """Whether each class of traffic finds the drafter that is good at it, and what a broken drafter costs."""
    return [*await _suitable(quick), *await _broken(quick)]


async def _suitable(quick: bool) -> list[Row]:
    count, streams, tokens = (80, 8, 24) if quick else (400, 8, 48)
    rates = ((0.9, 0.2), (0.2, 0.9))
    layout = ServiceLayout(
        tuple(DrafterLayout(AcceptanceProfile(each), name) for each, name in zip(rates, GOOD_AT, strict=True))
    )
    config = router_config(max_draft_tokens=4)
    requests = [traffic(index, tokens, traffic_class=index % 2) for index in range(count)]
    async with serving(layout, config) as service:
        answers = await ask_all(service.router, requests, streams)
    first, last = answers[: count // 4], answers[count // 2 :]
    case = f"drafters: two, each good at one class, {count} requests"
    return [
        Row(f"{case}: rounds with the good one, first quarter", _with_good_one(first), "share"),
        Row(f"{case}: rounds with the good one, second half", _with_good_one(last), "share", 1.0, _with_good_one(last)),
    ]


def _with_good_one(answers: list[Answer]) -> float:
    """Return the share of verifications whose request had the drafter that is good at its class, to the end."""
    good = total = 0
    for answer in answers:
        assert answer.usage is not None
        total += answer.usage.verifications
        good += answer.usage.verifications if answer.usage.drafter == GOOD_AT[int(answer.request.prompt[0])] else 0
    return good / total


async def _broken(quick: bool) -> list[Row]:
    streams, rounds, early_rounds = 4, 120 if quick else 500, 50
    config = router_config(max_draft_tokens=4)
    async with (
        serving(one_drafter(0.0), config) as service,
        Clients(service.router, streams, one_class) as clients,
    ):
        early = await _drafting_share(service, clients, early_rounds)
        late = await _drafting_share(service, clients, rounds - early_rounds)
    load = Load(streams, one_class, 0.5, 3.0 if quick else 15.0)
    broken = (await measure(one_drafter(0.0), config, load)).tokens_per_s
    plain_load = Load(streams, without_drafts, load.warm_s, load.measure_s)
    plain = (await measure(one_drafter(0.0), config, plain_load)).tokens_per_s
    case = "drafters: one that is never right"
    return [
        Row(f"{case}: rounds it is asked in, first {early_rounds}", early, "share"),
        Row(f"{case}: rounds it is asked in, later", late, "share"),
        Row(f"{case}: speed, bound k = 0", broken, UNIT, plain, broken / plain),
    ]


async def _drafting_share(service: EmulatedService, clients: Clients, rounds: int) -> float:
    """Let `rounds` rounds pass; return in which share of them somebody drafted."""
    began, steps = (await service.totals()).rounds, service.propose_steps
    while (passed := (await service.totals()).rounds - began) < rounds:
        await clients.wait(0.01)
    return (service.propose_steps - steps) / passed
