"""A target and a drafter are only paired when token ids mean the same to both."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workers.engine.pair import check_pair
from workers.errors import ConfigurationError

Change = Callable[[dict[str, Any]], None]


def tokenizer() -> dict[str, Any]:
    tokens = ["a", "b", "c", "ab", "abc"]
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": 5, "content": "<end>", "special": True, "lstrip": False, "rstrip": False, "normalized": False}
        ],
        "model": {
            "type": "BPE",
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [["a", "b"], ["ab", "c"]],
        },
    }


def save(folder: Path, change: Change | None = None, vocab_size: int = 8) -> str:
    folder.mkdir()
    content = tokenizer()
    if change is not None:
        change(content)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "config.json").write_text(json.dumps({"vocab_size": vocab_size}))
    return str(folder)


def swap_two_ids(content: dict[str, Any]) -> None:
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


def reorder_merges(content: dict[str, Any]) -> None:
    content["model"]["merges"].reverse()


def drop_a_merge(content: dict[str, Any]) -> None:
    content["model"]["merges"].pop()


def make_end_ordinary(content: dict[str, Any]) -> None:
    content["added_tokens"][0]["special"] = False


def move_end(content: dict[str, Any]) -> None:
    content["added_tokens"][0]["id"] = 6


def add_a_token(content: dict[str, Any]) -> None:
    content["model"]["vocab"]["d"] = 6


@pytest.mark.parametrize(
    "change", [swap_two_ids, reorder_merges, drop_a_merge, make_end_ordinary, move_end, add_a_token]
)
def test_any_difference_in_what_ids_mean_is_refused_in_one_line(change: Change, tmp_path: Path) -> None:
    """B29 of the public faults: found at start-up, not by the first request."""
    target, drafter = save(tmp_path / "target"), save(tmp_path / "drafter", change)
    with pytest.raises(ConfigurationError, match="different tokenizers") as caught:
        check_pair(target, drafter)
    assert "\n" not in str(caught.value)
    assert target in str(caught.value)
    assert drafter in str(caught.value)


def test_the_first_token_with_another_id_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="token 'a' is 0 in the target and is 1 in the drafter"):
        check_pair(save(tmp_path / "target"), save(tmp_path / "drafter", swap_two_ids))


def test_the_way_a_tokenizer_is_written_does_not_matter(tmp_path: Path) -> None:
    def write_differently(content: dict[str, Any]) -> None:
        content["version"] = "0.9"
        content["padding"] = {"pad_id": 0}
        content["model"]["merges"] = ["a b", "ab c"]
        content["model"]["vocab"] = dict(reversed(content["model"]["vocab"].items()))

    target, drafter = save(tmp_path / "target"), save(tmp_path / "drafter", write_differently, vocab_size=64)
    check_pair(target, drafter)


@pytest.mark.parametrize("narrow", ["target", "drafter"])
def test_logits_narrower_than_the_tokenizer_are_refused(narrow: str, tmp_path: Path) -> None:
    folders = [save(tmp_path / name, vocab_size=5 if name == narrow else 8) for name in ("target", "drafter")]
    with pytest.raises(ConfigurationError, match=f"{narrow} has 5 logits for a tokenizer of 6 ids"):
        check_pair(*folders)


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json"])
def test_a_missing_file_is_named(missing: str, tmp_path: Path) -> None:
    target, drafter = save(tmp_path / "target"), save(tmp_path / "drafter")
    (tmp_path / "drafter" / missing).unlink()
    with pytest.raises(ConfigurationError, match=f"drafter has no {missing}"):
        check_pair(target, drafter)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="nowhere does not exist"):
        check_pair(save(tmp_path / "target"), str(tmp_path / "nowhere"))


def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    target, drafter = save(tmp_path / "target"), save(tmp_path / "drafter")
    (tmp_path / "drafter" / "tokenizer.json").write_text("[]")
    with pytest.raises(ConfigurationError, match=r"tokenizer\.json is not a tokenizer"):
        check_pair(target, drafter)
