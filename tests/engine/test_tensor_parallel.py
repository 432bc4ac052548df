"""Two ranks compute what one process computes, and neither waits for ever for a dead one."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import pytest
import torch

from tests.engine.tensor_parallel_lead import step_input
from tests.engine.tiny_models import FAMILIES, TinyModel, save_model
from tests.fakes.ports import kept_port
from tests.limits import HANG_S
from workers.engine.engine import Engine
from workers.engine.step import AcceptedPath, StepInput
from workers.engine.tensor_parallel import check_tensor_parallel
from workers.errors import ConfigurationError
from workers.messages import token_ids

TIMEOUT_S = 5 * HANG_S
"""By far longer than a rank takes to notice that another one was killed."""
IDLE_TIMEOUT_S, IDLE_S = 20.0, 22.0
"""Longer than a rank that is alive is ever kept from saying so."""
ROOT = Path(__file__).parents[2]


@pytest.fixture
def device() -> str:
    """The ranks compute on the CPU; so does the engine that they are held against."""
    return "cpu"


@dataclass
class Group:
    """Two spawned ranks; rank 0 takes commands."""

    lead: subprocess.Popen[str]
    follower: subprocess.Popen[str]

    def ask(self, command: dict[str, Any]) -> Any:
        stdin = cast(IO[str], self.lead.stdin)
        stdin.write(json.dumps(command) + "\n")
        stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        return json.loads(cast(IO[str], self.lead.stdout).readline())


@contextmanager
def ranks(folder: Path, timeout_s: float = TIMEOUT_S) -> Iterator[Group]:
    def spawn(role: str, port: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", f"tests.engine.tensor_parallel_{role}", str(folder), str(port), str(timeout_s)]
        # Without CUDA the ranks meet on the CPU, wherever the tests run.
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, text=True)

    with kept_port() as port:
        group = Group(spawn("lead", port), spawn("peer", port))
        processes = group.lead, group.follower
        try:
            # They join only now: what imports take longer in one of them is no time that the other waits for it.
            for process in processes:
                assert cast(IO[str], process.stdout).readline() == "imported\n"
            for process in processes:
                stdin = cast(IO[str], process.stdin)
                stdin.write("\n")
                stdin.flush()
            yield group
        finally:
            for process in processes:
                process.kill()
                process.communicate()


@pytest.fixture(scope="module")
def group(tiny_llama: TinyModel) -> Iterator[Group]:
    """Two ranks that have loaded, for tests that leave them alive, and for the last one, which does not."""
    with ranks(tiny_llama.folder) as loaded:
        loaded.answer()
        yield loaded


STEPS: list[list[list[Any]]] = [
    [[1, 0, list(range(1, 40)), 2], [2, 0, [5, 6, 7], 3]],
    [[1, 39, [8], 1], [2, 2, [9, 10, 11, 12, 13], 5]],
    [[2, 4, [20], 1], [1, 20, [21], 1]],
]


@dataclass
class Idle:
    """Two ranks that nobody has asked for anything since `since_s`, after the first of STEPS, which gave `logits`."""

    group: Group
    blocks: int
    logits: list[list[float]]
    since_s: float


@pytest.fixture(scope="module")
def idle(tiny_llama: TinyModel) -> Iterator[Idle]:
    """Two ranks that are idle during the tests of this module, of which the last one goes on with them."""
    with ranks(tiny_llama.folder, IDLE_TIMEOUT_S) as group:
        blocks = group.answer()["ready"]
        yield Idle(group, blocks, group.ask({"steps": STEPS[0]}), time.monotonic())


def test_two_ranks_give_the_logits_of_one(idle: Idle, load_engine: Callable[..., Engine]) -> None:
    alone = load_engine()
    assert idle.blocks == 2 * alone.total_blocks  # half the heads, twice the blocks
    torch.testing.assert_close(torch.tensor(idle.logits), stepped(alone, 0), atol=1e-5, rtol=0)


def stepped(alone: Engine, number: int) -> torch.Tensor:
    """What one process gives for one of STEPS."""
    if number == 0:
        alone.start(1)
        alone.start(2)
    return alone.forward([step_input(*each) for each in STEPS[number]])


def test_two_ranks_keep_the_same_paths_of_trees(group: Group, load_engine: Callable[..., Engine]) -> None:
    parents = [-1, -1, 0, 1, 3, 2]
    rounds: list[tuple[list[Any], list[Any]]] = [
        # Paths that have to be copied, that are in place, and that are empty; a chain beside them.
        (
            [[1, 0, list(range(1, 40)), 7, parents], [2, 0, list(range(40, 60)), 7, parents], [3, 0, [5] * 7, 7]],
            [[1, 33, [1, 3, 4]], [2, 14, [0]]],
        ),
        (
            [[1, 36, [61, 4, 5, 6, 7, 8, 9], 7, parents], [2, 15, [62, 4, 5, 6, 7, 8, 9], 7, parents], [3, 4, [9], 1]],
            [[1, 37, []], [2, 16, [0, 2, 5]]],
        ),
        ([[1, 37, [63], 1], [2, 19, [64, 65], 2], [3, 5, [8, 7], 2]], []),
    ]
    alone = load_engine()
    for sequence_id in (1, 2, 3):
        alone.start(sequence_id)
    for steps, kept in rounds:
        expected = alone.forward([step_input(*each) for each in steps])
        torch.testing.assert_close(torch.tensor(group.ask({"steps": steps})), expected, atol=1e-5, rtol=0)
        alone.keep_paths([AcceptedPath(one, first, token_ids(nodes)) for one, first, nodes in kept])
        assert group.ask({"keep": kept}) is None


def test_two_ranks_share_a_prefix_and_copy_the_block_that_one_sequence_rolls_back_into(
    group: Group, load_engine: Callable[..., Engine]
) -> None:
    prompt = list(range(1, 33))
    alone = load_engine(prefix_caching=False)
    group.ask({"steps": [[11, 0, prompt, 1]]})
    group.ask({"publish": [11, prompt]})
    assert group.ask({"start": [12, [*prompt, 40]]}) == 32
    alone.start(11)
    alone.start(12)
    alone.forward([StepInput(one, 0, token_ids(prompt), 1) for one in (11, 12)])
    for steps in (
        [[12, 32, [40, 41], 2]],
        [[11, 32, [50], 1], [12, 30, [60, 61], 2]],
        [[11, 33, [3], 1], [12, 32, [4], 1]],
    ):
        expected = alone.forward([StepInput(one, first, token_ids(ids), rows) for one, first, ids, rows in steps])
        torch.testing.assert_close(torch.tensor(group.ask({"steps": steps})), expected, atol=1e-5, rtol=0)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="says what is mapped on Linux only")
def test_a_rank_holds_no_more_than_its_share_of_the_weights(tiny_llama: TinyModel, group: Group) -> None:
    sizes = {name: 4 * parameter.numel() for name, parameter in tiny_llama.reference.named_parameters()}
    norms = sum(size for name, size in sizes.items() if "norm" in name)
    share = norms + (sum(sizes.values()) - norms) / 2
    mapped, owned = group.ask({"weights": True})
    # Rows of a matrix are mapped as they lie in the file; columns are gathered into memory of the rank's own.
    assert 0 < mapped < share
    assert mapped + owned == pytest.approx(share, rel=0.01)


def test_a_follower_notices_at_once_that_rank_0_was_killed(tiny_llama: TinyModel) -> None:
    with ranks(tiny_llama.folder) as group:
        group.answer()
        group.lead.kill()
        assert group.follower.wait(timeout=HANG_S) == 3


def test_rank_0_notices_at_once_that_a_follower_was_killed(group: Group) -> None:
    group.follower.kill()
    # Did it wait for the timeout, pytest would end the test before.
    assert "link_closed" in group.ask({"steps": [[21, 0, [1, 2, 3], 1]]})


@pytest.mark.parametrize(
    ("family", "size", "complaint"),
    [
        ("llama", 3, "3 does not divide the 4 attention heads"),
        ("llama", 4, "4 does not divide the 2 KV heads"),
        ("gpt2", 2, "no plan to split"),
        ("llama", 0, "at least 1"),
    ],
)
def test_a_size_that_does_not_divide_is_refused_before_any_weight_is_read(
    family: str, size: int, complaint: str, tmp_path: Path
) -> None:
    save_model(FAMILIES[family](), tmp_path)
    for weights in tmp_path.glob("*.safetensors"):
        weights.unlink()
    with pytest.raises(ConfigurationError, match=complaint):
        check_tensor_parallel(str(tmp_path), size)


def test_sizes_that_divide_are_accepted(tiny_model: Callable[[str], TinyModel]) -> None:
    check_tensor_parallel(str(tiny_model("llama").folder), 2)
    check_tensor_parallel(str(tiny_model("gpt2").folder), 1)


def test_after_an_idle_time_longer_than_the_timeout_two_ranks_still_give_the_logits_of_one(
    idle: Idle, load_engine: Callable[..., Engine]
) -> None:
    alone, group = load_engine(), idle.group
    stepped(alone, 0)
    time.sleep(max(0.0, IDLE_S - (time.monotonic() - idle.since_s)))
    for number in (1, 2):
        logits = torch.tensor(group.ask({"steps": STEPS[number]}))
        torch.testing.assert_close(logits, stepped(alone, number), atol=1e-5, rtol=0)
    group.ask({"close": True})
    assert group.follower.wait(timeout=HANG_S) == 0
