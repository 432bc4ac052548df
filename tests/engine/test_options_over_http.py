"""Sampling options from the HTTP request to the text: the whole application in one process, without Ray."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from deployments.text import TextCodec
from tests.deployments.helpers import CHAT, COMPLETIONS, error_of, events_of, streamed_text
from tests.fakes import byte_tokenizer
from tests.in_process import InProcessService, application, load, save_byte_llama, save_drafters
from tests.limits import HANG_S
from workers.router.config import RouterConfig

K = 5
PROMPT = "The sky"


@pytest.fixture(autouse=True)
def no_drafts_are_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine, a round waits for its drafts."""
    monkeypatch.setattr("workers.router.drafting.LATE_FLOOR_S", HANG_S)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """The application over a drafter that is right often but not always."""
    folder = tmp_path_factory.mktemp("bytes")
    noisy = save_drafters(save_byte_llama(folder), folder)["noisy"]
    codec = TextCodec.load(str(folder))
    config = RouterConfig(max_draft_tokens=K, propose_deadline_s=HANG_S)
    service = InProcessService(load(folder), {"noisy": load(noisy)}, codec, config)
    with TestClient(application(service, codec, K)) as client:
        yield client


def complete(client: TestClient, **options: Any) -> dict[str, Any]:
    """A completion, which must be the same with and without drafts, streamed or not."""
    body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "seed": 1, "return_token_ids": True, **options}
    drafted = client.post(COMPLETIONS, json=body).json()
    plain = client.post(COMPLETIONS, json={**body, "speculation": {"enabled": False}}).json()
    assert drafted["usage"]["speculation"]["draft_tokens"] > 0 or drafted["usage"]["completion_tokens"] < 2
    assert drafted["choices"] == plain["choices"]
    events = events_of(client.post(COMPLETIONS, json={**body, "stream": True}).text)
    assert streamed_text(events) == drafted["choices"][0]["text"]
    choice: dict[str, Any] = drafted["choices"][0]
    assert drafted["usage"]["completion_tokens"] == len(choice["token_ids"])
    return choice


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize(
    "options",
    [
        {"frequency_penalty": 1.5},
        {"presence_penalty": 2},
        {"repetition_penalty": 1.3},
        {"bad_words": ["x", "e ", "no way"]},
        {"min_p": 0.2},
        {"min_tokens": 12, "stop": ["a", "e", "i"]},
        {"min_tokens": 12, "stop_token_ids": list(range(0, 200, 3))},
        {"frequency_penalty": 1.5, "repetition_penalty": 1.3, "min_p": 0.1, "logit_bias": {"9": 4, "70": -100}},
    ],
    ids=str,
)
def test_every_option_gives_the_same_answer_with_and_without_drafts(
    client: TestClient, options: dict[str, Any], temperature: float
) -> None:
    complete(client, **options, temperature=temperature, seed=3)


def test_a_stop_token_inside_a_block_ends_there_and_is_not_shown(client: TestClient) -> None:
    reference = complete(client)
    third = reference["token_ids"][2]
    stopped = complete(client, stop_token_ids=[third])
    first = reference["token_ids"].index(third)
    assert stopped["token_ids"] == reference["token_ids"][: first + 1]
    assert stopped["finish_reason"] == "stop"
    assert stopped["text"] == byte_tokenizer().decode(reference["token_ids"][:first])
    assert third not in complete(client, stop_token_ids=[third], min_tokens=20)["token_ids"][:20]


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_banned_tokens_and_words_never_appear(client: TestClient, temperature: float) -> None:
    reference = complete(client, temperature=temperature, seed=5)
    token = reference["token_ids"][0]
    biased = complete(client, temperature=temperature, seed=5, logit_bias={str(token): -100})
    assert token not in biased["token_ids"]
    word = next(character for character in reference["text"] if character.isascii() and character.isprintable())
    assert word not in complete(client, temperature=temperature, seed=5, bad_words=[word])["text"]


