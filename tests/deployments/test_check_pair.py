"""`leadout check-pair`: what it finds in files, what it measures, and how it ends."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from deployments.check_pair import Measurement, PairOptions, measure_pair, memory_row
from deployments.check_pair_command import verdict
from deployments.cli import cli
from tests.in_process import noisy_copy, save_byte_llama
from workers.engine.pair import PairRow, pair_rows


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a drafter that is often right, over the byte tokenizer."""
    folder = tmp_path_factory.mktemp("pair")
    model = save_byte_llama(folder / "target")
    drafter = noisy_copy(model, folder / "drafter", 0.02)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / "target" / name, drafter / name)
    return folder / "target", drafter


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("deployments.check_pair._KV_CACHE_GIB", 0.02)


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["check-pair", *map(str, arguments)])


def changed(drafter: Path, folder: Path, name: str, change: Callable[[dict], None]) -> Path:  # type: ignore[type-arg]
    """A copy of the drafter with one of its JSON files changed."""
    shutil.copytree(drafter, folder)
    content = json.loads((folder / name).read_text())
    change(content)
    (folder / name).write_text(json.dumps(content))
    return folder


def test_a_good_pair_is_measured_and_gets_a_verdict(pair: tuple[Path, Path]) -> None:
    threads = torch.get_num_threads()
    result = invoke(*pair, "--dtype", "float32", "--threads", 1, "--max-tokens", 12, "--quantization", "int8")
    torch.set_num_threads(threads)
    # Two models of one size: whether drafting pays is the machine's mood; that both were run is not.
    assert result.exit_code in (0, 1), result.output
    assert result.stdout.splitlines()[-1].startswith(("FITS: ", "DOES NOT PAY: "))
    assert "of drafts accepted" in result.stdout
    for column in ("tokenizer", "memory", "context", "verify, ms", "speed-up"):
        assert column in result.stdout


def test_acceptance_is_that_of_the_pair(pair: tuple[Path, Path]) -> None:
    steps: list[str] = []
    options = PairOptions(dtype="float32", threads=torch.get_num_threads(), max_tokens=12)
    same = measure_pair(str(pair[0]), str(pair[0]), options, steps.append)
    # An answer that ends within a block leaves some of its drafts unused.
    assert same.acceptance > 0.95
    assert same.accepted_length > 2
    assert [step.split()[0] for step in steps] == ["Loading", "Loading", "Timing", "Answering"]
    other = measure_pair(str(pair[0]), str(pair[1]), options, steps.append)
    assert 0 < other.acceptance < 1


def test_files_alone_need_no_weights(pair: tuple[Path, Path], tmp_path: Path) -> None:
    for folder, name in zip(pair, ("target", "drafter"), strict=True):
        shutil.copytree(folder, tmp_path / name, ignore=shutil.ignore_patterns("*.safetensors"))
    result = invoke(tmp_path / "target", tmp_path / "drafter", "--files-only")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == "FITS, as far as files tell; nothing was run"
    assert invoke(tmp_path / "target", tmp_path / "drafter").exit_code == 2


def swap_two_ids(content: dict) -> None:  # type: ignore[type-arg]
    vocabulary = content["model"]["vocab"]
    first, second = sorted(vocabulary, key=lambda token: int(vocabulary[token]))[10:12]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]


def add_a_token(content: dict) -> None:  # type: ignore[type-arg]
    content["model"]["vocab"]["another"] = 258


@pytest.mark.parametrize("change", [swap_two_ids, add_a_token])
def test_another_tokenizer_or_permuted_ids_end_with_one(
    change: Callable[[dict], None],  # type: ignore[type-arg]
    pair: tuple[Path, Path],
    tmp_path: Path,
) -> None:
    other = changed(pair[1], tmp_path / "other", "tokenizer.json", change)
    result = invoke(pair[0], other)
    assert result.exit_code == 1
    line = result.stdout.splitlines()[-1]
    assert line.startswith("DOES NOT FIT: tokenizer: ") and "different tokenizers" in line


def test_a_shorter_context_and_other_end_ids_are_noted_and_allowed(pair: tuple[Path, Path], tmp_path: Path) -> None:
    def change(content: dict) -> None:  # type: ignore[type-arg]
        content.update(max_position_embeddings=64, eos_token_id=[0, 7])

    other = changed(pair[1], tmp_path / "short", "config.json", change)
    (other / "generation_config.json").unlink(missing_ok=True)
    notes = {row.subject: row.note for row in pair_rows(str(pair[0]), str(other))}
    assert notes["context, tokens"] == "beyond 64 tokens nothing is drafted"
    assert notes["end of text, ids"] == "they differ; the target's count"
    assert notes["logits"] == "padding beyond the tokenizer is never drawn"
    assert invoke(pair[0], other, "--files-only").exit_code == 0


def test_too_little_memory_for_both_ends_with_one_and_names_it(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.check_pair.available_bytes", lambda device: 2**20)
    result = invoke(*pair)
    assert result.exit_code == 1
    assert "DOES NOT FIT: memory: " in result.stdout.splitlines()[-1]
    assert "0.000977 GiB available" in result.stdout.splitlines()[-1]
    monkeypatch.setattr("deployments.check_pair.available_bytes", lambda device: None)
    assert memory_row(str(pair[0]), str(pair[1]), PairOptions()).problem is None


def test_what_cannot_be_checked_ends_with_two(pair: tuple[Path, Path], tmp_path: Path) -> None:
    result = invoke(pair[0], tmp_path / "nowhere")
    assert result.exit_code == 2
    assert "nowhere does not exist" in result.stderr
    assert invoke(*pair, "--quantization", "int3").exit_code == 2
    assert invoke(*pair, "--max-tokens", "0").exit_code == 2


def test_the_verdict_follows_the_expected_speed() -> None:
    times = {1: 10.0, 2: 10.0, 3: 10.0, 5: 10.0, 9: 20.0}
    good, line = verdict([], Measurement(acceptance=0.8, accepted_length=3.0, draft_ms=1.0, verify_ms=times))
    # (1 - 0.8^5) / (0.2 * 1.4) = 2.40 with four drafts; the others are less
    assert good and "best with 4: 2.40 times" in line
    slow, line = verdict([], Measurement(acceptance=0.1, accepted_length=1.1, draft_ms=5.0, verify_ms=times))
    assert not slow and line.startswith("DOES NOT PAY")
    bad, line = verdict([PairRow("logits", "5", "8", problem="too few")], None)
    assert not bad and line == "DOES NOT FIT: logits: too few"
