"""Requests to the application, and answers in one shape whether they were streamed or not."""

from dataclasses import dataclass, field
from typing import Any

from starlette.testclient import TestClient

from tests.deployments.helpers import CHAT, COMPLETIONS, events_of

PROMPT = "The sky"
OFF: dict[str, Any] = {"speculation": {"enabled": False}}


def drafted_by(drafter: str, k: int = 4, verification: str = "coupled") -> dict[str, Any]:
    """The options that have one drafter propose k tokens per round."""
    return {"speculation": {"drafter": drafter, "max_draft_tokens": k, "verification": verification}}


@dataclass
class Choice:
    """One choice of an answer."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: dict[str, list[Any]] = field(default_factory=dict)


@dataclass
class Answer:
    """Choices in the order of their index."""

    choices: list[Choice]
    usage: dict[str, Any]

    @property
    def ids(self) -> list[int]:
        """The tokens of the only choice."""
        [choice] = self.choices
        return choice.ids


def ask(client: TestClient, stream: bool = False, chat: bool = False, **options: Any) -> Answer:
    """Complete PROMPT, greedily unless told otherwise; the answer must be a success in OpenAI's shape."""
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": PROMPT}]} if chat else {"prompt": PROMPT}
    body = {**prompt, "max_tokens": 24, "temperature": 0, "return_token_ids": True, **options}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    response = client.post(CHAT if chat else COMPLETIONS, json=body)
    assert response.status_code == 200, response.text
    return _streamed(events_of(response.text)) if stream else _whole(response.json())


def _whole(answer: dict[str, Any]) -> Answer:
    choices = [Choice() for _ in answer["choices"]]
    for index, part in enumerate(answer["choices"]):
        assert part["index"] == index
        _add(choices[index], part, part.get("message", part))
    return Answer(choices, answer["usage"])


def _streamed(events: list[Any]) -> Answer:
    *chunks, last, done = events
    assert done == "[DONE]" and last["choices"] == []
    parts = [part for chunk in chunks for part in chunk["choices"]]
    choices = [Choice() for _ in {part["index"] for part in parts}]
    for part in parts:
        assert choices[part["index"]].finish_reason is None, "something after the end"
        _add(choices[part["index"]], part, part.get("delta", part))
    return Answer(choices, last["usage"])


def _add(choice: Choice, part: dict[str, Any], message: dict[str, Any]) -> None:
    choice.text += message.get("text") or message.get("content") or ""
    choice.ids += part.get("token_ids") or []
    choice.finish_reason = choice.finish_reason or part["finish_reason"]
    for name, values in (part.get("logprobs") or {}).items():
        if isinstance(values, list):
            choice.logprobs.setdefault(name, []).extend(values)
