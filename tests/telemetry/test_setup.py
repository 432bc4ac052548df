"""The SDK in a process: what the configuration and OTEL_* variables ask for, and a collector that is away."""

import json
import logging
from pathlib import Path

import pytest

from deployments.config import parse_config
from tests.fakes.tracing import OF_SERVE, Traced, named
from tests.limits import wait_until
from workers.errors import ConfigurationError
from workers.messages import VerifyItem, VerifyRequest, VerifyResponse, token_ids
from workers.telemetry.config import TelemetryConfig
from workers.telemetry.setup import exporter_name, set_up_tracing
from workers.telemetry.steps import MOST_LINKS, StepSpans
from workers.telemetry.tracing import NO_TRACING

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged, but for what asyncio says at any time of loops that other tests have left behind."""
    return [record.getMessage() for record in caplog.records if record.name != "asyncio"]


@pytest.mark.parametrize(
    ("section", "environment", "expected"),
    [
        ({}, {}, None),
        ({}, {ENDPOINT: "http://collector:4317"}, "otlp-grpc"),
        ({}, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector:4317"}, "otlp-grpc"),
        ({}, {ENDPOINT: "http://c:4318", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, "otlp-http"),
        ({}, {ENDPOINT: "http://c:4318", "OTEL_TRACES_EXPORTER": "none"}, None),
        ({}, {"OTEL_TRACES_EXPORTER": "console"}, "console"),
        ({"endpoint": "http://c:4317"}, {}, "otlp-grpc"),
        ({"enabled": True}, {}, "otlp-grpc"),
        ({"exporter": "file", "directory": "d"}, {ENDPOINT: "http://c:4317"}, "file"),
        ({"exporter": "otlp-http"}, {"OTEL_TRACES_EXPORTER": "none"}, "otlp-http"),
    ],
)
def test_the_configuration_decides_and_the_variables_fill_in(
    section: dict[str, object], environment: dict[str, str], expected: str | None
) -> None:
    config = parse_config({"target": {"model": "m"}, "telemetry": section}).telemetry.worker_config()
    assert exporter_name(config, environment) == expected


@pytest.mark.parametrize(
    "environment", [{"OTEL_TRACES_EXPORTER": "zipkin"}, {ENDPOINT: "x", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}]
)
def test_a_variable_that_asks_for_what_there_is_not_is_refused_by_name(environment: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match=list(environment)[-1]):
        set_up_tracing(TelemetryConfig(), "router", environment=environment)


@pytest.mark.parametrize(
    ("config", "environment"),
    [
        (TelemetryConfig(), {}),
        (TelemetryConfig(enabled=False), {ENDPOINT: "http://collector:4317"}),
        (TelemetryConfig(enabled=True), {"OTEL_SDK_DISABLED": "true"}),
    ],
)
def test_what_is_off_sets_nothing_up(config: TelemetryConfig, environment: dict[str, str]) -> None:
    assert set_up_tracing(config, "router", environment=environment) is NO_TRACING


def test_the_file_exporter_writes_a_line_per_span_that_names_the_process(tmp_path: Path) -> None:
    config = TelemetryConfig(exporter="file", directory=str(tmp_path / "traces"), service_name="shop")
    tracing = set_up_tracing(config, "draft", "draft-7", environment={})
    assert tracing.tracer is not None
    tracing.tracer.start_span("one").end()
    tracing.tracer.start_span("two").end()
    tracing.flush()
    (file,) = (tmp_path / "traces").iterdir()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert sorted(line["name"] for line in lines) == ["one", "two"]
    resource = lines[0]["resource"]["attributes"]
    told = [resource[f"service.{name}"] for name in ("name", "namespace", "instance.id")]
    assert told == ["shop-draft", "shop", "draft-7"]


def test_a_share_of_no_traces_keeps_none_of_its_own(tmp_path: Path) -> None:
    config = TelemetryConfig(exporter="file", directory=str(tmp_path), sample_ratio=0.0)
    tracing = set_up_tracing(config, "router", environment={})
    assert tracing.tracer is not None
    assert not tracing.tracer.start_span("one").is_recording()


def test_where_serve_traces_by_itself_spans_go_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    serves = Traced()
    monkeypatch.setattr("opentelemetry.trace.get_tracer_provider", lambda: serves.provider)
    tracing = set_up_tracing(TelemetryConfig(max_spans=77), "router", environment={ENDPOINT: "http://127.0.0.1:9"})
    assert tracing.tracer is not None
    tracing.tracer.start_span("ours").end()
    assert [span.name for span in serves.spans] == ["ours"]
    assert tracing.max_spans == 77


def test_a_worker_uses_the_exporter_of_serve_unless_it_has_one_of_its_own(tmp_path: Path) -> None:
    environment = {"RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH": "tests.fakes.tracing:serve_processors"}
    own = TelemetryConfig(exporter="file", directory=str(tmp_path))
    for config in (TelemetryConfig(), own):
        tracing = set_up_tracing(config, "target", environment=environment)
        assert tracing.tracer is not None
        tracing.tracer.start_span("step").end()
        tracing.flush()
    assert [span.name for span in OF_SERVE.get_finished_spans()] == ["step"]
    assert len(list(tmp_path.iterdir())) == 1


def test_an_exporter_of_serve_that_a_worker_cannot_use_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    environment = {"RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH": "nowhere:at_all"}
    assert set_up_tracing(TelemetryConfig(), "target", environment=environment) is NO_TRACING
    assert ["nowhere:at_all" in line for line in lines_of(caplog)] == [True]


@pytest.mark.parametrize("exporter", ["otlp-grpc", "otlp-http"])
def test_a_collector_that_is_away_costs_one_line_and_no_time(
    exporter: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Retries would take the SDK ten seconds.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1")
    config = TelemetryConfig(exporter=exporter, endpoint="http://127.0.0.1:9")  # type: ignore[arg-type]
    tracing = set_up_tracing(config, "router", environment={})
    assert tracing.tracer is not None
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            tracing.tracer.start_span("lost").end()
            tracing.flush()
        wait_until(lambda: bool(lines_of(caplog)))
    (line,) = lines_of(caplog)
    assert "cannot export" in line


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"exporter": "jaeger"}, "telemetry.exporter"),
        ({"endpoint": "collector:4317"}, "telemetry.endpoint"),
        ({"sample_ratio": 1.5}, "telemetry.sample_ratio"),
        ({"max_spans": 0}, "telemetry.max_spans"),
        ({"exporter": "console", "endpoint": "http://c"}, "telemetry: .*endpoint"),
        ({"exporter": "file"}, "telemetry: .*directory"),
        ({"directory": "d"}, "telemetry: .*directory"),
        ({"sampling": 0.5}, "telemetry.sampling"),
    ],
)
def test_an_impossible_telemetry_section_is_refused_by_the_keys_name(section: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigurationError, match=key):
        parse_config({"target": {"model": "m"}, "telemetry": section})


@pytest.mark.parametrize(
    ("section", "key"),
    [({"format": "xml"}, "request_log.format"), ({"text": "yes"}, "request_log.text"), ({"to": "x"}, "request_log.to")],
)
def test_an_impossible_request_log_section_is_refused_by_the_keys_name(section: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigurationError, match=key):
        parse_config({"target": {"model": "m"}, "request_log": section})


def step(sampled: int, others: int = 1) -> VerifyRequest:
    """A step of so many sampled requests and others."""
    parents = [f"00-{number + 1:032x}-{number + 1:016x}-01" for number in range(sampled)] + [None] * others
    return VerifyRequest(
        tuple(VerifyItem(number, 0, 0, token_ids([1]), trace_parent=parent) for number, parent in enumerate(parents))
    )


def test_a_step_links_no_more_requests_than_allowed_and_says_how_many_share_it() -> None:
    watch = Traced()
    spans = StepSpans(watch.tracing, "target-0")
    spans.around(step(sampled=MOST_LINKS + 5), lambda: VerifyResponse((), 1.0, 22))
    assert len(watch.spans) == MOST_LINKS + 5
    for span in watch.spans:
        assert len(span.links) == MOST_LINKS
        assert (span.trace_id, span.parent_id) not in span.links
        assert span.attributes["leadout.step.sequences"] == MOST_LINKS + 6


def test_a_step_that_fails_is_a_failed_span_and_raises_all_the_same() -> None:
    watch = Traced()

    def fails() -> VerifyResponse:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        StepSpans(watch.tracing, "target-0").around(step(sampled=1), fails)
    (span,) = named(watch.spans, "verify.step")
    assert span.failed and span.attributes["error.type"] == "RuntimeError"
