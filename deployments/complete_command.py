"""`leadout complete`: a prompt in, its answer as it comes; for a quick try of a service."""

import asyncio
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from deployments.console import API_KEY_VARIABLE, INTERRUPTED, console, one_line_errors


def complete_command(
    url: Annotated[str, typer.Argument(help="the service to ask")],
    prompt: Annotated[str, typer.Argument(help="the prompt; - reads it from standard input")],
    chat: Annotated[bool, typer.Option("--chat", help="ask as a user of a chat")] = False,
    system: Annotated[str | None, typer.Option(help="system message of the chat")] = None,
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    seed: Annotated[int | None, typer.Option(min=0)] = None,
    plain: Annotated[bool, typer.Option("--plain", help="without speculation; Leadout's own option")] = False,
    model: Annotated[str | None, typer.Option(help="default: the first that the service lists")] = None,
    output: Annotated[Path | None, typer.Option(help="write the answer there as well")] = None,
    api_key_env: Annotated[str, typer.Option(help="environment variable with the API key")] = API_KEY_VARIABLE,
) -> None:
    """Stream the answer to PROMPT to standard output, and say on standard error what it took.

    Exit status: 0 answered, 2 refused or broken off.
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    fields: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature}
    if seed is not None:
        fields["seed"] = seed
    if plain:
        fields["speculation"] = {"enabled": False}
    if chat or system is not None:
        opening = [] if system is None else [{"role": "system", "content": system}]
        fields["messages"] = [*opening, {"role": "user", "content": text}]
    else:
        fields["prompt"] = text
    with one_line_errors():
        try:
            answer = asyncio.run(_stream(url, fields, model, api_key_env))
        except KeyboardInterrupt:
            print(flush=True)
            raise typer.Exit(INTERRUPTED) from None
    if output is not None:
        output.write_text(answer, encoding="utf-8")


async def _stream(url: str, fields: dict[str, Any], model: str | None, variable: str) -> str:
    from deployments.api_client import api_key_from, first_model, open_client, stream_events, text_of
    from deployments.prompt_file import CHAT, COMPLETIONS

    path = CHAT if "messages" in fields else COMPLETIONS
    pieces: list[str] = []
    usage: dict[str, Any] = {}
    async with open_client(url, api_key_from(variable)) as client:
        named = model or await first_model(client)
        body = {"model": named, **fields, "stream": True, "stream_options": {"include_usage": True}}
        async for event in stream_events(client, path, body):
            piece = text_of(event)
            pieces.append(piece)
            print(piece, end="", flush=True)
            usage = event.get("usage") or usage
    print(flush=True)
    if usage:
        console.print(usage_line(usage), style="dim", highlight=False, soft_wrap=True, markup=False)
    return "".join(pieces)


def usage_line(usage: dict[str, Any]) -> str:
    """Return what an answer's `usage` says, in one line."""
    line = f"{usage.get('prompt_tokens', 0)} prompt tokens, {usage.get('completion_tokens', 0)} tokens"
    told = usage.get("speculation")
    if not told:
        return line
    return (
        f"{line} in {told['verifications']} verifications ({told['accepted_length']:.2f} each); "
        f"{told['accepted_tokens']} of {told['draft_tokens']} drafts accepted, drafter {told['drafter'] or 'none'}"
    )
