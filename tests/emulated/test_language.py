"""Synthetic drafters are right as often as they are told to be, and know how likely it is."""

import numpy as np
import pytest

from tests.emulated.workers import LANGUAGE, PROMPT
from workers.emulated.language import AcceptanceProfile, SyntheticLanguage, guesses_of, sequence_key, synthetic_text
from workers.messages import SamplingParams

TOKENS = 3_000


class Seen:
    """What a drafter guesses behind each token of a right text."""

    def __init__(self, profile: AcceptanceProfile, name: str = "a", traffic_class: int = 0, seed: int = 1) -> None:
        sampling, prompt = SamplingParams(seed=seed), [traffic_class, *PROMPT[1:]]
        guesses = guesses_of(name, LANGUAGE, profile, sampling, len(prompt))
        self.text = synthetic_text(LANGUAGE, prompt, sampling, TOKENS)
        history = [*prompt, *self.text]
        self.candidates = [guesses.candidates(history[: len(prompt) + i], runners_up=True) for i in range(TOKENS)]
        self.right = np.array([c.tokens[0] == t for c, t in zip(self.candidates, self.text, strict=True)])
        self.confidence = np.array([c.probabilities[0] for c in self.candidates])


def error(rate: float, samples: int = TOKENS) -> float:
    """Four standard deviations of a measured rate."""
    return 4 * float(np.sqrt(rate * (1 - rate) / samples))


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.6, 0.8, 0.95, 1.0])
def test_guesses_are_right_at_the_rate_asked_for(rate: float) -> None:
    seen = Seen(AcceptanceProfile((rate,)))
    assert abs(seen.right.mean() - rate) <= error(rate)


def test_whether_a_guess_is_right_does_not_depend_on_its_neighbours() -> None:
    right = Seen(AcceptanceProfile((0.7,))).right
    both = (right[1:] & right[:-1]).mean()
    assert abs(both - 0.7**2) <= error(0.7**2) * 2


def test_traffic_classes_have_their_own_rates_and_the_last_is_for_all_others() -> None:
    profile = AcceptanceProfile((0.95, 0.4))
    rates = [Seen(profile, traffic_class=index).right.mean() for index in (0, 1, 9)]
    assert np.abs(np.array(rates) - [0.95, 0.4, 0.4]).max() <= error(0.4)


def test_the_rate_drifts_where_it_is_told_to() -> None:
    right = Seen(AcceptanceProfile((0.9,), drift_after_tokens=1_000, drifted_rates=(0.3,))).right
    assert abs(right[:1_000].mean() - 0.9) <= error(0.9, 1_000)
    assert abs(right[1_000:].mean() - 0.3) <= error(0.3, 2_000)


def test_confidence_is_calibrated_and_tells_right_from_wrong() -> None:
    seen = Seen(AcceptanceProfile((0.6,), informativeness=0.8))
    for low in (0.28, 0.44, 0.6, 0.76):
        among = (seen.confidence >= low) & (seen.confidence < low + 0.16)
        expected = seen.confidence[among].mean()
        assert abs(seen.right[among].mean() - expected) <= error(expected, int(among.sum()))
    assert seen.confidence[seen.right].mean() > seen.confidence[~seen.right].mean() + 0.05


def test_without_information_confidence_is_the_rate() -> None:
    assert Seen(AcceptanceProfile((0.6,), informativeness=0.0)).confidence == pytest.approx(0.6)


def test_runners_up_hold_the_right_token_at_their_rates_where_the_guess_is_wrong() -> None:
    seen = Seen(AcceptanceProfile((0.4,), runner_up_rates=(0.5, 0.2)))
    wrong = np.flatnonzero(~seen.right)
    for rank, rate in ((1, 0.5), (2, 0.2)):
        found = np.mean([seen.candidates[index].tokens[rank] == seen.text[index] for index in wrong])
        assert abs(found - rate) <= error(rate, len(wrong))
    for candidates, token, is_right in zip(seen.candidates, seen.text, seen.right, strict=True):
        assert len(set(candidates.tokens)) == 3
        assert not is_right or token not in candidates.tokens[1:]


def test_drafters_of_different_names_err_in_different_places() -> None:
    one, other = Seen(AcceptanceProfile((0.7,)), "a").right, Seen(AcceptanceProfile((0.7,)), "b").right
    both = (one & other).mean()
    assert abs(both - 0.7**2) <= error(0.7**2)


def test_a_wrong_token_changes_all_that_comes_behind_it() -> None:
    sampling = SamplingParams(seed=1)
    right = synthetic_text(LANGUAGE, PROMPT, sampling, 50)
    wrong = [*right[:9], right[9] + 1]
    behind = synthetic_text(LANGUAGE, [*PROMPT, *wrong], sampling, 40)
    assert sum(a == b for a, b in zip(right[10:], behind, strict=True)) <= 2


def test_seeds_and_choices_have_texts_of_their_own() -> None:
    asked = [SamplingParams(seed=1), SamplingParams(seed=2), SamplingParams(seed=1, choice=1)]
    assert len({tuple(synthetic_text(LANGUAGE, PROMPT, sampling, 8)) for sampling in asked}) == 3


def test_the_language_is_the_same_everywhere() -> None:
    assert sequence_key(SamplingParams(seed=5, choice=2)) == 1952936728445087881
    assert synthetic_text(SyntheticLanguage(), [1, 2, 3], SamplingParams(seed=5), 4) == [13233, 2662, 7602, 26513]


@pytest.mark.parametrize(
    "wrong",
    [
        {"rates": (1.2,)},
        {"rates": ()},
        {"drift_after_tokens": 5},
        {"runner_up_rates": (0.7, 0.6)},
        {"informativeness": -1},
    ],
)
def test_impossible_profiles_are_refused_by_the_name_of_the_field(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter({"drift_after_tokens": "drifted_rates"}.get(k, k) for k in wrong))):
        AcceptanceProfile(**wrong)  # type: ignore[arg-type]
