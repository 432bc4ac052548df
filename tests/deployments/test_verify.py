"""`leadout verify`: equal and different answers told apart, and one clear line for whatever cannot be compared."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deployments.access import AccessRules
from deployments.api_keys import ApiKey, digest_of
from deployments.cli import cli
from deployments.prompt_file import CHAT, COMPLETIONS, FilePrompt, PromptFileError, read_prompts
from deployments.verify import Answer, Case, Pass, VerifyError, VerifyOptions, compare, plan_cases, verdict
from tests.deployments.helpers import LIMITS
from tests.fakes import ScriptedService, in_blocks
from workers.decoding.comparison import Difference
from workers.messages import GenerationRequest, SpeculationUsage, TokenChunk, Verification, token_ids

Serving = Callable[..., AbstractContextManager[str]]
IDS = list(range(70, 90))


def answering(with_drafts: Callable[[GenerationRequest], list[int]]) -> ScriptedService:
    """A service that answers IDS, and what `with_drafts` says to requests that leave speculation on."""

    def script(request: GenerationRequest) -> list[TokenChunk]:
        ids = with_drafts(request) if request.speculation.enabled else IDS
        return in_blocks(ids[: request.stop.max_tokens], 3)

    return ScriptedService(script)


def swayed(request: GenerationRequest) -> list[int]:
    """The wrong token at place 7, at temperatures above 0, for prompts that begin with b."""
    wrong = request.sampling.temperature > 0 and request.prompt[0] == ord("b") - 32
    return [*IDS[:7], 99, *IDS[8:]] if wrong else IDS


def written(folder: Path, content: str, name: str = "prompts.txt") -> Path:
    path = folder / name
    path.write_text(content)
    return path


def invoke(path: Path, *options: str) -> Any:
    return CliRunner().invoke(cli, ["verify", str(path), "--max-tokens", "20", *options])


@pytest.fixture
def three(tmp_path: Path) -> Path:
    return written(tmp_path, "alpha\n\nbeta\ngamma\n")


# --- through HTTP -------------------------------------------------------------------------------------------


def test_equal_answers_are_lossless_and_each_prompt_was_asked_twice(serving: Serving, three: Path) -> None:
    service = answering(lambda request: IDS)
    with serving(service) as url:
        result = invoke(three, "--url", url, "--seed", "5")
    assert result.exit_code == 0, result.output
    assert "LOSSLESS: 6 answers, 120 tokens identical" in result.stdout
    asked = [
        (request.sampling.temperature, request.speculation.enabled, request.sampling.seed)
        for request in service.requests
    ]
    assert sorted(asked) == sorted(
        (temperature, drafted, seed) for temperature in (0.0, 0.8) for drafted in (True, False) for seed in (5, 6, 7)
    )


def test_different_answers_are_named_by_line_place_and_both_ids(serving: Serving, three: Path) -> None:
    with serving(answering(swayed)) as url:
        result = invoke(three, "--url", url)
    assert result.exit_code == 1, result.output
    line = "DIFFERENT: 1 of 6 answers; first prompts.txt:3 (temperature 0.8, seed 1, choice 0) at token 7: "
    assert line + "id 99 with drafts, id 77 without" in result.stdout


def test_the_key_comes_from_the_environment(serving: Serving, three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = replace(LIMITS, access=AccessRules((ApiKey("a", digest_of("key-a")),)))
    with serving(answering(lambda request: IDS), limits) as url:
        refused = invoke(three, "--url", url)
        monkeypatch.setenv("LEADOUT_API_KEY", "key-a")
        assert invoke(three, "--url", url).exit_code == 0
    assert refused.exit_code == 2 and "401" in refused.stderr


def test_for_machines_the_result_is_one_json_object(serving: Serving, three: Path) -> None:
    with serving(answering(swayed)) as url:
        result = invoke(three, "--url", url, "--output", "json", "--temperature", "0.8", "--limit", "2")
    assert result.exit_code == 1, result.output
    told = json.loads(result.stdout)
    assert told["lossless"] is False
    assert told["verdict"].startswith("DIFFERENT: 1 of 2")
    (row,) = told["temperatures"]
    assert (row["temperature"], row["prompts"], row["answers"], row["tokens"]) == (0.8, 2, 2, 28)
    (found,) = row["differences"]
    assert found["difference"] == {"position": 7, "first": 99, "second": 77}


def test_lines_of_json_may_be_chats_and_bring_their_own_options(serving: Serving, tmp_path: Path) -> None:
    lines = [
        {"messages": [{"role": "user", "content": "hi"}], "temperature": 0.5},
        {"prompt": ["ab", "cd"], "seed": 11, "max_tokens": 4, "speculation": {"max_draft_tokens": 2}},
    ]
    path = written(tmp_path, "\n".join(map(json.dumps, lines)), "prompts.jsonl")
    service = answering(lambda request: IDS)
    with serving(service) as url:
        result = invoke(path, "--url", url, "--temperature", "0")
    assert result.exit_code == 0, result.output
    assert "LOSSLESS: 3 answers, 28 tokens identical" in result.stdout
    drafted = [request for request in service.requests if request.speculation.enabled]
    assert {request.sampling.temperature for request in drafted} == {0.0, 0.5}
    assert {(request.sampling.seed, request.stop.max_tokens) for request in drafted} == {(0, 20), (11, 4)}
    assert {request.speculation.max_draft_tokens for request in drafted} == {None, 2}


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        ("", "prompts.txt", "holds no prompts"),
        ('{"prompt": "a"}\n{"prompt": ', "prompts.jsonl", "prompts.jsonl:2: not JSON"),
        ('{"prompt": "a", "messages": []}', "prompts.jsonl", "prompts.jsonl:1: must be an object with either"),
        ("\n[1]", "prompts.jsonl", "prompts.jsonl:2: must be an object"),
        ('{"prompt": "a", "stream": true}', "prompts.jsonl", "prompts.jsonl:1: stream cannot be set"),
        ('{"prompt": "a", "top_p": NaN}', "prompts.jsonl", "prompts.jsonl:1: not JSON: NaN is not"),
        ('{"prompt": "\\ud800"}', "prompts.jsonl", "prompts.jsonl:1: not JSON"),
        ('{"prompt": "a", "temperature": 1e999}', "prompts.jsonl", "prompts.jsonl:1: the temperature must be finite"),
        ('{"prompt": "a", "temperature": "0"}', "prompts.jsonl", "prompts.jsonl:1: temperature must be a number"),
        ('{"prompt": "a", "speculation": {"enabled": true}}', "prompts.jsonl", "speculation must be an object without"),
        ('{"prompt": "a", "seeed": 1}', "prompts.jsonl", "prompts.jsonl:1 was refused with 400: seeed: is not a known"),
        ("x" * 100, "prompts.txt", "prompts.txt:1 was refused with 400: The model's context length is 64"),
    ],
)
def test_what_cannot_be_asked_is_one_line_with_its_place(
    serving: Serving, tmp_path: Path, content: str, name: str, message: str
) -> None:
    with serving(answering(lambda request: IDS)) as url:
        result = invoke(written(tmp_path, content, name), "--url", url)
    assert result.exit_code == 2
    assert message in result.stderr
    assert [line.startswith("leadout: ") for line in result.stderr.splitlines() if line.strip()] == [True]


def test_a_service_that_is_not_there_or_a_file_that_is_not_is_one_line(three: Path, tmp_path: Path) -> None:
    result = invoke(three, "--url", "http://127.0.0.1:9")
    assert (result.exit_code, result.stderr.strip()) == (2, "leadout: no service answers at http://127.0.0.1:9")
    for url, named in (
        ("http://127.0.0.1:port", "is not a URL"),
        ("localhost:9", "localhost:9 is not a URL: it must begin with http"),
    ):
        result = invoke(three, "--url", url)
        assert result.exit_code == 2 and named in result.stderr
    result = invoke(tmp_path / "nowhere.txt")
    assert result.exit_code == 2 and "nowhere.txt: No such file" in result.stderr
    result = invoke(three, "--config", str(tmp_path / "nowhere.yaml"))
    assert result.exit_code == 2 and "nowhere.yaml: No such file" in result.stderr
    result = invoke(three, "--config", "a.yaml", "--url", "http://127.0.0.1:9")
    assert result.exit_code == 2 and "not both" in result.stderr


def test_a_service_that_does_not_draft_proves_nothing(serving: Serving, three: Path) -> None:
    plain = ScriptedService(lambda request: [TokenChunk(token_ids(IDS), None, "length", SpeculationUsage(20))])  # type: ignore[arg-type, list-item]
    with serving(plain) as url:
        result = invoke(three, "--url", url)
    assert result.exit_code == 2
    assert "verified no drafts" in result.stderr


def test_ratio_is_compared_at_temperature_0_only(three: Path) -> None:
    result = invoke(three, "--verification", "ratio", "--temperature", "0.8")
    assert result.exit_code == 2
    assert "prompts.txt:1: ratio verification keeps ids at temperature 0 only, not at 0.8" in result.stderr


# --- reading, planning, comparing ---------------------------------------------------------------------------


def prompt(where: str = "p:1", **fields: Any) -> FilePrompt:
    return FilePrompt(where, COMPLETIONS, {"prompt": "a"} | fields)


def test_a_line_may_hold_separators_that_are_none_in_json(tmp_path: Path) -> None:
    path = written(tmp_path, '{"prompt": "a\u2028b", "seed": null}\r\n{"messages": [1]}', "p.jsonl")
    first, second = read_prompts(path)
    assert first == FilePrompt("p.jsonl:1", COMPLETIONS, {"prompt": "a\u2028b"})
    assert (second.where, second.endpoint) == ("p.jsonl:2", CHAT)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(PromptFileError, match="not UTF-8"):
        read_prompts(path)


def test_the_two_requests_of_a_case_differ_in_speculation_alone() -> None:
    (case,) = plan_cases([prompt(speculation={"drafter": "d"})], VerifyOptions(temperatures=(0.8,), max_tokens=9))
    drafted, plain = case.request(drafted=True), case.request(drafted=False)
    assert drafted.pop("speculation") == {"enabled": True, "verification": "coupled", "drafter": "d"}
    assert plain.pop("speculation") == {"enabled": False}
    assert drafted == plain
    assert drafted == {"prompt": "a", "temperature": 0.8, "seed": 0, "max_tokens": 9, "return_token_ids": True}


def test_chats_may_limit_their_tokens_by_either_name() -> None:
    (case,) = plan_cases([prompt(max_completion_tokens=3)], VerifyOptions(temperatures=(0.0,)))
    assert "max_tokens" not in case.body


def test_ratio_at_temperature_0_is_asked_for() -> None:
    options = VerifyOptions((0.0,), verification=Verification.RATIO)
    (case,) = plan_cases([prompt()], options)
    assert case.request(drafted=True)["speculation"] == {"enabled": True, "verification": "ratio"}
    with pytest.raises(VerifyError, match=r"p:4: ratio .* not at 0\.7"):
        plan_cases([prompt("p:4", temperature=0.7)], options)


def answer(*choices: tuple[int, ...]) -> Answer:
    return Answer(choices, verifications=2, draft_tokens=8)


def test_every_choice_is_compared_and_counted_up_to_its_first_difference() -> None:
    cases = [Case(f"p:{line}", COMPLETIONS, {"temperature": 0, "seed": 3}, {}) for line in (1, 2)]
    drafted = Pass([answer((1, 2, 3), (4, 5, 6)), answer((7, 8))], wall_s=2.0)
    plain = Pass([answer((1, 2, 3), (4, 9, 6)), answer((7, 8, 9))], wall_s=4.0)
    found = compare(cases, drafted, plain)
    assert (found.prompts, found.answers, found.tokens) == (2, 3, 3 + 2 + 3)
    assert [(each.where, each.choice, each.difference) for each in found.differences] == [
        ("p:1", 1, Difference(1, 5, 9)),
        ("p:2", 0, Difference(2, None, 9)),
    ]
    assert (found.accepted_length, found.drafted_tokens_per_s, found.plain_tokens_per_s) == (2.0, 4.0, 2.25)
    equal, line = verdict([found])
    assert not equal
    assert line.startswith("DIFFERENT: 2 of 3 answers; first p:1 (temperature 0, seed 3, choice 1) at token 1: id 5")
    assert verdict([compare(cases, plain, plain)]) == (True, "LOSSLESS: 3 answers, 9 tokens identical")


def test_an_answer_that_ends_first_says_so() -> None:
    cases = [Case("p:1", COMPLETIONS, {"temperature": 0, "seed": 3}, {})]
    found = compare(cases, Pass([answer((7,))], 1.0), Pass([answer((7, 8))], 1.0))
    assert verdict([found])[1].endswith("at token 1: the end with drafts, id 8 without")
