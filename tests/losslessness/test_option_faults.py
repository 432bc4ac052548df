"""Faults that users of comparable systems met with sampling options, structured output, ids and log-probabilities.

D, E, F and H of the public faults.
"""

import json
import math
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.deployments.helpers import CHAT, COMPLETIONS, error_of
from tests.in_process import VOCABULARY
from tests.losslessness.asking import OFF, PROMPT, ask, drafted_by


def test_b19_penalties_and_biases_hold_for_accepted_drafts_too(client: TestClient) -> None:
    reference = ask(client, **OFF).ids
    for options in (
        {"logit_bias": {str(reference[0]): -100}},
        {"frequency_penalty": 1.5},
        {"repetition_penalty": 1.3},
    ):
        drafted = ask(client, **options, **drafted_by("own", 4))
        assert drafted.ids == ask(client, **options, **OFF).ids != reference
        assert "logit_bias" not in options or reference[0] not in drafted.ids


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "options", [{"min_p": 0.2, "temperature": 1, "seed": 4}, {"bad_words": ["x"]}, {"guided_regex": "a+"}], ids=str
)
def test_b21_options_that_peers_ignore_are_honoured(client: TestClient, options: dict[str, Any], stream: bool) -> None:
    drafted = ask(client, stream, **options, **drafted_by("noisy", 4))
    assert drafted.ids == ask(client, **options, **OFF).ids
    if "guided_regex" in options:
        assert set(drafted.choices[0].text) == {"a"}
    if "bad_words" in options:
        assert "x" not in drafted.choices[0].text


@pytest.mark.parametrize("stream", [False, True])
def test_b21_options_that_are_not_honoured_are_refused_before_a_stream_opens(client: TestClient, stream: bool) -> None:
    body = {"prompt": PROMPT, "stream": stream}
    for refused in ({"best_of": 3}, {"guided_grammar_backend": "x"}, {"use_beam_search": True}):
        [name] = refused
        assert error_of(client.post(COMPLETIONS, json={**body, **refused}))["param"] == name


def test_b22_a_seed_repeats_a_text_and_its_absence_does_not(client: TestClient) -> None:
    seeded = [ask(client, seed=42, temperature=1.5, **drafted_by("noisy")).ids for _ in range(2)]
    assert seeded[0] == seeded[1]
    unseeded = [tuple(ask(client, temperature=1, max_tokens=8, **drafted_by("noisy")).ids) for _ in range(20)]
    assert len(set(unseeded)) > 1


@pytest.mark.parametrize("stream", [False, True])
def test_b25_choices_differ_repeat_and_end_each_for_itself(client: TestClient, stream: bool) -> None:
    options: dict[str, Any] = {"n": 3, "seed": 5, "temperature": 1}
    free = ask(client, **options, **OFF)
    stop = next(token for token in free.choices[1].ids[2:] if all(token not in free.choices[i].ids for i in (0, 2)))
    answers = [ask(client, stream, **options, stop_token_ids=[stop], **drafted_by("noisy")) for _ in range(2)]
    assert answers[0].choices == answers[1].choices
    first, second, third = answers[0].choices
    assert (second.finish_reason, second.ids[-1]) == ("stop", stop)
    assert first.ids == free.choices[0].ids and third.ids == free.choices[2].ids
    assert len({tuple(choice.ids) for choice in answers[0].choices}) > 1
    assert answers[0].usage["prompt_tokens"] == len(PROMPT)


# --- structured output ---------------------------------------------------------------------------------------

ONE_INTEGER = {
    "type": "object",
    "properties": {"age": {"type": "integer"}},
    "required": ["age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("stream", [False, True])
def test_b27_structured_answers_are_valid_when_they_end(client: TestClient, stream: bool) -> None:
    spec = {"type": "json_schema", "json_schema": {"name": "person", "schema": ONE_INTEGER}}
    for response_format in ({"type": "json_object"}, spec):
        for seed in range(4):
            options = {"response_format": response_format, "temperature": 1, "seed": seed, "max_tokens": 60}
            drafted = ask(client, stream, chat=True, **options, **drafted_by("random", 4))
            plain = ask(client, chat=True, **options, **OFF)
            assert drafted.choices == plain.choices
            if drafted.choices[0].finish_reason == "stop":
                value = json.loads(drafted.choices[0].text)
                assert isinstance(value, dict)
                assert response_format is not spec or isinstance(value["age"], int)


def test_b27_a_schema_that_is_missing_or_wrong_is_refused(client: TestClient) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    for wrong in (
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "x"}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no such type"}}},
        {"type": "nonsense"},
    ):
        for stream in (False, True):
            answer = client.post(CHAT, json={"messages": messages, "response_format": wrong, "stream": stream})
            assert (error_of(answer)["param"] or "").startswith("response_format")
    assert client.get("/health").status_code == 200


# --- ids -----------------------------------------------------------------------------------------------------


def test_b30_prompts_of_impossible_ids_are_refused(client: TestClient) -> None:
    for prompt in ([-1], [VOCABULARY], [VOCABULARY + 5], [1.5], ["a", 1]):
        assert error_of(client.post(COMPLETIONS, json={"prompt": prompt}))["param"] == "prompt"
    assert len(ask(client, prompt=[VOCABULARY - 1], ignore_eos=True, max_tokens=3).ids) == 3
    assert client.get("/health").status_code == 200


def test_b31_impossible_ids_in_options_are_refused_beside_a_neighbour(client: TestClient) -> None:
    before = ask(client, **drafted_by("noisy")).ids
    for options in (
        {"stop_token_ids": [999999], "min_tokens": 2},
        {"logit_bias": {"999999": 5}},
        {"logit_bias": {"abc": 1}},
    ):
        error_of(client.post(COMPLETIONS, json={"prompt": PROMPT, **options}))
    assert ask(client, **drafted_by("noisy")).ids == before


# --- log-probabilities ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"logit_bias": {"70": -100}}, {"echo": True}], ids=["top_k 1", "a ban", "echo"]
)
def test_b38_log_probabilities_are_strict_json(client: TestClient, options: dict[str, Any], stream: bool) -> None:
    body = {
        "prompt": PROMPT,
        "max_tokens": 12,
        "temperature": 1,
        "top_k": 1,
        "logprobs": 5,
        "stream": stream,
        **options,
    }
    response = client.post(COMPLETIONS, json={**body, **drafted_by("noisy")})
    assert response.status_code == 200

    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is not JSON")

    for line in response.text.removesuffix("data: [DONE]\n\n").split("\n\n") if stream else [response.text]:
        if line:
            json.loads(line.removeprefix("data: "), parse_constant=refuse)
    answer = ask(client, stream, **{name: value for name, value in body.items() if name != "stream"})
    numbers = [value for value in answer.choices[0].logprobs["token_logprobs"] if value is not None]
    assert len(numbers) >= 12 and all(math.isfinite(number) and number <= 0 for number in numbers)
