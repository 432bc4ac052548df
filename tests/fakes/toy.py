"""A toy target model: a hash of what came before; and drafters that guess it more or less well."""

import zlib
from collections.abc import Callable, Sequence

import numpy as np

from workers.messages import (
    SamplingParams,
    TokenLogprobs,
)

TOY_VOCABULARY = 32
FIRST_TOY_OUTPUT = 16
"""Prompts of the toy model use the ids below; it answers with those from here on, so that each can be told."""


def toy_next(history: Sequence[int], sampling: SamplingParams) -> int:
    """The toy target's token after `history`: a hash of the last two tokens, the position and the request's noise."""
    seen = (*history[-2:], len(history), sampling.seed, sampling.choice)
    return FIRST_TOY_OUTPUT + zlib.crc32(repr(tuple(map(int, seen))).encode()) % (TOY_VOCABULARY - FIRST_TOY_OUTPUT)


def toy_continuation(prompt: Sequence[int], sampling: SamplingParams, tokens: int) -> list[int]:
    """What plain decoding gives."""
    history = list(prompt)
    for _ in range(tokens):
        history.append(toy_next(history, sampling))
    return history[len(prompt) :]


def toy_logprob(history: Sequence[int], token: int) -> float:
    """The toy target's log-probability of `token` after `history`, made up from the position and the last token."""
    return -(zlib.crc32(repr((len(history), int(history[-1]), int(token))).encode()) % 4096) / 256


def toy_logprobs(tokens: Sequence[int], start: int, likeliest: int) -> TokenLogprobs:
    """The log-probabilities of `tokens` from position `start` (at least 1) on; the first of each top is impossible."""
    positions = range(start, len(tokens))
    ids = [[(tokens[position - 1] + other) % TOY_VOCABULARY for other in range(likeliest)] for position in positions]
    shape = (len(positions), likeliest)
    top = [
        [-np.inf if token == ids[row][0] else toy_logprob(tokens[: start + row], token) for token in ids[row]]
        for row in range(len(positions))
    ]
    return TokenLogprobs(
        np.array([toy_logprob(tokens[:position], tokens[position]) for position in positions], dtype=np.float32),
        np.array(ids, dtype=np.int32).reshape(shape),
        np.array(top, dtype=np.float32).reshape(shape),
    )


def toy_lookup(tokens: Sequence[int], most: int) -> list[int]:
    """Continue as the last token was continued before, by `most` tokens at most."""
    earlier = [position for position, token in enumerate(tokens[:-1]) if token == tokens[-1]]
    return list(tokens[earlier[-1] + 1 :][:most]) if earlier else []


Guess = Callable[[Sequence[int], SamplingParams], int]


def never_right(history: Sequence[int], sampling: SamplingParams) -> int:
    """Guess another token than the target's."""
    right = toy_next(history, sampling)
    return right + 1 if right + 1 < TOY_VOCABULARY else FIRST_TOY_OUTPUT


def sometimes_right(percent: int) -> Guess:
    """Guess right at about `percent` in a hundred positions, always the same ones."""

    def guess(history: Sequence[int], sampling: SamplingParams) -> int:
        chance = zlib.crc32(repr((sampling.seed, len(history))).encode()) % 100
        return toy_next(history, sampling) if chance < percent else never_right(history, sampling)

    return guess
