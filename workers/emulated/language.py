"""A synthetic language: each token is a hash of what came before, so texts are exact, endless and nearly free.

Drafters of it are right as often as they are told to be. Nothing here comes from a model, and no figure measured with
it says anything of one: it is for measuring schedules.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from workers.messages import SamplingParams

RESERVED_TOKENS = 64
"""Ids below are never drawn. As first token of a prompt they name the traffic class of the request."""
HISTORY_TOKENS = 3
"""How many tokens before it decide a token, besides its position and the request's noise."""

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15
_FACTORS = (0xD6E8FEB86659FD93, 0xA0761D6478BD642F, 0xE7037ED1A0B428DB)
_TOKEN, _LATENT, _FATE, _OTHER, _RUNNER_UP = range(5)  # what a hash is for


def mix(value: int) -> int:
    """Return 64 well mixed bits: the finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def sequence_key(sampling: SamplingParams) -> int:
    """Return what tells the sequences of different seeds and choices apart."""
    return mix((mix(sampling.seed + _GAMMA) + sampling.choice * _GAMMA) & _MASK)


def _hash(key: int, position: int, purpose: int) -> int:
    return mix((key + (position + 1) * _GAMMA + purpose * _FACTORS[0]) & _MASK)


def _uniform(key: int, position: int, purpose: int) -> float:
    """Return a number from 0 up to, but without, 1."""
    return (_hash(key, position, purpose) >> 11) * 2.0**-53


@dataclass(frozen=True, slots=True)
class SyntheticLanguage:
    """What the synthetic target speaks; all workers of a deployment must have the same one."""

    vocabulary_size: int = 32_768

    def token_at(self, key: int, tokens: Sequence[int], position: int) -> int:
        """Return the one right token at `position` (1 to n), behind `tokens` [n], of the sequence with `key`."""
        bits = key + (position + 1) * _GAMMA
        for token, factor in zip(tokens[max(0, position - HISTORY_TOKENS) : position], _FACTORS, strict=False):
            bits += token * factor
        return self._token(mix(bits & _MASK))

    def other_token(self, key: int, position: int, taken: Sequence[int], purpose: int) -> int:
        """Return a token that is not among `taken`."""
        token = self._token(_hash(key, position, purpose))
        while token in taken:
            token = token + 1 if token + 1 < self.vocabulary_size else RESERVED_TOKENS
        return token

    def _token(self, bits: int) -> int:
        return RESERVED_TOKENS + bits % (self.vocabulary_size - RESERVED_TOKENS)


def synthetic_text(
    language: SyntheticLanguage, prompt: Sequence[int], sampling: SamplingParams, tokens: int
) -> list[int]:
    """Return what plain decoding gives behind `prompt`: the reference for every schedule."""
    key, history = sequence_key(sampling), list(prompt)
    for _ in range(tokens):
        history.append(language.token_at(key, history, len(history)))
    return history[len(prompt) :]


@dataclass(frozen=True, slots=True)
class AcceptanceProfile:
    """How often a synthetic drafter is right, given that all drafts before were.

    `rates` (0 to 1) is by traffic class, which is the first token of the prompt; the last one is for all further
    classes. From the `drift_after_tokens`-th token of the output on, `drifted_rates` are in force.

    The drafter knows something of its fate: each position has a chance of its own, spread evenly around the rate, up to
    the share `informativeness` (0 to 1) of what 0 and 1 allow. It decides the draft and is the confidence, which is
    therefore calibrated. Where the draft is wrong, the right token is the drafter's second choice with probability
    `runner_up_rates[0]`, its third with `runner_up_rates[1]`, and so on.
    """

    rates: tuple[float, ...] = (0.8,)
    drift_after_tokens: int | None = None
    drifted_rates: tuple[float, ...] = ()
    informativeness: float = 0.8
    runner_up_rates: tuple[float, ...] = (0.5, 0.2)

    def __post_init__(self) -> None:
        """Raise ValueError for what is no probability, or a drift to nowhere."""
        for name in ("rates", "drifted_rates", "runner_up_rates"):
            if any(not 0 <= rate <= 1 for rate in getattr(self, name)):
                raise ValueError(f"{name}: {getattr(self, name)} are not all from 0 to 1")
        if not self.rates or (self.drift_after_tokens is not None and not self.drifted_rates):
            raise ValueError("rates: at least one is needed, and one of drifted_rates where drift_after_tokens is set")
        if sum(self.runner_up_rates) > 1 or not 0 <= self.informativeness <= 1:
            raise ValueError("runner_up_rates: their sum and informativeness must be from 0 to 1")

    def rate(self, traffic_class: int, output_position: int) -> float:
        """Return the acceptance rate at a position of the output, counted from 0."""
        drifted = self.drift_after_tokens is not None and output_position >= self.drift_after_tokens
        rates = self.drifted_rates if drifted else self.rates
        return rates[min(traffic_class, len(rates) - 1)]


@dataclass(frozen=True, slots=True)
class Candidates:
    """A synthetic drafter's choices for one position, the likeliest first, and the probability of each to be right."""

    tokens: tuple[int, ...]
    probabilities: tuple[float, ...]

    def probability(self, token: int) -> float:
        """Return the probability that `token` is right; 0 for one that is not among them."""
        return self.probabilities[self.tokens.index(token)] if token in self.tokens else 0.0


@dataclass(frozen=True, slots=True)
class SyntheticGuesses:
    """What a synthetic drafter thinks of one sequence; see `guesses_of`."""

    language: SyntheticLanguage
    profile: AcceptanceProfile
    key: int
    own_key: int
    prompt_tokens: int

    def candidates(self, tokens: Sequence[int], runners_up: bool = False) -> Candidates:
        """Return the guess for the token behind `tokens`, with its runners-up if they are wanted.

        Right and wrong are relative to `tokens`: behind a wrong draft even the right guess is wrong.
        """
        position = len(tokens)
        chance = self._chance(position, self.profile.rate(tokens[0], position - self.prompt_tokens))
        right = self.language.token_at(self.key, tokens, position)
        is_right = _uniform(self.own_key, position, _FATE) < chance
        guess = right if is_right else self.language.other_token(self.own_key, position, (right,), _OTHER)
        if not runners_up:
            return Candidates((guess,), (chance,))
        ranked, rank = [guess], None if is_right else self._rank_of_right(position)
        for index in range(len(self.profile.runner_up_rates)):
            other = self.language.other_token(self.own_key, position, (*ranked, right), _RUNNER_UP + 1 + index)
            ranked.append(right if index == rank else other)
        rates = (rate * (1 - chance) for rate in self.profile.runner_up_rates)
        return Candidates(tuple(ranked), (chance, *rates))

    def _chance(self, position: int, rate: float) -> float:
        spread = self.profile.informativeness * min(rate, 1 - rate)
        return rate + spread * (2 * _uniform(self.own_key, position, _LATENT) - 1)

    def _rank_of_right(self, position: int) -> int | None:
        """Which runner-up is right where the guess is wrong, if one is."""
        number = _uniform(self.own_key, position, _RUNNER_UP)
        for index, rate in enumerate(self.profile.runner_up_rates):
            if number < rate:
                return index
            number -= rate
        return None


def guesses_of(
    name: str, language: SyntheticLanguage, profile: AcceptanceProfile, sampling: SamplingParams, prompt_tokens: int
) -> SyntheticGuesses:
    """Return what the drafter `name` thinks of a sequence; drafters of different names err in different places."""
    key = sequence_key(sampling)
    return SyntheticGuesses(language, profile, key, mix(key ^ mix(zlib.crc32(name.encode()))), prompt_tokens)
