"""Whether a target and a drafter belong together, decided from their files alone. Imports no torch."""

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


@dataclass(frozen=True, slots=True)
class PairRow:
    """One thing compared: what each model has, and the problem that forbids the pair, or a note where it is none."""

    subject: str
    target: str
    drafter: str
    problem: str | None = None
    note: str | None = None


def check_pair(target: str, drafter: str) -> None:
    """Check that a drafter's tokens mean the same to its target. Both are local folders, GGUF files or ids.

    Raises ConfigurationError, in one line, when a folder, config.json or tokenizer.json is missing, when the
    tokenizers differ in ids, merges or added tokens, or when a model has fewer logits than its tokenizer has ids.
    """
    problem = next((row.problem for row in pair_rows(target, drafter) if row.problem), None)
    if problem is not None:
        raise ConfigurationError(problem)


def pair_rows(target: str, drafter: str) -> list[PairRow]:
    """Compare two models by their files: tokenizers, ids that end a text, width of the logits, contexts.

    Raises ConfigurationError, in one line, when a file is missing or cannot be read.
    """
    models = (target, drafter)
    first, second = (_read_tokenizer(model) for model in models)
    difference = _difference(first, second)
    problem = difference and f"target {target} and drafter {drafter} have different tokenizers: {difference}"
    configs = [_read_config(model) for model in models]
    return [
        PairRow("tokenizer", _size(first), _size(second), problem),
        _ends_row(*(_end_ids(model, config) for model, config in zip(models, configs, strict=True))),
        _logits_row(models, (first, second), configs),
        _context_row(*(_number(config, "max_position_embeddings") for config in configs)),
    ]


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


def _read_config(model: str) -> dict[str, Any]:
    path = model_file(model, "config.json")
    if path is None:
        raise ConfigurationError(f"model {model} has no config.json")
    config = read_json(path)
    if not isinstance(config, dict):
        raise ConfigurationError(f"{path} is not a model's configuration")
    return config


def _size(tokenizer: _Tokenizer) -> str:
    return f"{len(tokenizer.ids):,} tokens, {len(tokenizer.added)} added"


def _number(config: dict[str, Any], key: str) -> int | None:
    """A config may leave out a default; then the engine, which knows the model's class, checks it."""
    value = config.get(key, (config.get("text_config") or {}).get(key))
    return value if isinstance(value, int) else None


def _logits_row(
    models: tuple[str, str], tokenizers: tuple[_Tokenizer, _Tokenizer], configs: list[dict[str, Any]]
) -> PairRow:
    widths = [_number(config, "vocab_size") for config in configs]
    needed = [max(tokenizer.ids.values()) + 1 for tokenizer in tokenizers]
    problem = next(
        (
            f"model {model} has {width} logits for a tokenizer of {count} ids"
            for model, width, count in zip(models, widths, needed, strict=True)
            if width is not None and width < count
        ),
        None,
    )
    note = "padding beyond the tokenizer is never drawn" if widths != needed else None
    return PairRow("logits", _shown(widths[0]), _shown(widths[1]), problem, note)


def _end_ids(model: str, config: dict[str, Any]) -> str:
    """Return the ids that end a text, as the model's files give them."""
    path = model_file(model, "generation_config.json")
    generation = {} if path is None else read_json(path)
    found = generation.get("eos_token_id", config.get("eos_token_id"))
    return (
        ", ".join(str(end) for end in (found if isinstance(found, list) else [found])) if found is not None else "none"
    )


def _ends_row(target: str, drafter: str) -> PairRow:
    note = None if target == drafter else "they differ; the target's count"
    return PairRow("end of text, ids", target, drafter, note=note)


def _context_row(target: int | None, drafter: int | None) -> PairRow:
    shorter = target is not None and drafter is not None and drafter < target
    note = f"beyond {drafter:,} tokens nothing is drafted" if shorter else None
    return PairRow("context, tokens", _shown(target), _shown(drafter), note=note)


def _shown(number: int | None) -> str:
    return "not stated" if number is None else f"{number:,}"
