"""`leadout hash-key`: a new API key, and the line by which a service lets it in."""

import sys
from typing import Annotated

import typer

from deployments.console import one_line_errors


def hash_key_command(
    name: Annotated[str | None, typer.Option(help="of the key, to tell the lines of a file apart")] = None,
    stdin: Annotated[bool, typer.Option("--stdin", help="hash the key on standard input; make no new one")] = False,
) -> None:
    """Print a new random API key and the line for `ingress.api_keys_file`, which holds its SHA-256 digest alone.

    The key goes to whoever is to use it, and is kept nowhere here.
    """
    with one_line_errors():
        from deployments.api_keys import key_line, new_key
        from workers.errors import ConfigurationError

        key = sys.stdin.readline().strip() if stdin else new_key()
        if not key:
            raise ConfigurationError("standard input holds no key")
        line = key_line(key, name)
        # Of a key that somebody has already, only the line is news.
        print(line if stdin else f"key:  {key}\nline: {line}", flush=True)
