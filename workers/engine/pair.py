"""Whether a target and a drafter belong together, decided from their files alone. Imports no torch."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from workers.engine.model_files import model_file, read_json
from workers.errors import ConfigurationError

_ADDED_TOKEN_FLAGS = ("special", "single_word", "lstrip", "rstrip", "normalized")


@dataclass(frozen=True, slots=True)
class _Tokenizer:
    """What decides which ids a text becomes and what ids mean, in comparable form."""

    ids: dict[str, int]  # every token, added ones included
    merges: tuple[tuple[str, str], ...]
    added: dict[str, tuple[Any, ...]]  # id and flags


def check_pair(target: str, drafter: str) -> None:
    """Check that a drafter's tokens mean the same to its target. Both are local folders or Hugging Face ids.

    Raises ConfigurationError, in one line, when a folder, config.json or tokenizer.json is missing, when the
    tokenizers differ in ids, merges or added tokens, or when a model has fewer logits than its tokenizer has ids.
    """
    tokenizers = [_read_tokenizer(model) for model in (target, drafter)]
    difference = _difference(*tokenizers)
    if difference is not None:
        raise ConfigurationError(f"target {target} and drafter {drafter} have different tokenizers: {difference}")
    for model, tokenizer in zip((target, drafter), tokenizers, strict=True):
        _check_logits(model, tokenizer)


def tokenizer_fingerprint(model: str) -> str:
    """Return a hex digest that is equal for two models exactly when `check_pair` finds their tokenizers equal.

    Raises ConfigurationError when the model or its tokenizer.json is missing.
    """
    tokenizer = _read_tokenizer(model)
    content = [sorted(tokenizer.ids.items()), tokenizer.merges, sorted(tokenizer.added.items())]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _read_tokenizer(model: str) -> _Tokenizer:
    path = model_file(model, "tokenizer.json")
    if path is None:
        raise ConfigurationError(f"model {model} has no tokenizer.json")
    content = read_json(path)
    try:
        vocabulary = content["model"]["vocab"]
        # Unigram vocabularies are lists of [token, score], with the index as the id.
        if isinstance(vocabulary, list):
            ids = {str(entry[0]): index for index, entry in enumerate(vocabulary)}
        else:
            ids = {str(token): int(index) for token, index in vocabulary.items()}
        added = content.get("added_tokens") or []
        ids |= {entry["content"]: entry["id"] for entry in added}
        return _Tokenizer(
            ids=ids,
            merges=tuple(_merge(merge) for merge in content["model"].get("merges") or ()),
            added={
                entry["content"]: (entry["id"], *(bool(entry.get(flag)) for flag in _ADDED_TOKEN_FLAGS))
                for entry in added
            },
        )
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(f"{path} is not a tokenizer: {type(error).__name__} {error}") from error


def _merge(merge: str | list[str]) -> tuple[str, str]:
    """Merges are written as "a b" by older versions and as ["a", "b"] by newer ones."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right


def _difference(target: _Tokenizer, drafter: _Tokenizer) -> str | None:
    """Describe the first difference that matters, or return None."""
    if target.ids != drafter.ids:
        tokens = min(target.ids.items() ^ drafter.ids.items(), key=lambda item: (item[1], item[0]))[0]
        ids = [f"is {ids[tokens]}" if tokens in ids else "does not exist" for ids in (target.ids, drafter.ids)]
        sizes = f"{len(target.ids)} and {len(drafter.ids)} tokens"
        return f"{sizes}; token {tokens!r} {ids[0]} in the target and {ids[1]} in the drafter"
    if target.merges != drafter.merges:
        index = next(
            (i for i, pair in enumerate(zip(target.merges, drafter.merges, strict=False)) if pair[0] != pair[1]),
            min(len(target.merges), len(drafter.merges)),
        )
        return f"their merges differ from number {index} on"
    if target.added != drafter.added:
        token = min(target.added.items() ^ drafter.added.items())[0]
        return f"token {token!r} is added or special in one and not alike in the other"
    return None


def _check_logits(model: str, tokenizer: _Tokenizer) -> None:
    path = model_file(model, "config.json")
    if path is None:
        raise ConfigurationError(f"model {model} has no config.json")
    config = read_json(path)
    width = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    needed = max(tokenizer.ids.values()) + 1
    # A config may leave out a default width; then the engine, which knows the model's class, checks it.
    if width is not None and width < needed:
        raise ConfigurationError(f"model {model} has {width} logits for a tokenizer of {needed} ids")
