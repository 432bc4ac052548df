"""Several choices per prompt: their order, their noise, their ends and what they count."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.deployments.helpers import CHAT, COMPLETIONS, HELLO, error_of, events_of, says, streamed_text
from tests.deployments.toy import Post, with_toy_app
from tests.fakes import ScriptedService, in_blocks
from workers.messages import FinishReason, GenerationEvent, GenerationFailed, GenerationRequest

Clients = Callable[..., Any]


def noise_of(service: ScriptedService) -> list[tuple[int, int]]:
    """Seed and choice of each sequence asked for, in order."""
    return [(asked.sampling.seed, asked.sampling.choice) for asked in service.requests]


def test_choices_come_prompt_by_prompt_each_with_its_own_noise(client: Any, service: ScriptedService) -> None:
    answer = client.post(COMPLETIONS, json={"prompt": ["a", "b c"], "n": 3, "seed": 7}).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert noise_of(service) == [(7, 0), (7, 1), (7, 2)] * 2
    assert [len(asked.prompt) for asked in service.requests] == [1] * 3 + [3] * 3
    assert len({asked.request_id for asked in service.requests}) == 6
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (4, 18, 22)


def test_without_a_seed_the_choices_of_a_prompt_share_one_that_no_other_has(
    client: Any, service: ScriptedService
) -> None:
    client.post(COMPLETIONS, json={"prompt": ["a", "a"], "n": 2})
    client.post(CHAT, json={**HELLO, "n": 2})
    seeds = [seed for seed, _ in noise_of(service)]
    assert len(set(seeds)) == 3 and seeds[::2] == seeds[1::2]


def test_a_chat_opens_and_ends_each_of_its_choices(client: Any) -> None:
    body = {**HELLO, "n": 3, "max_tokens": 3}
    whole = client.post(CHAT, json=body).json()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    events = events_of(client.post(CHAT, json={**body, "stream": True}).text)[:-1]
    assert [event["choices"][0]["index"] for event in events[:3]] == [0, 1, 2]
    assert all(event["choices"][0]["delta"]["role"] == "assistant" for event in events[:3])
    for index in range(3):
        assert streamed_text(events, index) == whole["choices"][index]["message"]["content"]
    ends = [event["choices"][0]["index"] for event in events if event["choices"][0]["finish_reason"]]
    assert sorted(ends) == [0, 1, 2]


@pytest.mark.parametrize(("fields", "status"), [
    ({"best_of": 3}, 400), ({"best_of": 1}, 200), ({"n": 2, "best_of": 2}, 200), ({"n": 2, "best_of": 3}, 400),
    ({"n": 3, "best_of": 2}, 400), ({"best_of": None}, 200),
])  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_best_of_more_than_are_returned_is_refused_by_name(
    client: Any, fields: dict[str, Any], status: int, stream: bool
) -> None:  # B21
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, HELLO)):
        response = client.post(path, json={**body, **fields, "stream": stream})
        assert response.status_code == status
        if status == 400:
            assert error_of(response)["param"] == "best_of"


def test_one_refused_choice_refuses_the_request_and_cancels_the_others(client_of: Clients) -> None:
    def script(request: GenerationRequest) -> list[GenerationEvent]:
        if request.sampling.choice == 2:
            return [GenerationFailed(429, "overloaded", "queue full")]
        return list(in_blocks([70] * 30, 1))

    service = ScriptedService(script, delay_s=0.01)
    response = client_of(service).post(COMPLETIONS, json={"prompt": "a", "n": 3})
    assert error_of(response, 429)["code"] == "overloaded"
    assert len(service.cancelled) == 2


# --- over a real router --------------------------------------------------------------------------------------


def test_choices_of_one_seed_differ_repeat_and_do_not_depend_on_their_number() -> None:  # B25
    async def test(post: Post) -> None:
        body: dict[str, Any] = {"prompt": [1, 2, 3], "seed": 5, "max_tokens": 24}
        one = (await post(COMPLETIONS, **body)).json()
        three = (await post(COMPLETIONS, **body, n=3)).json()
        again = (await post(COMPLETIONS, **body, n=3)).json()
        texts = [choice["text"] for choice in three["choices"]]
        assert texts == [choice["text"] for choice in again["choices"]]
        assert len(set(texts)) == 3 and texts[0] == one["choices"][0]["text"]
        assert three["usage"]["prompt_tokens"] == 3 and three["usage"]["completion_tokens"] == 72

    with_toy_app(test)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_choice_that_ends_early_does_not_cut_the_others(path: str) -> None:  # B25
    async def test(post: Post) -> None:
        ask: dict[str, Any] = (
            {"prompt": [1, 2]} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "<1>"}]}
        )
        body = {**ask, "seed": 5, "n": 3, "max_tokens": 24, "return_token_ids": True}
        free = (await post(path, **body)).json()["choices"]
        ends = next(
            token
            for token in free[1]["token_ids"][1:12]
            if any(token not in other["token_ids"] for other in (free[0], free[2]))
        )
        body["stop_token_ids"] = [ends]
        cut = (await post(path, **body)).json()["choices"]
        assert [choice["index"] for choice in cut] == [0, 1, 2]
        assert {choice["finish_reason"] for choice in cut} == {"stop", "length"}
        for choice, whole in zip(cut, free, strict=True):
            ids = whole["token_ids"]
            assert choice["token_ids"] == (ids[: ids.index(ends) + 1] if ends in ids else ids)
        events = events_of((await post(path, **body, stream=True)).text)
        for choice in cut:
            text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
            assert streamed_text(events, choice["index"]) == text

    with_toy_app(test, max_draft_tokens=4)


@pytest.mark.parametrize(("options", "asked"), [(None, False), ({}, False), ({"include_usage": True}, True)])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_the_usage_of_several_choices_comes_last_and_is_that_of_the_whole_answer(
    client_of: Clients, path: str, options: dict[str, bool] | None, asked: bool
) -> None:  # B43
    client = client_of(ScriptedService(says([70, 71, 72, 73], 2, FinishReason.STOP)))
    body = {**({"prompt": ["a", "b c"]} if path == COMPLETIONS else HELLO), "n": 2}
    events = events_of(client.post(path, json={**body, "stream": True, "stream_options": options}).text)
    assert events[-1] == "[DONE]"
    if asked:
        assert events[-2]["choices"] == []
        assert events[-2]["usage"] == client.post(path, json=body).json()["usage"]
    assert [bool(event.get("usage")) for event in events[:-1]] == [False] * (len(events) - 2) + [asked]


def test_more_choices_than_there_is_room_for_are_refused_together() -> None:
    async def test(post: Post) -> None:
        for stream in (False, True):
            response = await post(COMPLETIONS, prompt=[1, 2], n=5, max_tokens=8, stream=stream)
            assert error_of(response, 429)["code"] == "overloaded"
        assert (await post(COMPLETIONS, prompt=[1, 2], n=3, max_tokens=8)).status_code == 200

    with_toy_app(test, max_running_sequences=2, max_waiting_sequences=1)


def test_usage_counts_the_cached_tokens_of_each_prompt_once_streamed_or_not() -> None:
    async def test(post: Post) -> None:
        body: dict[str, Any] = {"prompt": [[1, 2, 3, 4, 5, 6, 7, 8, 9], [7, 6, 5, 4, 3]], "max_tokens": 2}
        usages = [(await post(COMPLETIONS, **body)).json()["usage"] for _ in range(2)]
        usages.append((await post(COMPLETIONS, **body, n=3)).json()["usage"])
        streamed = await post(COMPLETIONS, **body, n=3, stream=True, stream_options={"include_usage": True})
        usages.append(events_of(streamed.text)[-2]["usage"])
        # Whole blocks of 4 tokens, less than the prompt.
        assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages] == [0, 12, 12, 12]
        assert {usage["prompt_tokens"] for usage in usages} == {14}

    with_toy_app(test, prefix_caching=True)
