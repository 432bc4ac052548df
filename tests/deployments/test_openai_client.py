from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from deployments.text import TextCodec
from tests.deployments.helpers import says
from tests.fakes import ScriptedService
from tests.limits import HANG_S
from workers.messages import FinishReason, GenerationFailed

USER: Any = {"role": "user", "content": "hi"}


@pytest.fixture
def api(serving: Callable[..., Any], codec: TextCodec) -> Iterator[openai.OpenAI]:
    script = says(codec.encode("日本🙂é x").tolist(), 4, FinishReason.STOP)
    with (
        serving(ScriptedService(script)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=HANG_S) as api,
    ):
        yield api


def test_the_official_client_reads_every_kind_of_answer(api: openai.OpenAI) -> None:
    chat = api.chat.completions.create(model="tiny", messages=[USER])
    assert chat.choices[0].message.content == "日本🙂é x"
    chunks = list(api.chat.completions.create(model="tiny", messages=[USER], stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "日本🙂é x"
    again = chat.choices[0].message.model_dump()
    api.chat.completions.create(model="tiny", messages=[USER, again, USER])  # type: ignore[list-item]
    assert api.completions.create(model="tiny", prompt=["a", "b"]).choices[1].index == 1
    usage = list(api.completions.create(model="tiny", prompt="a", stream=True, stream_options={"include_usage": True}))
    assert usage[-1].usage is not None and usage[-1].usage.prompt_tokens == 1
    assert [model.id for model in api.models.list()] == ["tiny"]


def test_the_official_client_reads_log_probabilities_choices_and_echoes(api: openai.OpenAI) -> None:  # B38, B43
    chat = api.chat.completions.create(model="tiny", messages=[USER], logprobs=True, top_logprobs=3, n=2)
    assert [choice.index for choice in chat.choices] == [0, 1]
    logprobs = chat.choices[1].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert bytes(byte for entry in logprobs.content for byte in entry.bytes or []).decode() == "日本🙂é x"
    assert {len(entry.top_logprobs) for entry in logprobs.content} == {3}
    chunks = list(
        api.chat.completions.create(model="tiny", messages=[USER], logprobs=True, top_logprobs=3, n=2, stream=True)
    )
    mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == 1]
    assert [entry for choice in mine if choice.logprobs for entry in choice.logprobs.content or []] == logprobs.content

    ask: Any = {"model": "tiny", "prompt": "ab", "logprobs": 5, "echo": True, "n": 2}
    scored = api.completions.create(**ask).choices[1].logprobs
    assert scored is not None and scored.tokens is not None and scored.text_offset is not None
    assert scored.token_logprobs is not None and scored.token_logprobs[0] is None
    assert all(isinstance(value, float) for value in scored.token_logprobs[1:])
    assert scored.tokens[:2] == ["a", "b"] and scored.text_offset[:3] == [0, 1, 2]
    events = list(api.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    told = [event.choices[0].logprobs for event in events if event.choices and event.choices[0].index == 1]
    assert [token for part in told if part for token in part.tokens or []] == scored.tokens
    assert events[-1].choices == [] and events[-1].usage is not None and events[-1].usage.prompt_tokens == 2


def test_the_official_client_raises_its_own_errors(api: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        api.completions.create(model="nope", prompt="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        api.completions.create(model="tiny", prompt="a", max_tokens=-3)
    assert bad.value.param == "max_tokens"
    with pytest.raises(openai.BadRequestError):
        api.completions.create(model="tiny", prompt="a", stream=True, n=0)


def test_the_official_client_does_not_send_a_request_again_that_ends_its_workers(serving: Callable[..., Any]) -> None:
    poison = ScriptedService(lambda _: [GenerationFailed(500, "poison_request", "3 targets in a row failed over it")])
    with (
        serving(poison) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=2, timeout=HANG_S) as api,
        pytest.raises(openai.InternalServerError, match="3 targets in a row"),
    ):
        api.completions.create(model="tiny", prompt="x")
    assert len(poison.requests) == 1
