"""`leadout status` and `leadout complete` against a service: what they show, and one line for what they cannot."""

import json
import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deployments.access import AccessRules
from deployments.api_keys import ApiKey, digest_of
from deployments.cli import cli
from deployments.merged_status import merged_status
from deployments.service_status import pace, parse_status
from deployments.text import TextCodec
from tests.deployments.helpers import LIMITS, SOME, says
from tests.fakes import ScriptedService
from workers.messages import (
    DrafterReport,
    FinishReason,
    GenerationFailed,
    RoundTotals,
    RouterStatus,
    TokenChunk,
    WorkerRegistration,
    WorkerReport,
    WorkerRole,
    WorkerStats,
    token_ids,
)

Serving = Callable[..., AbstractContextManager[str]]
TOTALS = RoundTotals(rounds=10, wall_ms=500.0, verifications=40, draft_tokens=100, accepted_tokens=60)


def reading(totals: RoundTotals = TOTALS) -> RouterStatus:
    target = WorkerRegistration("t-0", WorkerRole.TARGET, "tiny", (11, 12), 257, 64, 16, 80)
    draft = WorkerRegistration("d-0", WorkerRole.DRAFT, "fast[1]", (13,), 257, 64, 16, 40)
    drafter = DrafterReport("d-0", "fast[1]", True, 0.625, {}, 2.5, 40, (40,), (25,), 1.25)
    workers = (WorkerReport(draft, None, "ray"), WorkerReport(target, WorkerStats(3, 20, 80, 5), "zmq"))
    return RouterStatus(3, 2, workers, totals, drafters=(drafter,))


class ReportingService(ScriptedService):
    """A scripted service that tells `reading()` of itself."""

    async def status(self, with_worker_stats: bool = False) -> RouterStatus:
        """See ScriptedService."""
        return reading()


def invoke(*arguments: str, **environment: str) -> Any:
    return CliRunner().invoke(cli, arguments, env=environment)


# --- status -------------------------------------------------------------------------------------------------


def test_status_shows_workers_drafters_memory_queue_and_totals(serving: Serving) -> None:
    with serving(ReportingService(says(SOME))) as url:
        result = invoke("status", url)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert "ready, 3 running, 2 waiting" in lines[0]
    (target,) = [line for line in lines if " tiny " in line]
    assert all(each in target for each in ("target", "serving", "zmq", "11 12", "60 of 80", "75%", "5"))
    worker, drafter = [line for line in lines if " fast[1] " in line]
    assert "draft" in worker and "ray" in worker and "13" in worker
    assert all(each in drafter for each in ("benched", "62%", "2.50", "40", "1.25"))
    assert any("acceptance 60%" in line and "round 50.0 ms" in line for line in lines)
    assert any(line.startswith("totals: rounds 10") for line in lines)


@pytest.mark.parametrize("state", ["draining", "silent"])
def test_status_shows_what_is_wrong_with_a_worker(serving: Serving, state: str) -> None:
    class Troubled(ReportingService):
        async def status(self, with_worker_stats: bool = False) -> RouterStatus:
            draft, target = reading().workers
            return replace(reading(), workers=(draft, replace(target, **{state: True})))

    with serving(Troubled(says(SOME))) as url:
        lines = invoke("status", url).stdout.splitlines()
    (target,) = [line for line in lines if " tiny " in line]
    assert state in target and "serving" not in target


def test_status_tells_several_routers_apart(serving: Serving) -> None:
    class Sharded(ReportingService):
        async def status(self, with_worker_stats: bool = False) -> RouterStatus:
            return merged_status(["Router-0", "Router-1"], {"Router-0": reading()})

    with serving(Sharded(says(SOME))) as url:
        lines = invoke("status", url).stdout.splitlines()
    (first,), (second,) = ([line for line in lines if name in line] for name in ("Router-0", "Router-1"))
    assert [cell.strip() for cell in first.split("│")[2:-1]] == ["answers", "3", "2", "1", "1", "10", "0"]
    assert "does not answer" in second


def test_status_tells_of_a_service_without_workers(serving: Serving) -> None:
    with serving(ScriptedService(says(SOME), workers=())) as url:
        result = invoke("status", url)
    assert result.exit_code == 0 and "not ready" in result.stdout and "no worker is registered" in result.stdout


def test_status_uses_the_key_and_says_when_it_is_refused(serving: Serving) -> None:
    limits = replace(LIMITS, access=AccessRules((ApiKey("a", digest_of("key-a")),)))
    with serving(ReportingService(says(SOME)), limits) as url:
        assert invoke("status", url, LEADOUT_API_KEY="key-a").exit_code == 0
        refused = invoke("status", url)
    assert refused.exit_code == 2 and "401" in refused.stderr