@pytest.mark.parametrize("max_tokens", range(1, 13))
def test_exactly_the_budget_is_delivered_where_eos_is_ignored(client: TestClient, max_tokens: int) -> None:
    favoured = {"0": 100}
    ignoring = complete(client, max_tokens=max_tokens, ignore_eos=True, logit_bias=favoured)
    assert ignoring["token_ids"] == [0] * max_tokens and ignoring["finish_reason"] == "length"
    ending = complete(client, max_tokens=max_tokens, logit_bias=favoured)
    assert ending["token_ids"] == [0] and ending["finish_reason"] == "stop" and ending["text"] == ""
    waiting = complete(client, max_tokens=max_tokens, min_tokens=max_tokens - 1, logit_bias=favoured)
    assert waiting["token_ids"].index(0) == len(waiting["token_ids"]) - 1 == max_tokens - 1


def test_ids_out_of_range_are_refused_and_a_neighbour_is_not_touched(client: TestClient) -> None:
    before = complete(client)
    for options in (
        {"stop_token_ids": [999999], "min_tokens": 2},
        {"logit_bias": {"999999": 5}},
        {"logit_bias": {"abc": 1}},
        # Padding of the embedding: the tokenizer has 257 ids.
        {"logit_bias": {"260": 100}},
        {"stop_token_ids": [257]},
    ):
        error_of(client.post(COMPLETIONS, json={"prompt": PROMPT, **options}))
        messages = [{"role": "user", "content": PROMPT}]
        error_of(client.post(CHAT, json={"messages": messages, "stream": True, **options}))
    assert complete(client) == before


def test_options_that_leave_no_token_end_with_an_error(client: TestClient) -> None:
    everything = {str(token): -100 for token in range(257)}
    answer = client.post(COMPLETIONS, json={"prompt": PROMPT, "logit_bias": everything})
    assert "ban all of them" in error_of(answer, 500)["message"]
    assert client.get("/health").status_code == 200
    complete(client)


# --- structured output ---------------------------------------------------------------------------------------

ONE_INTEGER = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["n"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_structured_output_is_the_same_with_and_without_drafts_and_fits(client: TestClient, temperature: float) -> None:
    asked = complete(client, response_format=json_schema(ONE_INTEGER), temperature=temperature, seed=3)
    assert asked["finish_reason"] == "stop" and 0 <= json.loads(asked["text"])["n"] <= 999
    asked = complete(client, guided_regex="(ab)+c", temperature=temperature, seed=3, max_tokens=100)
    assert re.fullmatch("(ab)+c", asked["text"]) or asked["finish_reason"] == "length"
    asked = complete(client, structured_outputs={"choice": ["yes", "no"]}, temperature=temperature, seed=3)
    assert asked["text"] in ("yes", "no") and asked["finish_reason"] == "stop"
    asked = complete(client, response_format={"type": "json_object"}, temperature=temperature, seed=3)
    assert asked["text"].startswith("{")


def test_a_chat_keeps_to_its_schema_and_a_bad_one_harms_nobody(client: TestClient) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 40, "seed": 3}
    good = client.post(CHAT, json={**chat, "response_format": json_schema(ONE_INTEGER)}).json()
    assert json.loads(good["choices"][0]["message"]["content"]).keys() == {"n"}
    lacking = {"type": "json_schema", "json_schema": {"name": "answer"}}
    error = error_of(client.post(CHAT, json={**chat, "stream": True, "response_format": lacking}))
    assert error["param"] == "response_format.json_schema.schema"
    assert (
        client.post(CHAT, json={**chat, "response_format": json_schema(ONE_INTEGER)}).json()["choices"]
        == good["choices"]
    )


def test_a_finished_structure_is_filled_up_with_hidden_ends_where_the_end_is_ignored(client: TestClient) -> None:
    asked = complete(client, guided_choice=["no"], ignore_eos=True, max_tokens=8)
    assert (asked["text"], asked["finish_reason"], len(asked["token_ids"])) == ("no", "length", 8)
    asked = complete(client, guided_choice=["no"], min_tokens=5, max_tokens=8)
    assert (asked["text"], asked["finish_reason"], len(asked["token_ids"])) == ("no", "stop", 6)
