"""Structured output over HTTP: which grammar reaches the router, and what is refused before a stream opens."""

import asyncio
import json
import threading
from typing import Any

import pytest

from deployments.grammar_check import GrammarCheck
from deployments.text import TextCodec
from tests.deployments.helpers import CHAT, COMPLETIONS, HELLO, error_of
from tests.fakes import ScriptedService, byte_tokenizer, word_tokenizer
from tests.fakes.virtual_time import VirtualLoop, run_virtually
from tests.limits import HANG_S
from workers.decoding.grammar import GrammarCompiler
from workers.errors import InvalidRequestError, UnavailableError
from workers.messages import Grammar, GrammarKind

ONE_INTEGER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


def json_schema(schema: object, **more: object) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}}


def schema_grammar(schema: object) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def regex(source: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, source)


def grammar_of(client: Any, service: ScriptedService, **options: Any) -> Grammar | None:
    """The grammar that the router gets, which must be the same for both endpoints."""
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {**HELLO, "max_tokens": 16})):
        answer = client.post(path, json={**body, "seed": 1, **options})
        assert answer.status_code == 200, answer.text
    completion, chat = service.requests[-2:]
    assert completion.sampling == chat.sampling
    rules = completion.sampling.rules
    return None if rules is None else rules.grammar


def refused(client: Any, param: str, **options: Any) -> str:
    """The message of the refusal: one line of plain JSON that names `param`, for both endpoints, streaming or not."""
    messages = set()
    for stream in (False, True):
        for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, HELLO)):
            error = error_of(client.post(path, json={**body, "stream": stream, **options}))
            assert error["param"] == param and error["message"].startswith(param) and "\n" not in error["message"]
            messages.add(error["message"])
    assert client.post(COMPLETIONS, json={"prompt": "a"}).status_code == client.get("/health").status_code == 200
    return messages.pop()


# --- what reaches the router ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "grammar"),
    [
        (json_schema(ONE_INTEGER), schema_grammar(ONE_INTEGER)),
        (json_schema(ONE_INTEGER, strict=True, description="d"), schema_grammar(ONE_INTEGER)),
        (json_schema(ONE_INTEGER, strict=False), schema_grammar(ONE_INTEGER)),
        ({"response_format": {"type": "json_object"}}, Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}')),
        ({"guided_json": ONE_INTEGER}, schema_grammar(ONE_INTEGER)),
        ({"guided_json": json.dumps(ONE_INTEGER)}, schema_grammar(ONE_INTEGER)),
        ({"guided_regex": "[a-c]+"}, regex("[a-c]+")),
        ({"guided_choice": ["yes", "a.b"]}, regex(r"yes|a\.b")),
        ({"structured_outputs": {"json": ONE_INTEGER}}, schema_grammar(ONE_INTEGER)),
        ({"structured_outputs": {"regex": "a+", "disable_fallback": True, "grammar": None}}, regex("a+")),
        ({"structured_outputs": {"choice": ["yes"]}}, regex("yes")),
        ({"structured_outputs": {"json_object": True}}, Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}')),
    ],
)
def test_each_way_to_ask_becomes_a_grammar(
    client: Any, service: ScriptedService, options: dict[str, Any], grammar: Grammar
) -> None:
    assert grammar_of(client, service, **options) == grammar


@pytest.mark.parametrize(
    "options",
    [
        {"response_format": {"type": "text"}}, {"response_format": None}, {"structured_outputs": None},
        {"guided_json": None, "guided_regex": None, "guided_choice": None, "guided_grammar": None},
    ],
)  # fmt: skip
def test_what_asks_for_no_structure_sends_no_rules(
    client: Any, service: ScriptedService, options: dict[str, Any]
) -> None:
    assert grammar_of(client, service, **options) is None


def test_the_ends_that_a_grammar_may_have_travel_with_it_even_where_they_end_nothing(
    client: Any, service: ScriptedService
) -> None:
    grammar_of(client, service, guided_regex="a", stop_token_ids=[7], ignore_eos=True)
    asked = service.requests[-1]
    assert asked.sampling.rules is not None and asked.sampling.rules.end_token_ids == (0, 7)
    assert asked.stop.end_token_ids == {7}


@pytest.mark.parametrize("choice", ["a|b", "(", "a.b", "\\d", "[x]", "^$", "{1}", "a b\n", "é*+?", "#&-~/<>\"'"])
def test_choices_are_meant_literally(client: Any, service: ScriptedService, codec: TextCodec, choice: str) -> None:
    grammar = grammar_of(client, service, guided_choice=[choice])
    assert grammar is not None
    matcher = GrammarCompiler(codec.backend.to_str).compile(grammar).matcher()
    ids = codec.encode_word(choice)
    assert matcher.try_consume_tokens(list(ids)) == len(ids) and matcher.is_accepting() and matcher.is_stopped()


# --- what is refused -----------------------------------------------------------------------------------------

SCHEMA = "response_format.json_schema.schema"


