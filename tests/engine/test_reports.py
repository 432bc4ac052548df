"""Log-probabilities from the verifier: of accepted, corrected and bonus tokens alike, and of the prompt."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.engine.tiny_models import TinyModel
from workers.engine.engine import Engine
from workers.engine.verifier import Verifier
from workers.messages import (
    LogitRules,
    Proposal,
    SamplingParams,
    TokenLogprobs,
    VerifiedItem,
    VerifyItem,
    VerifyRequest,
    token_ids,
)

LoadEngine = Callable[..., Engine]
PROMPT = [3, 17, 40, 9, 61, 5, 22]
SAMPLINGS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.3, top_k=1, seed=4),
    SamplingParams(
        temperature=0.8, top_p=0.9, seed=4, rules=LogitRules(logit_bias=((11, -100.0),), frequency_penalty=1.0)
    ),
]


def verify(verifier: Verifier, *items: VerifyItem) -> tuple[VerifiedItem, ...]:
    return verifier.verify(VerifyRequest(items)).items


def assert_reported(report: TokenLogprobs | None, model: TinyModel, history: list[int], top: int) -> None:
    """The report is on the last tokens of `history`, and what the unmodified model says of them."""
    assert report is not None
    first = len(history) - len(report)
    logprobs = model.logits(history[:-1])[first - 1 :].log_softmax(-1)
    tokens = torch.tensor(history[first:])
    torch.testing.assert_close(
        torch.from_numpy(report.chosen), logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), rtol=1e-4, atol=1e-4
    )
    best, ids = logprobs.topk(top, dim=-1)
    assert report.top_ids.tolist() == ids.tolist()
    torch.testing.assert_close(torch.from_numpy(report.top), best, rtol=1e-4, atol=1e-4)
    assert report.chosen.dtype == report.top.dtype == np.float32


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("right", [0, 1, 3])
def test_every_committed_token_is_reported_on(
    load_engine: LoadEngine, tiny_llama: TinyModel, sampling: SamplingParams, right: int
) -> None:
    verifier = Verifier(load_engine())
    prompt = token_ids(PROMPT)
    reference: list[int] = []
    for _ in range(4):
        committed = token_ids([*PROMPT, *reference])
        [plain] = verify(verifier, VerifyItem(1, 0, 0, committed, sampling=sampling, prompt_tokens=len(PROMPT)))
        reference += plain.token_ids.tolist()
    drafts = [token if index < right else (token + 1) % 96 for index, token in enumerate(reference[:3])]

    [verified] = verify(
        verifier,
        VerifyItem(
            2, 0, 0, prompt, Proposal(token_ids(drafts)), sampling=sampling, prompt_tokens=len(PROMPT), logprobs=3
        ),
    )

    assert verified.accepted == right
    assert verified.token_ids.tolist() == reference[: right + 1]
    assert_reported(verified.logprobs, tiny_llama, PROMPT + reference[: right + 1], top=3)
    assert verified.scored is None


def test_the_path_that_is_taken_through_a_tree_is_reported_on(load_engine: LoadEngine, tiny_llama: TinyModel) -> None:
    verifier, sampling = Verifier(load_engine()), SAMPLINGS[0]
    first = VerifyItem(1, 0, 0, token_ids(PROMPT), sampling=sampling, prompt_tokens=len(PROMPT))
    [plain] = verify(verifier, first)
    right = int(plain.token_ids[0])
    [plain] = verify(verifier, VerifyItem(1, 1, len(PROMPT), plain.token_ids))
    second = int(plain.token_ids[0])
    # The right path is nodes 1 and 3.
    tree = Proposal(token_ids([(right + 1) % 96, right, 50, second, 51]), parents=token_ids([-1, -1, 0, 1, 3]))

    [verified] = verify(
        verifier,
        VerifyItem(2, 0, 0, token_ids(PROMPT), tree, sampling=sampling, prompt_tokens=len(PROMPT), logprobs=2),
    )

    assert verified.accepted >= 2 and verified.token_ids.tolist()[:2] == [right, second]
    assert_reported(verified.logprobs, tiny_llama, PROMPT + verified.token_ids.tolist(), top=2)


def test_a_prompt_is_reported_on_chunk_by_chunk_beside_neighbours_that_want_nothing(
    load_engine: LoadEngine, tiny_llama: TinyModel
) -> None:
    verifier, sampling, length = Verifier(load_engine()), SAMPLINGS[0], len(PROMPT)
    neighbour = VerifyItem(8, 0, 0, token_ids([4, 5]), sampling=sampling, prompt_tokens=2)
    chunk = token_ids(PROMPT[:3])
    following = token_ids(PROMPT[1:4])
    first, beside = verify(
        verifier,
        VerifyItem(7, 0, 0, chunk, sample=False, sampling=sampling, prompt_tokens=length, logprobs=2, scored=following),
        neighbour,
    )
    last, other = verify(
        verifier,
        VerifyItem(7, 1, 3, token_ids(PROMPT[3:]), Proposal(token_ids([1])), logprobs=2, scored=token_ids(PROMPT[4:])),
        VerifyItem(9, 0, 0, token_ids([4, 5]), sampling=sampling, prompt_tokens=2, logprobs=0),
    )

    assert_reported(first.scored, tiny_llama, PROMPT[:4], top=2)
    assert_reported(last.scored, tiny_llama, PROMPT, top=2)
    assert first.logprobs is None and len(first.token_ids) == 0
    assert last.scored is not None and len(last.scored) == 3
    assert_reported(last.logprobs, tiny_llama, PROMPT + last.token_ids.tolist(), top=2)
    assert beside.logprobs is None and beside.scored is None
    assert other.token_ids.tolist() == beside.token_ids.tolist()
    assert_reported(other.logprobs, tiny_llama, [4, 5, *other.token_ids.tolist()], top=0)


def test_a_prompt_whose_logits_are_not_finite_is_a_fault_of_its_sequence_alone(load_engine: LoadEngine) -> None:
    engine = load_engine()
    with torch.no_grad():
        engine._loaded.model.get_input_embeddings().weight[5] = torch.nan  # type: ignore[operator]
    bad = VerifyItem(
        1, 0, 0, token_ids([3, 5, 7]), sample=False, sampling=SAMPLINGS[0], prompt_tokens=4, logprobs=1,
        scored=token_ids([5, 7, 8]),
    )  # fmt: skip
    good = VerifyItem(2, 0, 0, token_ids([3, 7]), sampling=SAMPLINGS[0], prompt_tokens=2, logprobs=1)

    failed, fine = verify(Verifier(engine), bad, good)

    assert failed.fault is not None and "not finite" in failed.fault
    assert fine.fault is None and fine.logprobs is not None