def test_status_goes_on_until_it_is_interrupted(serving: Serving) -> None:
    class Interrupting(ReportingService):
        readings = 0

        async def status(self, with_worker_stats: bool = False) -> RouterStatus:
            self.readings += with_worker_stats
            if self.readings == 3:
                os.kill(os.getpid(), signal.SIGINT)
            return reading(replace(TOTALS, rounds=10 + self.readings, wall_ms=500.0 + 70 * self.readings))

    service = Interrupting(says(SOME))
    # Whoever started the tests may have had them ignore Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with serving(service) as url:
            result = invoke("status", url, "--watch", "--every", "0.2")
    finally:
        signal.signal(signal.SIGINT, before)
    assert result.exit_code == 130, result.output
    assert service.readings >= 3 and "round 70.0 ms" in result.stdout


def test_status_of_nothing_is_one_line() -> None:
    result = invoke("status", "http://127.0.0.1:9")
    assert result.exit_code == 2 and "no service answers" in result.stderr and "Traceback" not in result.output


def told(totals: RoundTotals) -> dict[str, Any]:
    return dict(json.loads(json.dumps(asdict(reading(totals)))))


def test_rates_are_those_between_two_readings() -> None:
    before = parse_status(told(TOTALS), True)
    later = replace(
        TOTALS, rounds=14, wall_ms=900.0, verifications=50, draft_tokens=150, accepted_tokens=70, committed_tokens=30
    )
    rates = pace(before, parse_status(told(later), True), 2.0)
    assert (rates.tokens_per_s, rates.acceptance, rates.accepted_length, rates.round_ms) == (15.0, 0.2, 3.0, 100.0)


def test_after_a_restart_of_the_router_rates_begin_anew() -> None:
    before = parse_status(told(TOTALS), True)
    rates = pace(before, parse_status(told(RoundTotals(rounds=1, draft_tokens=4, accepted_tokens=3)), True), 2.0)
    assert rates.acceptance == 0.75
    nothing = pace(before, before, 2.0)
    assert (nothing.tokens_per_s, nothing.acceptance, nothing.accepted_length, nothing.round_ms) == (0.0,) + (None,) * 3


def test_workers_that_do_not_answer_have_no_figures() -> None:
    target, draft = parse_status(told(TOTALS), True).workers
    assert (target.role, target.used_blocks, target.kv_use) == ("target", 60, 0.75)
    assert (draft.used_blocks, draft.kv_use, draft.total_blocks) == (None, None, 40)


# --- complete -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [(), ("--chat",), ("--system", "be brief")])
def test_complete_streams_the_answer_and_says_what_it_took(
    serving: Serving, codec: TextCodec, tmp_path: Path, options: tuple[str, ...]
) -> None:
    service = ScriptedService(says(codec.encode("日本 x").tolist(), 3, FinishReason.STOP))
    with serving(service) as url:
        file = tmp_path / "answer.txt"
        result = invoke("complete", url, "hi", "--max-tokens", "20", "--seed", "7", "--output", str(file), *options)
    assert result.exit_code == 0, result.output
    assert result.stdout == "日本 x\n" and file.read_text() == "日本 x"
    assert "verifications" in result.stderr and "drafter scripted" in result.stderr
    (asked,) = service.requests
    assert (asked.sampling.seed, asked.stop.max_tokens, asked.speculation.enabled) == (7, 20, True)
    prompt = codec.backend.decode(asked.prompt.tolist())
    assert ("user: hi" in prompt) is bool(options) and ("be brief" in prompt) is ("--system" in options)


def test_complete_reads_standard_input_and_may_go_without_drafts(serving: Serving, codec: TextCodec) -> None:
    service = ScriptedService(says(SOME))
    with serving(service) as url:
        arguments = ["complete", url, "-", "--plain", "--max-tokens", "3"]
        result = CliRunner().invoke(cli, arguments, input="from a pipe")
    assert result.exit_code == 0, result.output
    (asked,) = service.requests
    assert codec.backend.decode(asked.prompt.tolist()) == "from a pipe" and not asked.speculation.enabled


def test_an_answer_that_breaks_off_is_no_success(serving: Serving) -> None:
    def script(_: object) -> list[Any]:
        return [TokenChunk(token_ids([70])), GenerationFailed(503, "service_unavailable", "the target is gone")]

    with serving(ScriptedService(script)) as url:
        result = invoke("complete", url, "hi", "--max-tokens", "9")
    assert result.exit_code == 2 and result.stdout.startswith("f") and "the target is gone" in result.stderr


def test_a_refusal_names_its_reason(serving: Serving) -> None:
    with serving(ScriptedService(says(SOME))) as url:
        result = invoke("complete", url, "hi", "--model", "nope")
    assert result.exit_code == 2 and "404" in result.stderr and "'nope'" in result.stderr
