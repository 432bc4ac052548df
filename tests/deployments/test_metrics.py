"""GET /metrics over the whole application in one process: what it tells of requests is what their usage says."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from deployments.text import TextCodec
from tests.deployments.helpers import COMPLETIONS
from tests.in_process import InProcessService, application, load, save_byte_llama, save_drafters
from workers.metrics.catalogue import CATALOGUE
from workers.router.config import RouterConfig

K = 4


class Metrics:
    """One scrape."""

    def __init__(self, client: TestClient) -> None:
        answer = client.get("/metrics")
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/plain")
        self.families = list(text_string_to_metric_families(answer.text))
        self.samples = [sample for family in self.families for sample in family.samples]

    def __getitem__(self, name: str) -> float:
        return self.of(name)

    def of(self, name: str, **labels: str) -> float:
        """The sum over the samples of this name with these labels; there must be some."""
        values = [
            sample.value
            for sample in self.samples
            if sample.name == f"leadout_{name}" and labels.items() <= sample.labels.items()
        ]
        assert values, (name, labels)
        return sum(values)

    def by_position(self, name: str, drafter: str) -> list[float]:
        return [self.of(name, drafter=drafter, position=str(position)) for position in range(K)]


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> tuple[TextCodec, Any, dict[str, Any]]:
    """A target, a drafter with its own weights, and one that is hardly ever right."""
    folder = tmp_path_factory.mktemp("bytes")
    drafters = save_drafters(save_byte_llama(folder), folder)
    engines = {name: load(drafters[name]) for name in ("own", "random")}
    return TextCodec.load(str(folder)), load(folder), engines


@pytest.fixture
def client(pools: tuple[TextCodec, Any, dict[str, Any]]) -> Iterator[TestClient]:
    codec, target, drafters = pools
    service = InProcessService(target, drafters, codec, RouterConfig(max_draft_tokens=K, fallback="prompt_lookup"))
    with TestClient(application(service, codec, K)) as client:
        yield client


def complete(client: TestClient, **options: Any) -> dict[str, Any]:
    """The usage of a greedy completion that no end of text cuts short."""
    body = {"prompt": "The sky", "max_tokens": 13, "temperature": 0, "logit_bias": {"0": -100}, **options}
    answer = client.post(COMPLETIONS, json=body)
    assert answer.status_code == 200, answer.text
    usage: dict[str, Any] = answer.json()["usage"]
    return usage


def test_before_any_request_every_metric_is_there_and_nothing_is_counted(client: TestClient) -> None:
    metrics = Metrics(client)
    assert {family.name for family in metrics.families} == {metric.family for metric in CATALOGUE}
    assert {family.name for family in metrics.families if not family.samples} == set()
    levels = ("kv_blocks", "workers")
    counted = [sample for sample in metrics.samples if not any(level in sample.name for level in levels)]
    assert [sample for sample in counted if sample.value != 0] == []
    assert metrics.of("workers", role="target") == 1
    assert metrics.of("workers", role="draft") == 2


def test_acceptance_is_one_for_the_targets_own_weights_and_hardly_any_for_random_ones(client: TestClient) -> None:
    for drafter in ("own", "random"):
        told = complete(client, speculation={"drafter": drafter})["speculation"]
        metrics = Metrics(client)
        drafts, drafted, accepted = (
            metrics.of(f"spec_decode_num_{what}_total", drafter=drafter)
            for what in ("drafts", "draft_tokens", "accepted_tokens")
        )
        assert (drafted, accepted) == (told["draft_tokens"], told["accepted_tokens"])
        assert metrics.by_position("spec_decode_num_accepted_tokens_per_pos_total", drafter) == [
            *told["accepted_per_position"],
            *[0] * (K - len(told["accepted_per_position"])),
        ]
        assert sum(metrics.by_position("spec_decode_num_draft_tokens_per_pos_total", drafter)) == drafted
        # Every verification gives one token of the target's own besides: no draft, and never counted as one.
        assert metrics.of("spec_decode_accepted_length_sum", drafter=drafter) == accepted + drafts
        assert metrics.of("spec_decode_accepted_length_count", drafter=drafter) == drafts > 0
        assert 0 <= accepted <= drafted
        assert accepted == drafted if drafter == "own" else accepted < 0.3 * drafted
    assert not any(math.isnan(sample.value) for sample in metrics.samples)


def test_totals_are_the_sums_of_the_usage_that_clients_were_told(client: TestClient) -> None:
    usages = [
        complete(client, speculation={"drafter": "own"}),
        complete(client, speculation={"drafter": "random", "max_draft_tokens": 2}, temperature=1, seed=3),
        complete(client, speculation={"enabled": False}),
        complete(client, n=3, temperature=1, seed=5),
        complete(client, stop=["e"], max_tokens=60),
        complete(client, max_tokens=1),
    ]
    refused = client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": -1})
    assert refused.status_code == 400
    metrics = Metrics(client)

    def told(name: str) -> int:
        return sum(usage["speculation"][name] for usage in usages)

    generated = sum(usage["completion_tokens"] for usage in usages)
    assert metrics["generation_tokens_total"] == generated
    assert metrics["verifications_total"] == told("verifications")
    assert metrics["spec_decode_draft_length_count"] == told("verifications")
    assert metrics["spec_decode_num_draft_tokens_total"] == told("draft_tokens")
    assert metrics["spec_decode_num_accepted_tokens_total"] == told("accepted_tokens")
    positions = [usage["speculation"]["accepted_per_position"] for usage in usages]
    assert metrics["spec_decode_num_accepted_tokens_per_pos_total"] == sum(map(sum, positions))
    sequences = len(usages) + 2
    assert metrics.of("requests_total", outcome="length") + metrics.of("requests_total", outcome="stop") == sequences
    assert metrics["requests_total"] == sequences
    assert metrics["request_duration_seconds_count"] == metrics["time_to_first_token_seconds_count"] == sequences
    assert metrics["request_queue_seconds_count"] == sequences
    assert metrics["time_per_output_token_seconds_count"] == sequences - 1
    assert metrics["num_requests_running"] == metrics["num_requests_waiting"] == 0


def test_times_of_rounds_add_up_and_delivery_takes_the_time_between_first_and_last_token(client: TestClient) -> None:
    told = complete(client, max_tokens=20, speculation={"drafter": "own"})
    metrics = Metrics(client)
    parts = ("draft_wait", "verify_queue", "verify", "overhead")
    assert metrics["round_seconds_count"] >= told["speculation"]["verifications"]
    whole = metrics["round_seconds_sum"]
    assert sum(metrics[f"round_{part}_seconds_sum"] for part in parts) == pytest.approx(whole)
    assert metrics.of("draft_seconds_sum", drafter="own") > 0
    after_first = metrics["time_per_output_token_seconds_sum"] * (told["completion_tokens"] - 1)
    assert after_first == pytest.approx(metrics["inter_chunk_seconds_sum"])
    assert (
        0 < after_first + metrics["time_to_first_token_seconds_sum"] <= metrics["request_duration_seconds_sum"] + 1e-6
    )


def test_openmetrics_is_answered_where_it_is_asked_for(client: TestClient) -> None:
    answer = client.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0; q=1"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")
