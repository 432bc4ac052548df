"""Along a proposal every position obeys the rules with the history it would really have."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decoding.test_joint import Table, next_logits, table
from workers.decoding.logit_rules import CompiledRules, RuleContext
from workers.decoding.sampling import PositionRun, SamplingRows, draw_tokens
from workers.decoding.verification import verify_chain
from workers.messages import LogitRules, SamplingParams, token_ids

VOCABULARY = 6
# Gives the runs of one verification: the prompt's length, committed tokens, drafts.
MakeRuns = Callable[[SamplingParams, int, list[int], list[int]], list[PositionRun]]


def by_definition(logits: np.ndarray, rules: LogitRules, prompt: list[int], output: list[int]) -> np.ndarray:
    """The rules on one row, token by token, straight from their description."""
    edited = logits.copy()
    for token in range(len(logits)):
        edited[token] += np.float32(dict(rules.logit_bias).get(token, 0.0))
        if token in prompt or token in output:
            penalty = np.float32(rules.repetition_penalty)
            edited[token] = edited[token] / penalty if edited[token] > 0 else edited[token] * penalty
        count = output.count(token)
        edited[token] -= np.float32(rules.frequency_penalty * count + rules.presence_penalty * (count > 0))
    for word in rules.bad_words:
        if len(output) >= len(word) - 1 and output[len(output) - len(word) + 1 :] == list(word[:-1]):
            edited[word[-1]] = -np.inf
    if len(output) < rules.min_tokens:
        edited[list(rules.end_token_ids)] = -np.inf
    edited[[token for token, bias in rules.logit_bias if bias == -100]] = -np.inf
    return edited


def decode_by_definition(target: Table, prompt: list[int], sampling: SamplingParams, tokens: int) -> list[int]:
    output: list[int] = []
    while len(output) < tokens:
        row = by_definition(next_logits(target, prompt + output), sampling.rules or LogitRules(), prompt, output)
        run = PositionRun(sampling, len(prompt) + len(output), 1)
        output += draw_tokens(torch.from_numpy(row)[None], SamplingRows.of_runs([run])).tolist()
    return output


def rightly(sampling: SamplingParams, prompt_tokens: int, committed: list[int], drafts: list[int]) -> list[PositionRun]:
    """All positions of the chain in one run, as the verifier asks for them."""
    assert sampling.rules is not None
    history = RuleContext(CompiledRules.of(sampling.rules), token_ids(committed + drafts), prompt_tokens)
    return [PositionRun(sampling, len(committed), len(drafts) + 1, history)]


def with_committed_tokens_only(
    sampling: SamplingParams, prompt_tokens: int, committed: list[int], drafts: list[int]
) -> list[PositionRun]:
    """The fault: every position of the chain sees the history of its first one."""
    assert sampling.rules is not None
    history = RuleContext(CompiledRules.of(sampling.rules), token_ids(committed), prompt_tokens)
    return [PositionRun(sampling, len(committed) + index, 1, history) for index in range(len(drafts) + 1)]


def with_the_draft_itself(
    sampling: SamplingParams, prompt_tokens: int, committed: list[int], drafts: list[int]
) -> list[PositionRun]:
    """Another fault: every position sees one token too much, the draft it is to verify."""
    assert sampling.rules is not None
    runs = []
    for index in range(len(drafts) + 1):
        seen = token_ids((committed + drafts)[: len(committed) + index + 1])
        # The keys belong to the position; the history is looked up one position later, with a prompt as much longer.
        runs.append(
            PositionRun(
                sampling, len(committed) + index, 1, Ahead(CompiledRules.of(sampling.rules), seen, prompt_tokens)
            )
        )
    return runs


class Ahead(RuleContext):
    """A context that looks at one position too far."""

    def banned_ids(self, position: int) -> np.ndarray:
        return RuleContext.banned_ids(self, min(position + 1, len(self.tokens)))

    def penalties(self, positions: range) -> object:
        return RuleContext.penalties(self, range(positions.start + 1, positions.stop + 1))


def decode_speculatively(
    target: Table,
    drafter: Table,
    prompt: list[int],
    sampling: SamplingParams,
    tokens: int,
    k: int,
    runs_of: MakeRuns = rightly,
) -> tuple[list[int], int]:
    """Return the tokens and how many drafts were accepted."""
    committed, accepted = list(prompt), 0
    while len(committed) < len(prompt) + tokens:
        drafts: list[int] = []
        for _ in range(k):
            so_far = committed + drafts
            run = rightly(sampling, len(prompt), so_far, [])
            row = torch.from_numpy(next_logits(drafter, so_far))[None]
            drafts += draw_tokens(row, SamplingRows.of_runs(run)).tolist()
        logits = np.stack([next_logits(target, committed + drafts[:index]) for index in range(k + 1)])
        rows = SamplingRows.of_runs(runs_of(sampling, len(prompt), committed, drafts))
        outcome = verify_chain(token_ids(draw_tokens(torch.from_numpy(logits), rows).tolist()), token_ids(drafts))
        committed += outcome.token_ids.tolist()
        accepted += outcome.accepted
    return committed[len(prompt) : len(prompt) + tokens], accepted


tokens = st.integers(0, VOCABULARY - 1)
rules = st.builds(
    LogitRules,
    min_tokens=st.sampled_from([0, 3, 7]),
    end_token_ids=st.just((0, 1)),
    # Token 5 is left alone, so that something can always be drawn.
    logit_bias=st.dictionaries(st.integers(0, 4), st.sampled_from([-100.0, -3.0, 0.5, 4.0]), max_size=3).map(
        lambda biases: tuple(biases.items())
    ),
    repetition_penalty=st.sampled_from([1.0, 1.3, 2.5, 0.7]),
    presence_penalty=st.sampled_from([0.0, 2.0, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 1.5, 0.25, -0.5]),
    bad_words=st.lists(
        st.tuples(st.lists(tokens, max_size=2), st.integers(0, 4)).map(lambda word: (*word[0], word[1])), max_size=4
    ).map(tuple),
)
sampling_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.4, 1.0, 2.0]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([1.0, 0.8]),
    seed=st.integers(0, 2**63 - 1),
    min_p=st.sampled_from([0.0, 0.2]),
    rules=rules,
)


@given(
    sampling=sampling_params,
    tables=st.tuples(st.integers(0, 1000), st.integers(0, 1000)),
    likeness=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    k=st.integers(0, 5),
    prompt=st.lists(tokens, min_size=2, max_size=5),
)
@settings(max_examples=80)
def test_no_drafter_and_no_draft_length_changes_the_ids_under_any_rules(
    sampling: SamplingParams, tables: tuple[int, int], likeness: float, k: int, prompt: list[int]
) -> None:
    target = table(tables[0], VOCABULARY)
    drafter = (likeness * target + np.float32(1 - likeness) * table(tables[1], VOCABULARY)).astype(np.float32)

    decoded, accepted = decode_speculatively(target, drafter, prompt, sampling, 12, k)

    assert decoded == decode_by_definition(target, prompt, sampling, 12)
    if likeness == 1.0:
        assert accepted >= 12 * k // (
            k + 1
        )  # the drafter obeys the same rules, so the target's weights are always right


@pytest.mark.parametrize("fault", [with_committed_tokens_only, with_the_draft_itself])
@pytest.mark.parametrize(
    "rule",
    [
        LogitRules(repetition_penalty=4.0),
        LogitRules(presence_penalty=2.0),
        LogitRules(frequency_penalty=1.5),
        LogitRules(bad_words=tuple((a, b) for a in range(16) for b in range(16) if (a + b) % 3 == 0)),
    ],
    ids=["repetition", "presence", "frequency", "bad words"],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_wrong_history_would_be_seen(rule: LogitRules, fault: MakeRuns, temperature: float) -> None:
    """What the comparison is worth: each rule with a wrong history changes ids within a few short texts."""
    changed = 0
    for seed in range(12):
        target, sampling = table(seed, 16), SamplingParams(temperature, seed=seed, rules=rule)
        plain = decode_by_definition(target, [0, 1], sampling, 12)
        assert decode_speculatively(target, target, [0, 1], sampling, 12, 4)[0] == plain
        changed += decode_speculatively(target, target, [0, 1], sampling, 12, 4, fault)[0] != plain
    assert changed >= 3
