"""Forecasts: which guesses were put to the test, and which outcomes are likely."""

import pytest

from workers.drafters.forecasts import Experience, Forecast, Guess
from workers.messages import Verification, token_ids

SURE, UNSURE = 15.0, 0.05


def guess(token: int, evidence: float = 1.0) -> Guess:
    return Guess(token, evidence, (token + 100, token + 200), (evidence, evidence + 1))


def forecast(drafts: list[int], *guesses: Guess) -> Forecast:
    return Forecast(10, Verification.COUPLED, drafts, list(guesses))


@pytest.mark.parametrize(
    ("first_position", "committed", "tested"),
    [
        (10, [1, 2, 3, 9], [(1, 1), (2, 2), (3, 3), (4, 9)]),
        (12, [3, 4, 5], [(1, 1), (2, 2), (3, 3), (4, 4)]),
        (11, [7], [(1, 1), (2, 7)]),
        (10, [8], [(1, 8)]),
        (7, [5, 5, 5, 1, 8], [(1, 1), (2, 8)]),
        (7, [5, 5], []),
        (10, [], []),
        (13, [], [(1, 1), (2, 2), (3, 3)]),
    ],
)
def test_guesses_are_tested_up_to_the_first_wrong_one(
    first_position: int, committed: list[int], tested: list[tuple[int, int]]
) -> None:
    expected = forecast([1, 2, 3], guess(1), guess(2), guess(3), guess(4))
    came = [(each.token, token) for each, token in expected.came_true(first_position, token_ids(committed))]
    assert came == tested


def test_drafts_of_others_are_followed_and_the_own_guesses_tested() -> None:
    expected = forecast([5, 6], guess(1), guess(6), guess(3))
    came = expected.came_true(10, token_ids([5, 6, 9]))
    assert [(each.token, token) for each, token in came] == [(1, 5), (6, 6), (3, 9)]


def test_outcomes_are_listed_likeliest_first_and_their_probabilities_are_part_of_one() -> None:
    expected = forecast([1, 2], guess(1, SURE), guess(2, UNSURE), guess(3, SURE))
    outcomes = Experience().likeliest_outcomes(expected, 20)
    assert {(each.accepted, each.token) for each in outcomes} == {
        (0, 101), (0, 201), (1, 102), (1, 202), (2, 3), (2, 103), (2, 203)
    }  # fmt: skip
    assert [(each.accepted, each.token) for each in outcomes[:2]] == [(2, 3), (1, 102)]
    probabilities = [each.probability for each in outcomes]
    assert probabilities == sorted(probabilities, reverse=True) and 0.5 < sum(probabilities) <= 1
    assert Experience().likeliest_outcomes(expected, 3) == outcomes[:3]


def test_where_a_draft_is_not_what_was_guessed_the_guess_is_a_likely_correction() -> None:
    expected = forecast([7], guess(1, SURE), guess(2, SURE))
    first = Experience().likeliest_outcomes(expected, 1)[0]
    assert (first.accepted, first.token) == (0, 1) and first.probability > 0.8


def test_confidence_and_the_share_of_runners_up_are_learnt() -> None:
    experience, expected = Experience(), forecast([1], guess(1, 2.0))
    before = experience.likeliest_outcomes(expected, 1)[0].probability
    for _ in range(300):
        experience.learn(expected, 10, token_ids([101]))
    after = experience.likeliest_outcomes(expected, 1)[0].probability
    assert experience.confidence(Verification.COUPLED, guess(1, 2.0)) < 0.1
    assert before < 0.35 and after > 0.6
    for _ in range(300):
        experience.learn(expected, 10, token_ids([77]))
    assert experience.likeliest_outcomes(expected, 1)[0].probability < 0.6 * after
