"""What planning a request costs those who share the event loop."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from starlette.testclient import TestClient

from deployments.text import LONG_TEXT_CHARACTERS, TextCodec
from tests.deployments.helpers import COMPLETIONS, LIMITS, SOME, says
from tests.fakes import ScriptedService


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize(("prompts", "off_the_loop"), [(2, False), (64, True)])
def test_many_prompts_that_are_long_together_are_tokenised_off_the_event_loop(
    client_of: Callable[..., TestClient],
    codec: TextCodec,
    monkeypatch: pytest.MonkeyPatch,
    prompts: int,
    off_the_loop: bool,
    echo: bool,
) -> None:
    threads: list[str] = []
    encode = codec.encode

    def encode_noted(text: str, special_tokens: bool = True) -> Any:
        threads.append(threading.current_thread().name)
        return encode(text, special_tokens)

    monkeypatch.setattr(codec, "encode", encode_noted)
    text = "a" * (LONG_TEXT_CHARACTERS // 40)
    limits = replace(LIMITS, context_length=10_000)
    client = client_of(ScriptedService(says(SOME)), limits)
    asked = {"prompt": [text] * prompts, "max_tokens": 3, "echo": echo}
    answer = client.post(COMPLETIONS, json=asked).json()
    assert [choice["text"].startswith(text) for choice in answer["choices"]] == [echo] * prompts
    assert len(threads) == prompts
    assert all(name.startswith("asyncio_") == off_the_loop for name in threads)  # the pool of `asyncio.to_thread`
