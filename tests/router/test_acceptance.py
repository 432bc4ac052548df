"""Acceptance rates: what an estimate converges to, what it starts from, and what the book counts."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.router.acceptance import COLD_RATE, AcceptanceBook, AcceptanceEstimate, judged


def accepted_of(drafted: int, rate: float, numbers: random.Random) -> int:
    """How many of a chain's drafts are accepted if each is with probability `rate` given those before it."""
    accepted = 0
    while accepted < drafted and numbers.random() < rate:
        accepted += 1
    return accepted


@pytest.mark.parametrize(("drafted", "accepted", "trials"), [(0, 0, 0), (4, 0, 1), (4, 2, 3), (4, 4, 4)])
def test_drafts_behind_a_rejected_one_are_not_judged(drafted: int, accepted: int, trials: int) -> None:
    assert judged(drafted, accepted) == trials


@pytest.mark.parametrize("counts", [(3, 4), (-1, -1), (2, -1)])
def test_impossible_counts_are_refused(counts: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="accepted"):
        AcceptanceEstimate().observe(*counts)


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("drafted", [1, 3, 8])
def test_the_estimate_finds_the_rate_whatever_the_draft_length(rate: float, drafted: int) -> None:
    numbers, estimate, later = random.Random(5), AcceptanceEstimate(), []
    for number in range(4000):
        estimate.observe(drafted, accepted_of(drafted, rate, numbers))
        if number >= 1000:
            later.append(estimate.rate)
    assert sum(later) / len(later) == pytest.approx(rate, abs=0.02)


def test_an_estimate_starts_at_its_prior_and_leaves_it_at_the_pace_of_its_weight() -> None:
    light, heavy = AcceptanceEstimate(0.9, 2.0), AcceptanceEstimate(0.9, 50.0)
    assert light.rate == heavy.rate == pytest.approx(0.9)
    light.observe(1, 0)
    heavy.observe(1, 0)
    assert light.rate < 0.65 < 0.85 < heavy.rate < 0.9


def test_an_estimate_follows_a_change() -> None:
    numbers, estimate = random.Random(1), AcceptanceEstimate(memory_tokens=64)
    for rate in (0.9, 0.2):
        for _ in range(150):
            estimate.observe(4, accepted_of(4, rate, numbers))
        assert estimate.rate == pytest.approx(rate, abs=0.15)


@given(
    prior=st.floats(0, 1),
    observed=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=40),
)
@settings(max_examples=100)
def test_the_rate_is_never_certain(prior: float, observed: list[tuple[int, int]]) -> None:
    estimate = AcceptanceEstimate(prior)
    for drafted, accepted in observed:
        estimate.observe(drafted, min(drafted, accepted))
        assert 0 < estimate.rate < 1


def test_verifications_without_drafts_teach_nothing() -> None:
    estimate, book = AcceptanceEstimate(0.4), AcceptanceBook()
    estimate.observe(0, 0)
    book.observe("d", "chat", 0, 0)
    assert estimate.rate == pytest.approx(0.4)
    assert book.snapshot().drafters == ()


@pytest.mark.parametrize("wrong", [{"prior_rate": 1.1}, {"prior_weight": 0.0}, {"memory_tokens": 1.0}])
def test_an_impossible_prior_is_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        AcceptanceEstimate(**wrong)


def test_the_book_counts_per_drafter_and_position() -> None:
    book = AcceptanceBook()
    for drafted, accepted in [(2, 1), (4, 4), (1, 0)]:
        book.observe("a", "chat", drafted, accepted)
    book.observe("b", "chat", 3, 3)
    first, second = book.snapshot().drafters
    assert (first.drafter_id, second.drafter_id) == ("a", "b")
    assert (first.verifications, first.drafted_tokens, first.accepted_tokens) == (3, 7, 5)
    assert first.drafted_per_position == (3, 2, 1, 1)
    assert first.accepted_per_position == (2, 1, 1, 1)
    assert first.accepted_length == pytest.approx(1 + 5 / 3)
    assert second.accepted_per_position == (1, 1, 1)


def test_a_snapshot_stays_as_it_was() -> None:
    book = AcceptanceBook()
    book.observe("a", "chat", 2, 2)
    before = book.snapshot()
    book.observe("a", "code", 2, 2)
    assert before.drafters[0].accepted_per_position == (1, 1)
    assert list(before.drafters[0].rate_by_class) == ["chat"]


def test_a_new_sequence_starts_from_its_class_then_its_drafter_then_the_cold_rate() -> None:
    book, numbers = AcceptanceBook(), random.Random(2)
    for _ in range(400):
        book.observe("a", "code", 4, accepted_of(4, 0.9, numbers))
        book.observe("a", "chat", 4, accepted_of(4, 0.3, numbers))
    code, chat, other = (book.sequence_estimate("a", name).rate for name in ("code", "chat", "poems"))
    assert code == pytest.approx(0.9, abs=0.04)
    assert chat == pytest.approx(0.3, abs=0.05)
    assert chat < other < code
    assert book.sequence_estimate("b", "code").rate == pytest.approx(COLD_RATE)
    book.forget("a")
    assert book.sequence_estimate("a", "code").rate == pytest.approx(COLD_RATE)


def test_estimates_of_sequences_do_not_share_what_they_learn() -> None:
    book = AcceptanceBook()
    first, second = book.sequence_estimate("a", "chat"), book.sequence_estimate("a", "chat")
    first.observe(8, 0)
    assert first.rate < second.rate == pytest.approx(COLD_RATE)


def test_the_number_of_classes_is_bounded_and_the_stalest_goes_first() -> None:
    book = AcceptanceBook(most_classes=2)
    for name in ("one", "two", "one", "three"):
        book.observe("a", name, 1, 1)
    assert list(book.snapshot().drafters[0].rate_by_class) == ["one", "three"]
