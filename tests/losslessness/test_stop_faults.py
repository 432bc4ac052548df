"""Faults that users of comparable systems met at stops, budgets and context limits (B and C of the public faults)."""

import pytest
from starlette.testclient import TestClient

from deployments.text import TextCodec
from tests.deployments.helpers import COMPLETIONS, error_of
from tests.losslessness.asking import OFF, PROMPT, ask, drafted_by


@pytest.mark.parametrize("stream", [False, True])
def test_b10_a_stop_token_that_is_accepted_inside_a_block_ends_it(client: TestClient, stream: bool) -> None:
    reference = ask(client, **OFF).ids
    stop = reference[2]
    stopped = ask(client, stream, stop_token_ids=[stop], **drafted_by("own", 5))
    assert stopped.ids == reference[: reference.index(stop) + 1]
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.usage["completion_tokens"] == len(stopped.ids)


@pytest.mark.parametrize("stream", [False, True])
def test_b12_ids_and_logprobs_do_not_run_past_a_stop_string(client: TestClient, codec: TextCodec, stream: bool) -> None:
    reference = ask(client, max_tokens=40, temperature=1, seed=2, **OFF)
    position = _readable(codec, reference.ids, first=2)
    stop = codec.backend.decode([reference.ids[position]])
    before = codec.backend.decode(reference.ids[:position])
    options = {"max_tokens": 40, "temperature": 1, "seed": 2, "stop": stop, "logprobs": 2}
    stopped = ask(client, stream, **options, **drafted_by("own", 8)).choices[0]
    assert stopped.finish_reason == "stop"
    assert stop not in stopped.text and before.startswith(stopped.text)
    assert set(stopped.logprobs) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert len({len(values) for values in stopped.logprobs.values()}) == 1
    assert all(offset <= len(stopped.text) for offset in stopped.logprobs["text_offset"])
    assert len(stopped.logprobs["tokens"]) <= position


@pytest.mark.parametrize("k", [1, 5])
def test_b13_a_stop_string_over_two_tokens_is_neither_missed_nor_leaked(
    client: TestClient, codec: TextCodec, k: int
) -> None:
    options = {"temperature": 1, "seed": 2, "max_tokens": 40}
    reference = ask(client, **options, **OFF)
    position = _readable(codec, reference.ids, first=1, tokens=2)
    stop = codec.backend.decode(reference.ids[position : position + 2])
    streamed = ask(client, True, stop=stop, **options, **drafted_by("own", k)).choices[0]
    whole = ask(client, False, stop=stop, **options, **drafted_by("own", k)).choices[0]
    assert streamed.text == whole.text == reference.choices[0].text.split(stop)[0]
    assert streamed.finish_reason == whole.finish_reason == "stop"


@pytest.mark.parametrize("max_tokens", range(1, 13))
def test_b15_a_block_that_crosses_the_budget_delivers_exactly_the_budget(client: TestClient, max_tokens: int) -> None:
    before = _committed(client)
    options = {"ignore_eos": True, "logprobs": 0, "max_tokens": max_tokens}
    for stream in (False, True):
        answer = ask(client, stream, **options, **drafted_by("own", 5))
        assert len(answer.ids) == len(answer.choices[0].logprobs["tokens"]) == max_tokens
        assert answer.usage["completion_tokens"] == max_tokens
        assert answer.choices[0].finish_reason == "length"
    assert _committed(client) - before == 2 * max_tokens


def _committed(client: TestClient) -> int:
    return int(client.get("/status").json()["totals"]["committed_tokens"])


def _readable(codec: TextCodec, ids: list[int], first: int, tokens: int = 1) -> int:
    """The first position from `first` on whose tokens are ASCII text that does not occur before."""
    for position in range(first, len(ids) - tokens):
        text = codec.backend.decode(ids[position : position + tokens])
        earlier = codec.backend.decode(ids[: position + tokens - 1])
        if len(text) == tokens and text.isascii() and text.isprintable() and text not in earlier:
            return position
    raise AssertionError("the reference has no readable token; choose another seed")


# --- the context limit ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_b16_drafts_do_not_pass_the_last_position(small_client: TestClient, stream: bool) -> None:
    prompt = [(5 * position) % 200 + 3 for position in range(60)]
    answer = ask(small_client, stream, prompt=prompt, max_tokens=4, ignore_eos=True, **drafted_by("own", 8))
    assert len(answer.ids) == 4
    assert answer.choices[0].finish_reason == "length"
    _is_alive(small_client)


@pytest.mark.parametrize("stream", [False, True])
def test_b18_requests_that_are_too_long_are_refused_with_the_numbers(small_client: TestClient, stream: bool) -> None:
    message = error_of(small_client.post(COMPLETIONS, json={"prompt": [7] * 8, "max_tokens": 60, "stream": stream}))[
        "message"
    ]
    assert all(number in message for number in ("64", "8", "60"))
    error_of(small_client.post(COMPLETIONS, json={"prompt": [7] * 80, "stream": stream}))
    last = ask(small_client, stream, prompt=[7] * 63, max_tokens=None, ignore_eos=True)
    assert len(last.ids) == 1 and last.choices[0].finish_reason == "length"
    _is_alive(small_client)


def _is_alive(client: TestClient) -> None:
    assert client.get("/health").status_code == 200
    assert client.post(COMPLETIONS, json={"prompt": PROMPT, "max_tokens": 2}).status_code == 200
