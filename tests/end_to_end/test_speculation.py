"""Text never depends on speculation: through HTTP, Ray and real models, in float32."""

import asyncio
from typing import Any

import httpx
import pytest

from benchmarks.harness import Service
from tests.end_to_end.requests import GREEDY, SEEDED, TIMEOUT, ask_all, body, ids_of, stream

SAMPLINGS = {"greedy": GREEDY, "seeded": SEEDED, "filtered": {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "seed": 7}}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
def test_ids_with_speculation_equal_ids_without(service: Service, prompts: list[str], sampling: dict[str, Any]) -> None:
    drafted = ask_all(service, [body(prompt, sampling) for prompt in prompts])
    plain = ask_all(service, [body(prompt, sampling, speculation=False) for prompt in prompts])
    assert list(map(ids_of, drafted)) == list(map(ids_of, plain))
    assert sum(answer["usage"]["speculation"]["accepted_tokens"] for answer in drafted) > 0
    assert all(answer["usage"]["speculation"]["draft_tokens"] == 0 for answer in plain)


@pytest.mark.parametrize("draft_tokens", [0, 1, 3])
def test_the_draft_length_changes_no_id(service: Service, prompts: list[str], draft_tokens: int) -> None:
    requests = [body(prompt, SEEDED) for prompt in prompts[:6]]
    shorter = [request | {"speculation": {"max_draft_tokens": draft_tokens}} for request in requests]
    assert list(map(ids_of, ask_all(service, shorter))) == list(map(ids_of, ask_all(service, requests)))


def test_streamed_text_equals_the_whole_answer(service: Service, prompts: list[str]) -> None:
    async def streamed(prompt: str) -> str:
        async with httpx.AsyncClient(base_url=service.url, timeout=TIMEOUT) as client:
            return "".join([chunk["choices"][0]["text"] async for chunk in stream(client, body(prompt, SEEDED))])

    whole = ask_all(service, [body(prompt, SEEDED) for prompt in prompts[:8]])
    for prompt, answer in zip(prompts, whole, strict=False):
        assert asyncio.run(streamed(prompt)) == answer["choices"][0]["text"]


def test_sixteen_streams_at_once_each_equal_their_solo_run(service: Service, prompts: list[str]) -> None:
    requests = [body(prompt, SEEDED | {"seed": index}, max_tokens=32) for index, prompt in enumerate(prompts[:16])]
    alone = ask_all(service, requests, at_once=1)

    async def all_at_once() -> list[list[int]]:
        async with httpx.AsyncClient(base_url=service.url, timeout=TIMEOUT) as client:

            async def ids(request: dict[str, Any]) -> list[int]:
                return [token async for chunk in stream(client, request) for token in chunk["choices"][0]["token_ids"]]

            return list(await asyncio.gather(*map(ids, requests)))

    assert asyncio.run(all_at_once()) == list(map(ids_of, alone))


def test_a_stop_string_ends_inside_a_block_the_same_way_with_and_without_drafts(
    service: Service, prompts: list[str]
) -> None:
    ends = []
    for prompt in prompts[:6]:
        request, undrafted = (body(prompt, GREEDY | {"seed": 1}, drafts) for drafts in (True, False))
        text = ask_all(service, [request])[0]["choices"][0]["text"]
        stop = text[len(text) // 2 : len(text) // 2 + 3]
        drafted, plain = ask_all(service, [request | {"stop": stop}, undrafted | {"stop": [stop]}])
        assert drafted["choices"] == plain["choices"]
        assert drafted["choices"][0]["text"] == text[: text.index(stop)]
        ends.append(drafted["choices"][0]["finish_reason"])
    assert set(ends) == {"stop"}