@pytest.mark.parametrize(
    ("param", "options", "reason"),
    [
        (SCHEMA, {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "is required"),
        ("response_format", {"response_format": {"type": "json_schema"}}, "is required"),
        ("response_format", {"response_format": {"type": "json_object", "json_schema": {"name": "a", "schema": {}}}},
         "only allowed with"),
        ("response_format.json_schema.name",
         {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "is required"),
        ("response_format.type", {"response_format": {"type": "structural_tag"}}, "must be 'text', 'json_object'"),
        ("response_format.type", {"response_format": {}}, "is required"),
        ("response_format", {"response_format": "json_object"}, "must be a JSON object"),
        ("response_format.json_schema.more", json_schema({}, more=1), "not a known field"),
        ("response_format.json_schema.strict", json_schema({}, strict="yes"), "must be a valid boolean"),
        (SCHEMA, json_schema("{}"), "must be a JSON schema"),
        (SCHEMA, json_schema([]), "must be a JSON schema"),
        (SCHEMA, json_schema({"type": "strin"}), "strin"),
        (SCHEMA, json_schema({"properties": [1]}), "properties must be an object"),
        (SCHEMA, json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (SCHEMA, json_schema({"not": {}}), "not"),
        (SCHEMA, json_schema({"not": {}, "x-guidance": {"lenient": True}}), "not"),
        (SCHEMA, json_schema({"$ref": "#/$defs/none"}), "/$defs/none"),
        (SCHEMA, json_schema({"$ref": "http://localhost/schema.json"}), "http://localhost/schema.json"),
        (SCHEMA, json_schema({"$ref": "#"}), ""),
        (SCHEMA, json_schema({"type": "integer", "minimum": 5, "maximum": 3}), "minimum (5)"),
        (SCHEMA, json_schema({"type": "integer", "multipleOf": 9999991}), "multipleOf"),
        (SCHEMA, json_schema({"type": "integer", "multipleOf": 10**400}), "multipleOf"),
        (SCHEMA, json_schema({"allOf": [{"type": "integer", "multipleOf": prime} for prime in (7, 11, 13, 17, 19)]}),
         "multipleOf"),
        (SCHEMA, json_schema({"type": "string", "pattern": "(?=a)b"}), "look-around"),
        (SCHEMA, json_schema({"enum": ["x" * 1000] * 70}), "at most 65536"),
        ("guided_json", {"guided_json": "{"}, ""),
        ("guided_json", {"guided_json": 5}, "must be a JSON schema"),
        ("guided_json", {"guided_json": '{"items":' * 200 + "{}" + "}" * 200}, "recursion"),
        ("guided_regex", {"guided_regex": "("}, "unclosed group"),
        ("guided_regex", {"guided_regex": r"(a)\1"}, "backreferences"),
        ("guided_regex", {"guided_regex": 5}, "must be a regular expression"),
        ("guided_regex", {"guided_regex": "(" * 30_000 + "a" + ")" * 30_000}, ""),
        ("guided_choice", {"guided_choice": []}, "at least one"),
        ("guided_choice", {"guided_choice": "yes"}, "list of strings"),
        ("guided_choice", {"guided_choice": ["yes", 1]}, "list of strings"),
        ("guided_choice", {"guided_choice": ["a"] * 1025}, "at most 1024"),
        ("structured_outputs", {"structured_outputs": {}}, "is required"),
        ("structured_outputs.regex", {"structured_outputs": {"regex": "["}}, "unclosed"),
        ("structured_outputs.grammar", {"structured_outputs": {"grammar": "root ::= 1"}}, "not supported"),
        ("structured_outputs.structural_tag", {"structured_outputs": {"structural_tag": "{}"}}, "not supported"),
        ("structured_outputs.regex", {"structured_outputs": {"json": {}, "regex": "a"}}, "only one"),
        ("response_format", {"response_format": {"type": "json_object"}, "guided_regex": "a"}, "only one"),
    ],
)  # fmt: skip
def test_a_bad_structure_is_refused_by_name_with_the_reason(
    client: Any, param: str, options: dict[str, Any], reason: str
) -> None:
    assert reason in refused(client, param, **options)


def test_a_tokenizer_that_the_engine_cannot_read_refuses_structure_and_nothing_else(
    client_of: Any, service: ScriptedService
) -> None:
    client = client_of(service, codec=TextCodec(word_tokenizer(["a", "hi"])))
    assert "tokenizer" in refused(client, "guided_regex", guided_regex="a")


def test_a_model_without_end_token_refuses_structure(client_of: Any, service: ScriptedService) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    assert "end token" in refused(client_of(service, codec=TextCodec(tokenizer)), "guided_regex", guided_regex="a")


# --- the check by itself -------------------------------------------------------------------------------------


def test_verdicts_are_remembered_good_or_bad(codec: TextCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Grammar] = []
    compile_one = GrammarCompiler._compile

    def counting(self: GrammarCompiler, grammar: Grammar) -> Any:
        compiled.append(grammar)
        return compile_one(self, grammar)

    monkeypatch.setattr(GrammarCompiler, "_compile", counting)

    async def run() -> None:
        check = GrammarCheck(codec.backend.to_str)
        for _ in range(3):
            await check.check("p", regex("a"))
            with pytest.raises(InvalidRequestError, match="unclosed group"):
                await check.check("p", regex("("))

    asyncio.run(run())
    assert compiled == [regex("a"), regex("(")]


def test_compiling_holds_up_no_event_loop_and_has_a_limit(codec: TextCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, release = threading.Event(), threading.Event()

    def compile_slowly(self: GrammarCompiler, grammar: Grammar) -> None:
        begun.set()
        assert release.wait(HANG_S)

    monkeypatch.setattr(GrammarCompiler, "_compile", compile_slowly)

    async def run(loop: VirtualLoop) -> None:
        # Time passes only while the first grammar is being compiled, however late its thread comes to it.
        loop.when_idle = lambda: not begun.wait(HANG_S)
        check = GrammarCheck(codec.backend.to_str, timeout_s=0.5)
        slow = asyncio.create_task(check.check("p", regex("a")))
        await asyncio.sleep(0.01)
        with pytest.raises(UnavailableError):
            await check.check("p", regex("b"))
        with pytest.raises(InvalidRequestError, match=r"takes more than 0.5 s"):
            await slow
        release.set()
        loop.when_idle = loop.wait_for_threads
        await check.check("p", regex("b"))

    run_virtually(run)
