"""One line for each request that has ended, and no text of clients in it unless that is asked for."""

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import ScriptedDrafter, ScriptedTarget, Trouble
from tests.router.helpers import TOKENIZER, ask, ask_all, checks_done, request, run
from workers.decoding.detokenizer import IncrementalDetokenizer
from workers.messages import GenerationRequest
from workers.router.config import RouterConfig
from workers.router.request_record import RequestRecorder
from workers.router.router import Router
from workers.telemetry.request_log import LOGGER_NAME, RequestLogConfig, open_request_log

TRACE = "0af7651916cd43dd8448eb211c80319c"
SPOKEN = request(max_tokens=12)


@pytest.fixture(autouse=True)
def fresh_log() -> Iterator[None]:
    yield
    log = logging.getLogger(LOGGER_NAME)
    for handler in log.handlers:
        handler.close()
    log.handlers.clear()
    log.propagate = True


def lines_of(path: Path, asked: list[GenerationRequest], target: ScriptedTarget, **options: Any) -> list[str]:
    """What is logged of requests, all at once."""
    limits = {"max_draft_tokens": 3, "max_waiting_sequences": 1, "max_running_sequences": 1}

    async def test() -> None:
        log = open_request_log(RequestLogConfig(file=str(path), **options), lambda ids: f"<{len(ids)} ids>")
        config = RouterConfig(**limits)
        recorder = RequestRecorder(config.verification, log=log)
        router = Router(config, lambda prompt: IncrementalDetokenizer(TOKENIZER, prompt.tolist()), recorder=recorder)
        for worker in (target, ScriptedDrafter()):
            await router.register(worker.registration, worker)
        await ask_all(router, asked)
        await router.close()

    run(test)
    return path.read_text().splitlines()


def test_a_json_line_tells_tokens_times_outcome_and_trace_and_no_text(tmp_path: Path) -> None:
    asked = replace(SPOKEN, trace_context={"traceparent": f"00-{TRACE}-00f067aa0ba902b7-00"})
    (line,) = lines_of(tmp_path / "log", [asked], ScriptedTarget(), format="json")
    told = json.loads(line)
    assert told.keys().isdisjoint({"prompt", "answer"})
    assert (told["request_id"], told["outcome"], told["trace_id"]) == ("request-0", "length", TRACE)
    assert (told["prompt_tokens"], told["output_tokens"]) == (5, 12)
    assert told["verifications"] == 3
    assert told["accepted_length"] == 4.0
    assert (told["drafter"], told["draft_tokens"], told["accepted_tokens"]) == ("toy-draft", 9, 9)
    phases = [told[name] for name in ("queue_ms", "prefill_ms", "decode_ms")]
    assert all(phase >= 0 for phase in phases)
    assert sum(phases) == pytest.approx(told["total_ms"], abs=0.01)
    assert told["first_token_ms"] == pytest.approx(told["queue_ms"] + told["prefill_ms"], abs=0.01)


def test_people_read_one_line_with_the_same(tmp_path: Path) -> None:
    (line,) = lines_of(tmp_path / "log", [SPOKEN], ScriptedTarget())
    assert "request request-0 length: 5 + 12 tokens, accepted length 4.00 (9 of 9 drafts of toy-draft), queue" in line
    assert "trace" not in line and "ids>" not in line


@pytest.mark.parametrize("format", ["human", "json"])
def test_text_is_logged_only_when_it_is_asked_for(tmp_path: Path, format: str) -> None:
    (line,) = lines_of(tmp_path / "log", [SPOKEN], ScriptedTarget(), format=format, text=True)
    assert '"<5 ids>"' in line and '"<12 ids>"' in line


def test_refusals_and_failures_have_lines_of_their_own(tmp_path: Path) -> None:
    asked = [request(number=number) for number in range(3)]
    dead = ScriptedTarget(troubles={0: Trouble.DEATH})
    asked = [replace(each, timeout_s=0.2) for each in asked]
    told = [json.loads(line) for line in lines_of(tmp_path / "log", asked, dead, format="json")]
    assert sorted(line["outcome"] for line in told) == ["overloaded", "timeout", "timeout"]
    assert all(line["accepted_length"] is None and line["first_token_ms"] is None for line in told)


def test_a_client_that_leaves_is_a_line_too_and_a_check_is_none(tmp_path: Path) -> None:
    async def test() -> None:
        log = open_request_log(RequestLogConfig(file=str(tmp_path / "log"), format="json"), str)
        config = RouterConfig(max_draft_tokens=3, check_share=1.0)
        router = Router(
            config, lambda prompt: IncrementalDetokenizer(TOKENIZER, prompt.tolist()), recorder=RequestRecorder(log=log)
        )
        for worker in (ScriptedTarget(), ScriptedDrafter()):
            await router.register(worker.registration, worker)
        events = router.generate(request(max_tokens=200))
        await anext(events)
        await events.aclose()  # type: ignore[attr-defined]
        await ask(router, request(number=1))
        assert (await checks_done(router)).checked == 1
        await router.close()

    run(test)
    lines = (tmp_path / "log").read_text().splitlines()
    assert [json.loads(line)["outcome"] for line in lines] == ["cancelled", "length"]
    assert logging.getLogger(LOGGER_NAME).propagate is False


def test_a_log_that_is_off_is_none() -> None:
    assert open_request_log(RequestLogConfig(enabled=False), str) is None
