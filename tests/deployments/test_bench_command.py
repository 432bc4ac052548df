"""`leadout bench`: what is asked, how times become figures, and other endpoints than Leadout's own."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import httpx
import pytest
from typer.testing import CliRunner

from deployments import access
from deployments.access import AccessRules
from deployments.api_client import ServiceError, stream_events, text_of
from deployments.api_keys import ApiKey, digest_of
from deployments.bench_plot import plot
from deployments.cli import cli
from deployments.endpoint_bench import BenchOptions, Level, Sample, bench, built_in_prompts, percentiles, summary
from deployments.http_errors import error_response
from tests.deployments.helpers import LIMITS, says
from tests.fakes import ScriptedService
from workers.errors import RequestError
from workers.messages import GenerationEvent, GenerationRequest

Serving = Callable[..., AbstractContextManager[str]]
IDS = list(range(70, 82))
ROOMY = replace(LIMITS, context_length=256)  # the built-in prompts are longer than most here


def invoke(url: str, *options: str, **environment: str) -> Any:
    return CliRunner().invoke(cli, ["bench", url, "--max-tokens", "12", *options], env=environment)


# --- through HTTP -------------------------------------------------------------------------------------------


def test_a_sweep_asks_what_it_was_told_and_writes_what_it_found(serving: Serving, tmp_path: Path) -> None:
    service = ScriptedService(says(IDS, block=3))
    file, picture = tmp_path / "bench.json", tmp_path / "bench.svg"
    with serving(service, ROOMY) as url:
        options = ("--concurrency", "1", "--concurrency", "3", "--requests", "6", "--temperature", "0.5")
        result = invoke(f"{url}/v1", *options, "--json", str(file), "--plot", str(picture))
    assert result.exit_code == 0, result.output
    assert len(service.requests) == 1 + 2 * 6
    assert {(asked.stop.max_tokens, asked.sampling.temperature) for asked in service.requests} == {(12, 0.5)}
    told = json.loads(file.read_text())
    assert [level["concurrency"] for level in told["levels"]] == [1, 3]
    for level in told["levels"]:
        assert (level["requests"], level["output_tokens"], level["errors"]) == (6, 72, {})
        assert level["accepted_length"] == pytest.approx(3.0) and level["tokens_counted"] is True
        assert level["ttft_ms"]["p50"] <= level["ttft_ms"]["p99"] <= level["request_ms"]["p99"]
    assert "accepted length" in result.stdout and "3.00" in result.stdout
    assert ElementTree.fromstring(picture.read_text()).tag.endswith("svg")


def test_prompts_come_from_a_file_and_their_own_options_go_first(serving: Serving, tmp_path: Path) -> None:
    service = ScriptedService(says(IDS))
    lines = [{"prompt": "ab", "max_tokens": 5}, {"messages": [{"role": "user", "content": "hi"}]}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    with serving(service, ROOMY) as url:
        result = invoke(url, "--prompts", str(path), "--concurrency", "1", "--requests", "2")
    assert result.exit_code == 0, result.output
    assert sorted(asked.stop.max_tokens for asked in service.requests[1:]) == [5, 12]


def test_the_key_comes_from_the_environment(serving: Serving) -> None:
    limits = replace(ROOMY, access=AccessRules((ApiKey("a", digest_of("key-a")),)))
    with serving(ScriptedService(says(IDS)), limits) as url:
        options = ("--concurrency", "1", "--requests", "1")
        assert invoke(url, *options, LEADOUT_API_KEY="key-a").exit_code == 0
        assert invoke(url, *options, "--api-key-env", "MINE", MINE="key-a", LEADOUT_API_KEY="no").exit_code == 0
        refused = invoke(url, *options, LEADOUT_API_KEY="key-wrong")
    assert refused.exit_code == 2 and "401" in refused.stderr and "key-wrong" not in refused.output


def test_requests_that_are_refused_are_counted_and_tell_by_the_status(
    serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = threading.Event()

    def refusing(error: RequestError) -> Any:
        refused.set()
        return error_response(error)

    class Held(ScriptedService):
        """Answers the request that nobody measures, and those that are measured once one of them was refused."""

        async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
            """See ScriptedService."""
            while self.requests and not refused.is_set():
                await asyncio.sleep(0.001)
            async for event in super().generate(request):
                yield event

    monkeypatch.setattr(access, "error_response", refusing)
    limits = replace(ROOMY, access=AccessRules(max_concurrent_per_key=1))
    file = tmp_path / "bench.json"
    with serving(Held(says(IDS)), limits) as url:
        result = invoke(url, "--concurrency", "4", "--requests", "8", "--json", str(file))
    assert result.exit_code == 1, result.output
    (level,) = json.loads(file.read_text())["levels"]
    assert level["errors"]["429"] + level["requests"] == 8 and level["requests"] >= 1
    assert "x 429" in result.stdout


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("http://127.0.0.1:9", (), "no service answers"),
        ("localhost", (), "must begin with http"),
        ("http://127.0.0.1:9", ("--plot", "x.png"), "SVG"),
        ("http://127.0.0.1:9", ("--prompts", "nowhere.txt"), "nowhere.txt"),
    ],
)
def test_what_cannot_be_measured_is_one_line(url: str, options: tuple[str, ...], message: str) -> None:
    result = invoke(url, *options)
    assert result.exit_code == 2 and message in result.stderr and "Traceback" not in result.output


# --- other endpoints ----------------------------------------------------------------------------------------


def measured(
    handler: Callable[[httpx.Request], httpx.Response], options: BenchOptions, clock: Callable[[], float] | None = None
) -> list[Level]:
    async def run() -> list[Level]:
        async with httpx.AsyncClient(transport=httpx.MockTransport(handler), base_url="http://other") as client:
            return await bench(client, built_in_prompts(True), options, lambda _: None, clock or (lambda: 0.0))

    return asyncio.run(run())


def chat_stream(pieces: list[str], tail: list[str]) -> httpx.Response:
    events = [json.dumps({"choices": [{"index": 0, "delta": {"content": piece}}]}) for piece in pieces]
    return httpx.Response(200, text="".join(f"data: {event}\n\n" for event in [*events, *tail]))


def test_an_endpoint_without_usage_is_counted_by_its_events() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "theirs"}]})
        body = json.loads(request.content)
        assert (request.url.path, body["model"], body["stream"]) == ("/v1/chat/completions", "theirs", True)
        return chat_stream(["", "a", "b", "c"], ["[DONE]"])

    (level,) = measured(handler, BenchOptions((2,), requests=4))
    assert (level.requests, level.output_tokens, level.tokens_counted) == (4, 12, False)
    assert level.accepted_length is None and level.acceptance is None


def test_a_stream_is_cut_into_events_at_line_ends_only() -> None:
    text = "a\u2028b\x85c"
    event = json.dumps({"choices": [{"index": 0, "text": text}]}, ensure_ascii=False)

    async def parts() -> AsyncIterator[bytes]:
        whole = f": a comment\r\n\r\ndata: {event}\r\n\r\ndata:[DONE]".encode()
        for start in range(0, len(whole), 7):
            yield whole[start : start + 7]

    async def run() -> list[str]:
        transport = httpx.MockTransport(lambda _: httpx.Response(200, content=parts()))
        async with httpx.AsyncClient(transport=transport, base_url="http://other") as client:
            return [text_of(event) async for event in stream_events(client, "/v1/completions", {})]

    assert asyncio.run(run()) == [text]


def test_broken_streams_and_error_events_are_failures() -> None:
    answers: Iterator[httpx.Response] = iter(
        [
            chat_stream(["a"], ["[DONE]"]),
            chat_stream(["a"], []),
            chat_stream(["a"], [json.dumps({"error": {"message": "gone"}})]),
            chat_stream(["a"], ["{"]),
            chat_stream(["a"], ['{"choices": [1]}', "[DONE]"]),
            chat_stream(["a"], ['{"usage": {"completion_tokens": "many"}}', "[DONE]"]),
            chat_stream(["a", "b"], ["[DONE]"]),
        ]
    )
    (level,) = measured(lambda _: next(answers), BenchOptions((1,), requests=6, model="m"))
    assert (level.requests, level.output_tokens, level.errors) == (1, 2, {"broken": 5})


def test_a_sweep_without_any_answer_is_no_measurement() -> None:
    answers = iter([chat_stream(["a"], ["[DONE]"]), *[httpx.Response(503, json={})] * 3])
    with pytest.raises(ServiceError, match="503"):
        measured(lambda _: next(answers), BenchOptions((1,), requests=3, model="m"))


# --- figures ------------------------------------------------------------------------------------------------


def sample(events_s: list[float], tokens: int, **fields: Any) -> Sample:
    return Sample(tuple(events_s), events_s[-1] if events_s else 0.0, tokens, True, **fields)


def test_times_are_told_apart() -> None:
    speculating = {"verifications": 3, "draft_tokens": 8, "accepted_tokens": 4, "accepted_length": 7 / 3}
    level = summary(2, 2.0, [sample([0.1, 0.2, 0.4], 7, **speculating), sample([0.3, 0.4], 3)])
    assert (level.output_tokens, level.tokens_per_s, level.requests_per_s) == (10, 5.0, 1.0)
    assert level.ttft_ms is not None and level.ttft_ms.p50 == pytest.approx(200.0)
    assert level.itl_ms is not None and level.itl_ms.mean == pytest.approx(400 / 3)
    assert level.tpot_ms is not None and level.tpot_ms.p50 == pytest.approx(50.0)
    assert level.request_ms is not None and level.request_ms.p50 == pytest.approx(400.0)
    assert level.accepted_length == pytest.approx(7 / 3) and level.acceptance == pytest.approx(0.5)


def test_nothing_answered_is_no_figure() -> None:
    level = summary(1, 1.0, [], {"429": 2})
    assert (level.ttft_ms, level.itl_ms, level.tpot_ms, level.request_ms, level.accepted_length) == (None,) * 5
    assert level.errors == {"429": 2}


def test_percentiles_lie_between_the_nearest_two() -> None:
    found = percentiles([number / 1000 for number in range(101)])
    assert found is not None
    assert (found.p50, found.p95, found.p99, found.mean) == pytest.approx((50.0, 95.0, 99.0, 50.0))
    assert percentiles([0.003]) == percentiles([0.003, 0.003])
    assert percentiles([]) is None


def test_the_picture_has_a_point_for_each_figure_and_none_for_none() -> None:
    levels = [summary(1, 1.0, [sample([0.1, 0.2], 4)]), summary(8, 1.0, [], {"503": 1})]
    drawn = ElementTree.fromstring(plot(levels, "<model> & co"))
    names = "".join(drawn.itertext())
    assert "<model> & co" in names and "time to first token, ms" in names
    circles = [each for each in drawn.iter() if each.tag.endswith("circle")]
    assert len(circles) == 2 + 3 * 3  # throughput of both levels, three percentiles of three times of one
    assert all(0 <= float(each.get("cy", "-1")) <= 260 for each in circles)
