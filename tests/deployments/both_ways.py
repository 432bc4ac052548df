"""Answers of scripts that commit as the router does, asked for whole and streamed, which must tell the same."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from starlette.testclient import TestClient

from deployments.http_app import create_app
from deployments.text import TextCodec
from tests.deployments.helpers import COMPLETIONS, LIMITS, events_of, logprobs_of, says, streamed_text
from tests.fakes import Script, ScriptedService, toy_logprobs
from workers.messages import GenerationRequest, Proposal, TokenChunk, VerifiedItem, token_ids
from workers.router.sequence import Sequence


def blocks_of(ids: list[int], lengths: list[int]) -> list[list[int]]:
    """`ids` cut into blocks of `lengths`, again and again."""
    blocks = []
    while ids:
        length = lengths[len(blocks) % len(lengths)]
        blocks.append(ids[:length])
        ids = ids[length:]
    return blocks


def committing(ids: list[int], lengths: list[int], codec: TextCodec) -> Script:
    """A script that commits `ids` in blocks as the router does, so that stops and held-back text are its own."""

    def script(request: GenerationRequest) -> Iterator[TokenChunk]:
        sequence = Sequence(1, request, codec.detokenizer)
        tokens = request.prompt.tolist()
        scored = None
        if request.prompt_logprobs and request.logprobs is not None:
            scored = toy_logprobs(tokens, 1, request.logprobs)
        for block in blocks_of(ids[: request.stop.max_tokens], lengths):
            logprobs = None
            if request.logprobs is not None:
                logprobs = toy_logprobs([*tokens, *block], len(tokens), request.logprobs)
            tokens += block
            verified = VerifiedItem(1, 0, len(block) - 1, token_ids(block), logprobs=logprobs, scored=scored)
            scored = None
            yield sequence.commit(verified, Proposal(token_ids(block[:-1])))
            if sequence.finish_reason is not None:
                return

    return script


@functools.cache
def application(codec: TextCodec) -> tuple[TestClient, ScriptedService]:
    """A client, and the service behind it, for a whole run of examples."""
    service = ScriptedService(says([70]))
    limits = dataclasses.replace(LIMITS, vocabulary_size=codec.vocabulary_size, context_length=256)
    return TestClient(create_app(service, codec, limits), raise_server_exceptions=False), service


def ask_both_ways(script: Script, codec: TextCodec, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The one choice of a whole answer, after checking that the stream tells the same."""
    client, service = application(codec)
    service.script = script
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    events = events_of(client.post(path, json={**body, "stream": True}).text)
    assert events[-1] == "[DONE]"
    text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
    assert streamed_text(events) == text
    told = {name: values for name, values in choice["logprobs"].items() if values}
    assert {name: values for name, values in logprobs_of(events).items() if values} == told
    offsets = told.get("text_offset", [])
    for event in events[:-1] if path == COMPLETIONS else []:
        # An entry never runs ahead of its text.
        shown = len(offsets) and streamed_text(events[: events.index(event) + 1])
        here = (event["choices"][0]["logprobs"] or {"text_offset": []})["text_offset"]
        assert all(offset <= len(shown) for offset in here)
    return choice
