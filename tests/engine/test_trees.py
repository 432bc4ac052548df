"""Trees in the engine: every node computes what its path would as a plain sequence, and accepted paths stay exact."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.tiny_models import CONTEXT, VOCABULARY, TinyModel
from workers.engine.engine import Engine
from workers.engine.groups import AttentionGroup, prepare_step
from workers.engine.step import AcceptedPath, PackedStep, StepInput, pack_step
from workers.messages import TokenIds, token_ids

TOLERANCE = 2e-5
LoadEngine = Callable[..., Engine]
tree_shapes = st.lists(st.integers(0, 99), min_size=1, max_size=14).map(
    lambda choices: token_ids([choice % (node + 1) - 1 for node, choice in enumerate(choices)])
)


def path_to(node: int, parents: list[int]) -> list[int]:
    return [] if node < 0 else [*path_to(parents[node], parents), node]


def random_ids(count: int, seed: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(3, VOCABULARY, count).tolist()
    return ids


def expected_rows(model: TinyModel, text: list[int], nodes: list[int], parents: list[int]) -> torch.Tensor:
    """The unmodified model's logits behind `text` and behind each node, each path read as a sequence of its own."""
    rows = [model.logits(text)[-1:]]
    rows += [model.logits(text + [nodes[each] for each in path_to(node, parents)])[-1:] for node in range(len(nodes))]
    return torch.cat(rows)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2-sliding", "gpt2", "gpt_neox"])
