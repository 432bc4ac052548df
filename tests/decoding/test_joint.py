"""Speculation end to end on tables: the same ids as plain decoding, and the target's joint distribution."""

import itertools

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decoding.goodness import FITS, MISFITS, chi_square_p
from workers.decoding.sampling import PositionRun, SamplingRows, draw_tokens
from workers.decoding.verification import verify_chain
from workers.messages import SamplingParams, token_ids

Table = npt.NDArray[np.float32]  # [V, V, V]: logits of the next token, by the last two


def next_logits(table: Table, history: list[int]) -> Table:
    row: Table = table[history[-2], history[-1]]
    return row


def draw(logits: list[Table], sampling: SamplingParams, first_position: int) -> list[int]:
    rows = SamplingRows.of_runs([PositionRun(sampling, first_position, len(logits))])
    drawn: list[int] = draw_tokens(torch.from_numpy(np.stack(logits)), rows).tolist()
    return drawn


def decode_plainly(target: Table, prompt: list[int], sampling: SamplingParams, tokens: int) -> list[int]:
    history = list(prompt)
    for _ in range(tokens):
        history += draw([next_logits(target, history)], sampling, len(history))
    return history[len(prompt) :]


def draft(drafter: Table, history: list[int], sampling: SamplingParams, k: int) -> list[int]:
    guessed = decode_plainly(drafter, history, sampling, k)
    assert len(guessed) == k
    return guessed


def decode_speculatively(
    target: Table, drafter: Table, prompt: list[int], sampling: SamplingParams, tokens: int, k: int
) -> tuple[list[int], int]:
    """Return the tokens and how many drafts were accepted."""
    history, accepted = list(prompt), 0
    while len(history) < len(prompt) + tokens:
        drafts = draft(drafter, history, sampling, k)
        logits = [next_logits(target, history + drafts[:index]) for index in range(k + 1)]
        outcome = verify_chain(token_ids(draw(logits, sampling, len(history))), token_ids(drafts))
        history += outcome.token_ids.tolist()
        accepted += outcome.accepted
    return history[len(prompt) : len(prompt) + tokens], accepted


def table(seed: int, vocabulary: int, spread: float = 1.5) -> Table:
    return np.random.default_rng(seed).normal(0, spread, (vocabulary,) * 3).astype(np.float32)


sampling_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.4, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3]),
    top_p=st.sampled_from([1.0, 0.8]),
    seed=st.integers(0, 2**63 - 1),
    choice=st.integers(0, 2),
)


@given(
    sampling=sampling_params,
    tables=st.tuples(st.integers(0, 1000), st.integers(0, 1000)),
    likeness=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    k=st.integers(0, 6),
    prompt=st.lists(st.integers(0, 5), min_size=2, max_size=5),
)
@settings(max_examples=60)
def test_no_drafter_and_no_draft_length_changes_the_ids(
    sampling: SamplingParams, tables: tuple[int, int], likeness: float, k: int, prompt: list[int]
) -> None:
    target = table(tables[0], 6)
    drafter = likeness * target + np.float32(1 - likeness) * table(tables[1], 6)

    decoded, accepted = decode_speculatively(target, drafter.astype(np.float32), prompt, sampling, 12, k)

    assert decoded == decode_plainly(target, prompt, sampling, 12)
    if likeness == 1.0:
        assert accepted >= 12 * k // (k + 1)  # the target's own weights are always right


def joint(target: Table, prompt: list[int], temperature: float = 1.0) -> npt.NDArray[np.float64]:
    """The probability of each of the V^3 continuations of three tokens."""
    vocabulary = target.shape[0]
    probabilities = []
    for continuation in itertools.product(range(vocabulary), repeat=3):
        history, probability = list(prompt), 1.0
        for token in continuation:
            weights = np.exp(next_logits(target, history).astype(np.float64) / temperature)
            probability *= weights[token] / weights.sum()
            history.append(token)
        probabilities.append(probability)
    return np.array(probabilities)


def wave(
    target: Table, drafter: Table, histories: npt.NDArray[np.int64], seeds: npt.NDArray[np.int64], k: int
) -> tuple[list[list[int]], list[int]]:
    """One round of equally long sequences, a row each: what each commits, and how many drafts each accepts."""

    def drawn(table: Table, history: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        position = history.shape[1]
        rows = SamplingRows.of_runs([PositionRun(SamplingParams(seed=int(seed)), position, 1) for seed in seeds])
        return draw_tokens(torch.from_numpy(table[history[:, -2], history[:, -1]]), rows).numpy()

    length, drafted = histories.shape[1], histories
    for _ in range(k):
        drafted = np.column_stack([drafted, drawn(drafter, drafted)])
    own = np.column_stack([drawn(target, drafted[:, : length + index]) for index in range(k + 1)])
    outcomes = [
        verify_chain(draws, drafts)
        for draws, drafts in zip(own.astype(np.int32), drafted[:, length:].astype(np.int32), strict=True)
    ]
    return [outcome.token_ids.tolist() for outcome in outcomes], [outcome.accepted for outcome in outcomes]


def test_the_joint_distribution_of_three_tokens_is_the_targets_own() -> None:
    """10,000 seeds; two drafts each, verified together; what is missing then takes further rounds of one draft."""
    target, drafter, prompt = table(1, 3, 0.8), table(2, 3, 0.8), [0, 1]
    completions: list[list[int]] = [[] for _ in range(10_000)]
    accepted_at_first: list[int] = []
    while unfinished := {len(tokens) for tokens in completions if len(tokens) < 3}:
        done = min(unfinished)
        seeds = np.array([seed for seed, tokens in enumerate(completions) if len(tokens) == done])
        histories = np.array([prompt + completions[seed] for seed in seeds])
        committed, accepted = wave(target, drafter, histories, seeds, k=2 if done == 0 else 1)
        accepted_at_first = accepted_at_first or accepted
        for seed, tokens in zip(seeds, committed, strict=True):
            completions[seed] = (completions[seed] + tokens)[:3]

    counts = np.bincount([np.ravel_multi_index(tokens, (3, 3, 3)) for tokens in completions], minlength=27)

    # Rejections at both positions and full acceptances all take part.
    assert min(np.bincount(accepted_at_first, minlength=3)) > 500
    assert chi_square_p(counts, joint(target, prompt)) > FITS
    # What the test can see: a fifth of the drafter's distribution mixed in, a temperature that is a fifth too high.
    assert chi_square_p(counts, 0.8 * joint(target, prompt) + 0.2 * joint(drafter, prompt)) < MISFITS
    assert chi_square_p(counts, joint(target, prompt, 1.2)) < MISFITS
