"""What of a conversation reaches the chat template, and what is refused because the template would drop it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from deployments.text import TextCodec
from tests.deployments.helpers import CHAT, HELLO, LIMITS, SOME, error_of, says
from tests.fakes import PLAIN_TEMPLATE, ScriptedService, byte_tokenizer

Clients = Callable[..., Any]
TOOL_TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls or [] %}[{{ call.id }} {{ call.function.name }} {{ call.function.arguments.x + 1 }}]"
    "{% endfor %}{% if m.tool_call_id %}({{ m.tool_call_id }}){% endif %}{{ '\n' }}{% endfor %}"
    "{% if thinking %}thinking {{ thinking }}\n{% endif %}"
    "{% generation %}{% if add_generation_prompt %}assistant:{% endif %}{% endgeneration %}"
)
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}


@pytest.fixture
def ask(client_of: Clients) -> Callable[..., Any]:
    """Send a chat to a model with the template; return the response, and the prompt as it was read."""
    service = ScriptedService(says(SOME))

    def send(template: str | None, **fields: Any) -> tuple[Any, str]:
        codec = TextCodec(byte_tokenizer(template))
        client = client_of(service, replace(LIMITS, context_length=1024), codec)
        response = client.post(CHAT, json={"messages": [USER], "max_tokens": 3, **fields})
        read = codec.decode(service.requests[-1].prompt.tolist()) if response.status_code == 200 else ""
        return response, read

    return send


@pytest.mark.parametrize("choice", [{}, {"tool_choice": "auto"}, {"tool_choice": "none"}, {"tool_choice": None}])
def test_tools_are_told_to_templates_that_know_them(ask: Clients, choice: dict[str, Any]) -> None:
    response, read = ask(TOOL_TEMPLATE, tools=[TOOL], parallel_tool_calls=True, **choice)
    assert response.status_code == 200, response.text
    told = '{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}'
    assert read == f"tools: [{told}]\nuser: hi\nassistant:"


def test_calls_and_their_results_reach_the_template(ask: Clients) -> None:
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]
    response, read = ask(TOOL_TEMPLATE, messages=messages, tools=[TOOL])
    assert response.status_code == 200, response.text
    assert read.endswith("user: hi\nassistant: [c1 add 2]\ntool: 2(c1)\nassistant:")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [TOOL]}, "tools"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}]}, "messages[1].tool_calls"),
        ({"chat_template_kwargs": {"thinking": True}}, "chat_template_kwargs"),
    ],
)
def test_what_the_template_would_drop_is_refused(ask: Clients, fields: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        response, _ = ask(PLAIN_TEMPLATE, **fields, stream=stream)
        error = error_of(response)
        assert error["param"] == param and "template" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": [], "tool_choice": "auto"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice"),
        ({"tools": [TOOL], "parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"tools": [{}]}, "tools[0].type"),
        ({"tools": [{**TOOL, "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [{**TOOL, "function": {"name": "f", "strict": True}}]}, "tools[0].function.strict"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"tools": {}}, "tools"),
        ({"messages": [{**USER, "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "{"}}]}
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"add_generation_prompt": "no"}, "add_generation_prompt"),
    ],
)
def test_what_is_not_offered_is_refused_by_name(ask: Clients, fields: dict[str, Any], param: str) -> None:
    error = error_of(ask(TOOL_TEMPLATE, **fields)[0])
    assert error["param"] == param and error["message"].startswith(param)


def test_variables_that_the_template_knows_are_set(ask: Clients) -> None:
    _, read = ask(TOOL_TEMPLATE, chat_template_kwargs={"thinking": "hard"})
    assert read == "user: hi\nthinking hard\nassistant:"


@pytest.mark.parametrize(
    ("fields", "read"),
    [
        ({}, "user: hi\nassistant: so\nassistant:"),
        ({"add_generation_prompt": False}, "user: hi\nassistant: so\n"),
        ({"add_generation_prompt": False, "continue_final_message": True}, "user: hi\nassistant: so"),
    ],
)
def test_the_last_message_is_followed_by_a_new_one_or_continued(
    ask: Clients, fields: dict[str, Any], read: str
) -> None:
    messages = [USER, {"role": "assistant", "content": "so"}]
    assert ask(PLAIN_TEMPLATE, messages=messages, **fields)[1] == read


def test_a_developer_is_one_to_templates_that_know_it(ask: Clients) -> None:
    messages = [{"role": "developer", "content": "be brief"}]
    knows = "{# developer #}" + PLAIN_TEMPLATE
    assert ask(PLAIN_TEMPLATE, messages=messages)[1] == "system: be brief\nassistant:"
    assert ask(knows, messages=messages)[1] == "developer: be brief\nassistant:"


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('no such turn') }}", "{{ messages[9].content.no.such.turn }}", "{% no such turn %}"],
)
def test_whatever_a_template_raises_is_a_refusal(ask: Clients, template: str) -> None:
    error = error_of(ask(template)[0])
    assert error["param"] == "messages" and error["message"].startswith("The model's chat template refused: ")


def test_a_model_without_template_refuses_chats_with_tools_too(ask: Clients) -> None:
    assert "no chat template" in error_of(ask(None, tools=[TOOL])[0])["message"]


def test_an_answer_that_looks_like_a_call_is_text(client_of: Clients) -> None:
    codec = TextCodec(byte_tokenizer(TOOL_TEMPLATE))
    written = '{"name": "add"}'
    client = client_of(
        ScriptedService(says(codec.encode(written).tolist())), replace(LIMITS, context_length=1024), codec
    )
    choice = client.post(CHAT, json={**HELLO, "tools": [TOOL]}).json()["choices"][0]
    assert choice["message"]["content"] == written and choice["finish_reason"] != "tool_calls"