def test_the_logits_of_every_node_are_those_of_its_path_as_a_plain_sequence(
    family: str, tiny_model: Callable[[str], TinyModel], load_engine: LoadEngine
) -> None:
    model = tiny_model(family)
    engine = load_engine(model.folder)

    @given(trees=st.lists(tree_shapes, min_size=1, max_size=3), lengths=st.data())
    @settings(max_examples=25)
    def check(trees: list[TokenIds], lengths: st.DataObject) -> None:
        inputs, expected = [], []
        for number, parents in enumerate(trees):
            text = random_ids(lengths.draw(st.integers(2, 40)), number)
            cached = lengths.draw(st.integers(0, len(text) - 1))
            nodes = random_ids(len(parents), 100 + number)
            engine.start(number)
            if cached:
                engine.forward([StepInput(number, 0, token_ids(text[:cached]), 0)])
            new = token_ids(text[cached:] + nodes)
            inputs.append(StepInput(number, cached, new, len(nodes) + 1, parents))
            expected.append(expected_rows(model, text, nodes, parents.tolist()))
        torch.testing.assert_close(engine.forward(inputs).cpu(), torch.cat(expected), atol=TOLERANCE, rtol=0)
        engine.release(None)

    check()
    assert engine.free_blocks == engine.total_blocks


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_step_of_trees_chains_single_tokens_and_prompt_chunks_is_right_in_every_row(
    family: str, tiny_model: Callable[[str], TinyModel], load_engine: LoadEngine
) -> None:
    model = tiny_model(family)
    engine = load_engine(model.folder)
    parents = [-1, -1, 0, 2, 1, 2]
    inputs, expected = [], []
    # Sequences 0 and 1 are trees, 2 a chain of the same size, 3 and 4 single tokens, 5 a chunk of a prompt.
    for number, (cached, new) in enumerate([(30, 7), (12, 9), (30, 7), (40, 1), (40, 1), (16, 50)]):
        engine.start(number)
        text = random_ids(cached + new, number)
        engine.forward([StepInput(number, 0, token_ids(text[:cached]), 0)])
        is_tree = number < 2
        rows = min(new, 7)
        inputs.append(
            StepInput(number, cached, token_ids(text[cached:]), rows, token_ids(parents) if is_tree else None)
        )
        expected.append(expected_rows(model, text[:-6], text[-6:], parents) if is_tree else model.logits(text)[-rows:])
    torch.testing.assert_close(engine.forward(inputs).cpu(), torch.cat(expected), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_what_follows_a_kept_path_is_as_if_nothing_else_had_been_read(
    family: str, tiny_model: Callable[[str], TinyModel], load_engine: LoadEngine
) -> None:
    model = tiny_model(family)
    engine = load_engine(model.folder)

    @given(trees=st.lists(tree_shapes, min_size=1, max_size=3), choices=st.data())
    @settings(max_examples=25)
    def check(trees: list[TokenIds], choices: st.DataObject) -> None:
        texts = [random_ids(choices.draw(st.integers(1, 35)), number) for number in range(2)]
        for number, text in enumerate(texts):
            engine.start(number)
            engine.forward([StepInput(number, 0, token_ids(text), 0)])
        for parents in trees:
            inputs, paths, expected = [], [], []
            for number, text in enumerate(texts):
                nodes = random_ids(len(parents), 7 * number)
                last = choices.draw(st.integers(-1, len(parents) - 1))
                path = path_to(last, parents.tolist())
                inputs.append(StepInput(number, len(text) - 1, token_ids(text[-1:] + nodes), len(nodes) + 1, parents))
                paths.append(AcceptedPath(number, len(text), token_ids(path)))
                expected.append(expected_rows(model, text, nodes, parents.tolist()))
                texts[number] = text + [nodes[node] for node in path] + [5]
            torch.testing.assert_close(engine.forward(inputs).cpu(), torch.cat(expected), atol=TOLERANCE, rtol=0)
            engine.keep_paths(paths)
            assert [engine.length(number) for number in range(2)] == [len(text) - 1 for text in texts]
            held = sum(-(-(len(text) - 1) // engine.block_tokens) for text in texts)
            assert engine.free_blocks == engine.total_blocks - held
        logits = engine.forward(
            [StepInput(number, len(text) - 1, token_ids(text[-1:]), 1) for number, text in enumerate(texts)]
        )
        after = torch.cat([model.logits(text)[-1:] for text in texts])
        torch.testing.assert_close(logits.cpu(), after, atol=TOLERANCE, rtol=0)
        engine.release(None)

    check()
    assert engine.free_blocks == engine.total_blocks


def test_a_path_that_is_in_place_is_kept_without_a_copy(
    load_engine: LoadEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load_engine()
    engine.start(1)
    tree = StepInput(1, 0, token_ids([1, 2, 3, 4, 5, 6]), 0, token_ids([-1, 0, 0, 1, -1]))
    engine.forward([tree])
    moved: list[list[int]] = []
    monkeypatch.setattr(engine, "move", lambda moves: moved.append([*moves.sources.tolist(), *moves.targets.tolist()]))
    engine.keep_paths([AcceptedPath(1, 1, token_ids([0, 1]))])
    assert (moved, engine.length(1)) == ([], 3)
    engine.forward([tree])
    engine.keep_paths([AcceptedPath(1, 1, token_ids([]))])
    assert (moved, engine.length(1)) == ([], 1)
    engine.forward([tree])
    engine.keep_paths([AcceptedPath(1, 1, token_ids([0, 1, 3]))])
    first = engine._sequences[1].blocks[0] * engine.block_tokens
    assert (moved, engine.length(1)) == ([[first + 4, first + 3]], 4)


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        (AcceptedPath(2, 1, token_ids([0])), "unknown"),
        (AcceptedPath(1, 1, token_ids([0, 5])), "cannot keep"),
        (AcceptedPath(1, 1, token_ids([1, 0])), "cannot keep"),
        (AcceptedPath(1, 1, token_ids([-1])), "cannot keep"),
        (AcceptedPath(1, 7, token_ids([])), "cannot keep"),
    ],
)
def test_an_impossible_path_is_refused_and_changes_nothing(
    path: AcceptedPath, complaint: str, load_engine: LoadEngine
) -> None:
    engine = load_engine()
    for number in (0, 1):
        engine.start(number)
        engine.forward([StepInput(number, 0, token_ids([1, 2, 3, 4, 5, 6]), 0, token_ids([-1, 0, 0, 1, -1]))])
    with pytest.raises(ValueError, match=complaint):
        engine.keep_paths([AcceptedPath(0, 1, token_ids([4])), path])
    assert (engine.length(0), engine.length(1)) == (6, 6)


def test_a_copy_that_fails_leaves_the_committed_tokens(
    load_engine: LoadEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load_engine()
    engine.start(1)
    engine.forward([StepInput(1, 0, token_ids([1] * 20 + [2] * 20), 0, token_ids([-1] * 20))])

    def fail(_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine, "move", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.keep_paths([AcceptedPath(1, 20, token_ids([3]))])
    assert engine.length(1) == 20
    assert engine.free_blocks == engine.total_blocks - 2


@pytest.mark.parametrize(
    ("parents", "complaint"),
    [
        ([0], "node 0 has parent 0"),
        ([-1, 2, 0], "node 1 has parent 2"),
        ([-2], "node 0 has parent -2"),
        ([-1] * 4, "4 nodes in 3"),
    ],
)
def test_what_is_no_tree_is_refused_by_the_engine(parents: list[int], complaint: str, load_engine: LoadEngine) -> None:
    engine = load_engine()
    engine.start(1)
    with pytest.raises(ValueError, match=complaint):
        engine.forward([StepInput(1, 0, token_ids([1, 2, 3]), 1, token_ids(parents))])
    assert engine.length(1) == 0


def test_the_nodes_of_a_tree_count_against_the_context(load_engine: LoadEngine) -> None:
    engine = load_engine()
    engine.start(1)
    with pytest.raises(ValueError, match="exceed the context"):
        engine.forward([StepInput(1, 0, token_ids([1] * (CONTEXT + 1)), 1, token_ids([-1] * 5))])


# --- what it costs chains ------------------------------------------------------------------------------------


def chains_and_trees(trees: bool) -> PackedStep:
    """Single tokens of equal contexts, a lone long chunk, chains; and trees, or chains of their size."""
    shapes = [(400, 1), (400, 1), (400, 1), (900, 60), (20, 5), (20, 5), (300, 6), (300, 6)]
    tables, next_block, inputs = [], 1, []
    for number, (cached, new) in enumerate(shapes):
        blocks = -(-(cached + new) // 16)
        tables.append(list(range(next_block, next_block + blocks)))
        next_block += blocks
        parents = token_ids([-1, -1, 0, 0, 1]) if trees and number >= 6 else None
        inputs.append(StepInput(number, cached, token_ids([7] * new), min(new, 6), parents))
    return pack_step(inputs, tables)


def test_chains_keep_their_calls_and_their_fast_paths_beside_a_tree(load_engine: LoadEngine) -> None:
    pool = load_engine()._pool

    def groups(trees: bool) -> tuple[AttentionGroup, ...]:
        return prepare_step(chains_and_trees(trees), pool, torch.device("cpu")).groups

    def shape(group: AttentionGroup) -> tuple[object, ...]:
        return (group.start, group.stop, group.queries, group.exact, group.first_slot, group.padded_rows is None)

    beside_chains, beside_trees = groups(trees=False), groups(trees=True)
    assert [shape(group) for group in beside_trees] == [shape(group) for group in beside_chains]
    assert any(group.exact for group in beside_trees)
    assert any(group.first_slot is not None for group in beside_trees)
    assert [group.tree is not None for group in beside_trees].count(True) == 1
    assert all(group.tree is None for group in beside_chains)


def test_a_step_of_chains_sends_nothing_for_trees() -> None:
    chains, trees = chains_and_trees(trees=False), chains_and_trees(trees=True)
    assert (len(chains.tree_nodes), len(chains.parents)) == (0, 0)
    assert chains.places() is chains.positions
    assert len(trees.to_array()) == len(chains.to_array()) + 8 + 10
    assert trees.places().tolist() == chains.positions.tolist()
