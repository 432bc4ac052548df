"""Reading a file of prompts: a text file with one per line, or JSON lines with request options."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.errors import LeadoutError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
# `leadout verify` reads whole answers and says itself which of them are drafted.
NOT_IN_A_FILE = ("stream", "stream_options", "return_token_ids")


class PromptFileError(LeadoutError):
    """The file cannot be used; the message is one line with the file and, where there is one, the line."""


@dataclass(frozen=True, slots=True)
class FilePrompt:
    """One prompt: where it stands ("prompts.txt:3"), the endpoint it is for, and the fields of its request."""

    where: str
    endpoint: str
    fields: dict[str, Any]


def read_prompts(path: Path, limit: int | None = None) -> list[FilePrompt]:
    """Read up to `limit` prompts, at least one. A file named *.jsonl holds JSON lines, any other one prompt per line.

    Blank lines are left out. Raises PromptFileError.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise PromptFileError(f"{path}: not UTF-8 text") from error
    except OSError as error:
        raise PromptFileError(f"{path}: {error.strerror}") from error
    prompts = []
    for where, line in _lines(path, text):
        prompts.append(_parse(where, line) if path.suffix == ".jsonl" else _completion(where, {"prompt": line}))
        if len(prompts) == limit:
            break
    if not prompts:
        raise PromptFileError(f"{path}: holds no prompts")
    return prompts


def _lines(path: Path, text: str) -> Iterator[tuple[str, str]]:
    # Not `splitlines`, which also cuts at characters that JSON strings may hold as they are.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield f"{path.name}:{number}", line.removesuffix("\r")


def _parse(where: str, line: str) -> FilePrompt:
    try:
        fields = json.loads(line, parse_constant=_refuse_constant)
        json.dumps(fields, ensure_ascii=False).encode()  # an escape may be half of a character
    except ValueError as error:
        raise PromptFileError(f"{where}: not JSON: {error}") from error
    if isinstance(fields, dict):
        # As in a request, null means absent; a seed must not be, or the two answers would draw one each.
        fields = {name: value for name, value in fields.items() if value is not None}
    if not isinstance(fields, dict) or ("prompt" in fields) == ("messages" in fields):
        raise PromptFileError(f"{where}: must be an object with either prompt or messages")
    for name in NOT_IN_A_FILE:
        if name in fields:
            raise PromptFileError(f"{where}: {name} cannot be set in a file of prompts")
    if not _is_number(fields.get("temperature", 0)):
        raise PromptFileError(f"{where}: temperature must be a number")
    speculation = fields.get("speculation", {})
    if not isinstance(speculation, dict) or "enabled" in speculation:
        raise PromptFileError(f"{where}: speculation must be an object without enabled")
    return FilePrompt(where, CHAT, fields) if "messages" in fields else _completion(where, fields)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON value")


def _completion(where: str, fields: dict[str, Any]) -> FilePrompt:
    return FilePrompt(where, COMPLETIONS, fields)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
