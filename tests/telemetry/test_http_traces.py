"""Traces from the HTTP request to the workers' steps, in one process with real models; and their times (B54)."""

import asyncio
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from deployments.http_app import create_app
from deployments.text import TextCodec
from tests.deployments.helpers import CHAT, COMPLETIONS, LIMITS
from tests.fakes import ScriptedService, in_blocks
from tests.fakes.tracing import ROUND, Shown, Traced, assert_complete, assert_tiled, in_trace, named
from tests.in_process import InProcessService, application, load, save_byte_llama, save_drafters
from tests.limits import HANG_S
from workers.engine.engine import Engine
from workers.messages import FinishReason, GenerationFailed, GenerationRequest
from workers.router.config import RouterConfig

K = 4
TRACES = ["0af7651916cd43dd8448eb211c80319c", "4bf92f3577b34da6a3ce929d0e0e4736"]
PARENT = "b7ad6b7169203331"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, Engine, TextCodec]:
    """A target, a drafter that is often right, and their tokenizer."""
    folder = tmp_path_factory.mktemp("bytes")
    noisy = save_drafters(save_byte_llama(folder), folder)["noisy"]
    return load(folder), load(noisy), TextCodec.load(str(folder))


async def post(
    app: Any, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> httpx.Response:
    """The application's answer."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=HANG_S) as client:
        return await client.post(path, json=dict(body), headers=dict(headers or {}))


def parent_of(trace_id: str) -> dict[str, str]:
    return {"traceparent": f"00-{trace_id}-{PARENT}-01"}


def test_two_requests_at_once_become_two_complete_traces_with_links_and_plausible_times(
    models: tuple[Engine, Engine, TextCodec],
) -> None:
    watch, (target, drafter, codec) = Traced(), models
    body = {"max_tokens": 20, "temperature": 0.8, "seed": 5}

    async def ask() -> list[dict[str, Any]]:
        service = InProcessService(target, {"noisy": drafter}, codec, RouterConfig(max_draft_tokens=K), watch.tracing)
        app = application(service, codec, K)
        chat = {**body, "messages": [{"role": "user", "content": "The sky"}]}
        answers = await asyncio.gather(
            post(app, COMPLETIONS, {**body, "prompt": "The sky is"}, parent_of(TRACES[0])),
            post(app, CHAT, {**chat, "stream": True, "stream_options": {"include_usage": True}}, parent_of(TRACES[1])),
        )
        assert [answer.status_code for answer in answers] == [200, 200]
        await service.router.close()
        return [answers[0].json()]

    (answer,) = asyncio.run(ask())
    spans = watch.spans
    assert {span.trace_id for span in spans} == set(TRACES)
    for trace_id, name in zip(TRACES, ("text_completion tiny", "chat tiny"), strict=True):
        mine = in_trace(spans, trace_id)
        assert_complete(spans, trace_id, PARENT)
        assert_tiled(spans, trace_id, least_share=0.0)
        assert_times_add_up(mine)
        (request,) = named(mine, name)
        assert named(mine, "sequence")[0].parent_id == request.span_id
        assert request.attributes["gen_ai.usage.output_tokens"] == 20
        assert request.attributes["gen_ai.response.finish_reasons"] == ("length",)
    (request,) = named(spans, "text_completion tiny")
    told = {key: value for key, value in request.attributes.items() if key.startswith("gen_ai.")}
    assert (
        told.items()
        >= {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "leadout",
            "gen_ai.request.model": "tiny",
            "gen_ai.request.max_tokens": 20,
            "gen_ai.request.temperature": 0.8,
            "gen_ai.request.seed": 5,
            "gen_ai.request.stream": False,
            "gen_ai.response.id": answer["id"],
            "gen_ai.response.model": "tiny",
            "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
        }.items()
    )
    shared = [span for span in named(spans, "verify.step") if span.links]
    assert shared and {link[0] for span in shared for link in span.links} == set(TRACES)
    for span in named(spans, "verify.step", "draft.step"):
        assert float(str(span.attributes["leadout.step.compute_ms"])) > 0


def assert_times_add_up(mine: list[Shown]) -> None:
    """Prefill and decoding make up the time, rounds behind the prompt the decoding, and each round counts as one."""
    (sequence,), (prefill,), (queue,) = named(mine, "sequence"), named(mine, "prefill"), named(mine, "queue")
    told = {name: float(str(sequence.attributes[f"leadout.{name}_ms"])) for name in ("queue", "prefill", "decode")}
    assert all(value >= 0 for value in told.values())
    assert sum(told.values()) == pytest.approx(sequence.duration / 1e6, abs=0.01)
    assert told["prefill"] == pytest.approx(prefill.duration / 1e6, abs=0.01)
    assert told["queue"] == pytest.approx(queue.duration / 1e6, abs=0.01)
    rounds = [span for span in named(mine, *ROUND) if span.parent_id == sequence.span_id]
    assert sum(span.duration for span in rounds) / 1e6 <= told["decode"] + 0.01
    # A round commits several tokens; a span of a round never stands for one of them.
    commits = named(mine, "commit")
    assert len(named(mine, "verify")) >= len(commits) == sequence.attributes["leadout.verifications"]
    assert len(commits) < int(str(sequence.attributes["gen_ai.usage.output_tokens"]))


def test_without_a_client_that_traces_the_share_decides_and_the_answer_is_the_same(
    models: tuple[Engine, Engine, TextCodec],
) -> None:
    target, drafter, codec = models
    texts = []
    for ratio in (0.0, 1.0):
        watch = Traced(ratio=ratio)
        service = InProcessService(target, {"noisy": drafter}, codec, RouterConfig(max_draft_tokens=K), watch.tracing)
        body = {"prompt": "The sky", "max_tokens": 12, "temperature": 0, "n": 2}
        answer = asyncio.run(post(application(service, codec, K), COMPLETIONS, body)).json()
        texts.append([choice["text"] for choice in answer["choices"]])
        assert (len(watch.spans) > 0) == bool(ratio)
        if ratio:
            (request,) = named(watch.spans, "text_completion tiny")
            assert request.parent_id is None
            assert {span.parent_id for span in named(watch.spans, "sequence")} == {request.span_id}
            assert len(named(watch.spans, "sequence")) == 2
    assert texts[0] == texts[1]


def scripted(watch: Traced, failure: GenerationFailed | None, codec: TextCodec) -> Any:
    """The application over a service that fails behind its first tokens."""

    def script(request: GenerationRequest) -> list[Any]:
        blocks: list[Any] = list(in_blocks([65, 66, 67, 68], 2, FinishReason.LENGTH))
        return blocks if failure is None else [blocks[0], failure]

    return create_app(ScriptedService(script), codec, LIMITS, tracing=watch.tracing)


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_fails_says_so_even_when_its_stream_had_begun(
    models: tuple[Engine, Engine, TextCodec], stream: bool
) -> None:
    watch = Traced()
    app = scripted(watch, GenerationFailed(503, "service_unavailable", "gone"), models[2])
    asyncio.run(post(app, COMPLETIONS, {"prompt": "x", "stream": stream}))
    (span,) = watch.spans
    assert span.failed
    assert span.attributes["error.type"] in ("service_unavailable", "503")
    assert span.attributes["http.response.status_code"] == (200 if stream else 503)


def test_a_clients_mistake_is_no_failure_and_other_paths_make_no_spans(
    models: tuple[Engine, Engine, TextCodec],
) -> None:
    watch = Traced()
    app = scripted(watch, None, models[2])
    asyncio.run(post(app, COMPLETIONS, {"prompt": "x", "temperature": -1}))
    asyncio.run(post(app, "/tokenize", {"prompt": "x"}))
    (span,) = watch.spans
    assert (span.name, span.failed, span.attributes["error.type"]) == ("text_completion", False, "400")


def test_inside_a_span_of_serve_the_request_is_its_child_whatever_the_header_says(
    models: tuple[Engine, Engine, TextCodec], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Traced()
    # As Serve does. FastAPI has spans of its own, which must not come between.
    monkeypatch.setattr("opentelemetry.trace.get_tracer_provider", lambda: watch.provider)
    app = scripted(watch, None, models[2])
    tracer = watch.tracing.tracer
    assert tracer is not None
    with tracer.start_as_current_span("replica_handle_request"):
        asyncio.run(post(app, COMPLETIONS, {"prompt": "x", "max_tokens": 4}, parent_of(TRACES[0])))
    (replica,), (request,) = (named(watch.spans, name) for name in ("replica_handle_request", "text_completion tiny"))
    assert request.parent_id == replica.span_id
    assert len(watch.spans) == 2
