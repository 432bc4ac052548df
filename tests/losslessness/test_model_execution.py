"""Every supported family, in every way its execution can be arranged, gives the text of bare transformers."""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, cast

import pytest
import torch

from tests.engine.tiny_models import FAMILIES, TinyModel, save_model
from tests.engine.whole_rounds import noisy_copy
from tests.fakes.ports import kept_port
from tests.losslessness.model_execution import (
    DRAFTERS,
    MAX_TOKENS,
    Case,
    Result,
    Share,
    is_greedy,
    load_drafters,
    plain_ids,
    requests,
    run_case,
)
from workers.engine.tensor_parallel import check_tensor_parallel
from workers.errors import ConfigurationError

ROOT = Path(__file__).parents[2]
CASES = [Case(*options) for options in itertools.product([True, False], repeat=3)]
# Two processes take longer: every two of the options meet in all four ways, but not all three in all eight.
PAIRED_CASES = [case for case in CASES if (case.prefix_caching + case.chunked + case.scarce) % 2 == 0]
NOT_SPLIT = ("gpt2",)
"""Families for which transformers has no plan of tensor parallelism."""
SPLIT = [family for family in FAMILIES if family not in NOT_SPLIT]


@dataclass
class Family:
    """A family's tiny model with its drafters, and the ids that its requests must give."""

    folder: Path
    target: Share
    drafters: dict[str, Share]
    expected: list[list[int]]


@pytest.fixture(scope="module")
def family_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    """Returns a family by its name, made once."""
    kept: dict[str, Family] = {}

    def get(name: str) -> Family:
        if name not in kept:
            kept[name] = _family(name, tmp_path_factory.mktemp(name))
        return kept[name]

    return get


def _family(name: str, folder: Path) -> Family:
    model = TinyModel(folder, save_model(FAMILIES[name](), folder))
    for drafter, noise in DRAFTERS.items():
        noisy_copy(model, folder / drafter, noise)
    target = Share.load(str(folder))
    expected = plain_ids(target)
    for request, ids in zip(requests(), expected, strict=True):
        if is_greedy(request):
            assert ids == _generated(model.reference, request.prompt.tolist())
    return Family(folder, target, load_drafters(folder), expected)


def _generated(reference: Any, prompt: list[int]) -> list[int]:
    """What transformers itself generates greedily; nothing but the length ends it."""
    reference.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    output = reference.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False, pad_token_id=0
    )
    generated: list[int] = output[0, len(prompt) :].tolist()
    return generated


class TwoRanks:
    """A pair of processes that run one family after the other, each with its share of the target."""

    def __init__(self) -> None:
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.losslessness.model_execution_rank", str(rank)],
                cwd=ROOT,
                # Without CUDA the ranks meet on the CPU, wherever the tests run.
                env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        self._loaded: Path | None = None

    def run(self, family: Family, case: Case) -> Result:
        if self._loaded != family.folder:
            self._load(family.folder)
        self._send(0, {"case": asdict(case)})
        return Result(**self._answer())

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()

    def _load(self, folder: Path) -> None:
        if self._loaded is not None:
            self._send(0, {"end": True})
        with kept_port() as port:
            for rank in range(2):
                self._send(rank, {"folder": str(folder), "port": port})
            assert self._answer() == {}
        self._loaded = folder

    def _send(self, rank: int, command: dict[str, Any]) -> None:
        stdin = cast(IO[str], self._processes[rank].stdin)
        stdin.write(json.dumps(command) + "\n")
        stdin.flush()

    def _answer(self) -> Any:
        return json.loads(cast(IO[str], self._processes[0].stdout).readline())


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[TwoRanks]:
    pair = TwoRanks()
    yield pair
    pair.end()


def check(result: Result, expected: list[list[int]], case: Case) -> None:
    """The text is as expected, and what the case is about has really taken place."""
    assert result.ids == expected
    assert (result.prefix_hits > 0) is case.prefix_caching
    assert (result.most_chunks > 1) is case.chunked
    assert (result.preemptions > 0) is case.scarce
    drafted, accepted = result.drafted, result.accepted
    assert 0.9 * drafted["own"] <= accepted["own"] > 0
    assert 0 < accepted["noisy"] < drafted["noisy"]
    assert accepted["random"] < 0.3 * drafted["random"]
    assert not result.blocks_left


def named(value: str | Case) -> str:
    if isinstance(value, str):
        return value
    return "-".join(name for name, wanted in asdict(value).items() if wanted) or "plain"


@pytest.mark.parametrize(("family", "case"), itertools.product(FAMILIES, CASES), ids=named)
def test_one_process_gives_the_text_of_transformers(
    family: str, case: Case, family_of: Callable[[str], Family]
) -> None:
    model = family_of(family)
    check(run_case(model.target, model.drafters, case), model.expected, case)


@pytest.mark.parametrize(("family", "case"), itertools.product(SPLIT, PAIRED_CASES), ids=named)
def test_two_ranks_give_the_text_of_transformers(
    family: str, case: Case, family_of: Callable[[str], Family], two_ranks: TwoRanks
) -> None:
    model = family_of(family)
    check(two_ranks.run(model, case), model.expected, case)


@pytest.mark.parametrize("family", NOT_SPLIT)
def test_a_family_that_cannot_be_split_is_refused_by_name(family: str, tmp_path: Path) -> None:
    save_model(FAMILIES[family](), tmp_path)
    with pytest.raises(ConfigurationError) as caught:
        check_tensor_parallel(str(tmp_path), 2)
    for named in ("tensor_parallel_size is 2", "no plan to split", str(tmp_path), family):
        assert named in str(caught.value)
