"""The simulator, and what the policies do in it."""

from dataclasses import replace

import pytest

from benchmarks.autoscaling import DEVICES, OBJECTIVES, OUR_WARM_UPS, POOLS, ours, serve_default
from benchmarks.autoscaling_plot import plot
from cluster.simulator import Outcome, Request, SimulatedService, Trace, bursts, drift, simulate

BURST = replace(bursts(duration_s=1_800), name="burst")


@pytest.fixture(scope="module")
def drifted() -> Outcome:
    """Fifty minutes in which acceptance falls and comes back."""
    return simulate(drift(duration_s=3_000, per_s=5.0), ours(), DEVICES, OBJECTIVES, OUR_WARM_UPS)


def test_equal_seeds_give_equal_runs_and_other_seeds_other_traffic() -> None:
    assert bursts(600).requests == bursts(600).requests != bursts(600, seed=9).requests
    short = replace(BURST, duration_s=600)
    first, second = (simulate(short, ours(), DEVICES, OBJECTIVES, OUR_WARM_UPS) for _ in range(2))
    assert (first.misses, first.gpu_hours, first.samples) == (second.misses, second.gpu_hours, second.samples)


def test_one_request_takes_what_its_steps_take() -> None:
    service = SimulatedService(DEVICES, drafters=0)
    service.second(0, [Request(0.0, 100, 100)], acceptance=0.0)
    for second in range(1, 10):
        service.second(second, [], acceptance=0.0)
    (served,) = service.served
    # A step of one token takes 30.1 ms, and the prompt 10 ms.
    assert served.ttft_ms == pytest.approx(30 + 0.1 + 10, rel=0.05)
    assert served.itl_ms == pytest.approx(30.1, rel=0.05)


@pytest.mark.parametrize(("acceptance", "batch", "longest"), [(0.0, 1, 0), (0.2, 64, 1), (0.95, 1, 8)])
def test_drafts_are_as_long_as_pays(acceptance: float, batch: int, longest: int) -> None:
    best = DEVICES.best_round(batch, acceptance, drafters_per_target=1.0)
    plain = DEVICES.best_round(batch, acceptance, drafters_per_target=0.0)
    assert plain.draft_tokens == 0
    assert best.draft_tokens <= longest
    assert best.tokens / best.cycle_ms >= plain.tokens / plain.cycle_ms


def test_drafters_go_when_acceptance_falls_and_return_with_it(drifted: Outcome) -> None:
    drafters = {sample.at_s: sample.replicas[1] for sample in drifted.samples}
    assert drafters[500] >= 1
    assert min(drafters[at] for at in range(1_500, 2_000, 5)) == 0
    assert drafters[2_900] >= 1


def test_everything_returns_to_its_minimum_after_the_traffic() -> None:
    calm = Trace("calm", 1_500, tuple(each for each in BURST.requests if each.arrival_s < 700), lambda _: 0.8)
    outcome = simulate(calm, ours(), DEVICES, OBJECTIVES, OUR_WARM_UPS)
    assert outcome.samples[-1].replicas == (1, 0, 1)
    assert outcome.samples[-1].running == outcome.samples[-1].waiting == 0


def test_serves_own_policy_is_told_of_the_same_requests() -> None:
    for as_delivered in (False, True):
        outcome = simulate(BURST, serve_default(as_delivered), DEVICES, OBJECTIVES, {})
        assert max(sample.replicas[0] for sample in outcome.samples) > 1
        assert all(sample.replicas[0] >= POOLS["target"].min_replicas for sample in outcome.samples)
        assert plot("burst", {"policy": outcome}).count("<polyline") == 6
