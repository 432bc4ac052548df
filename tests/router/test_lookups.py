"""How many looked-up drafts pay: against the goodput of every number of them."""

from hypothesis import given
from hypothesis import strategies as st

from workers.router.draft_planning import lookups_that_pay
from workers.router.step_times import StepTimeFit


@given(
    rate=st.floats(0.01, 0.98),
    base_ms=st.floats(0.5, 50),
    token_ms=st.floats(0.01, 5),
    sequences=st.integers(1, 64),
)
def test_every_lookup_pays_and_no_further_one_would(
    rate: float, base_ms: float, token_ms: float, sequences: int
) -> None:
    verify = StepTimeFit(base_ms, token_ms)
    plain = sequences / verify.time_ms(sequences)
    paying = lookups_that_pay(rate, verify, sequences)
    gains = [rate**place / token_ms for place in range(1, 34)]
    assert all(gain >= plain * (1 - 1e-9) for gain in gains[:paying])
    assert paying == 32 or gains[paying] <= plain * (1 + 1e-9)


def test_lookups_that_cost_nothing_are_as_long_as_can_be() -> None:
    assert lookups_that_pay(0.3, StepTimeFit(30.0, 0.0), 4) == 32
