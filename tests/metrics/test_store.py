"""Counting, and how counts look when they are exported."""

import math

import pytest
from prometheus_client.parser import text_string_to_metric_families

from deployments.metrics_endpoint import exposition
from workers.messages import MetricsSnapshot
from workers.metrics.catalogue import CATALOGUE
from workers.metrics.gauges import GaugeExport
from workers.metrics.store import MetricStore

PAIR = ("tiny", 'a "quoted"\\name\nwith a break')
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def filled() -> MetricStore:
    store = MetricStore()
    store.add("spec_decode_num_drafts", PAIR, 3)
    store.declare("generation_tokens", ("tiny-code",))
    for value in (1, 1.5, 2, 33, 34):
        store.observe("spec_decode_accepted_length", value, PAIR)
    return store


def exported(store: MetricStore) -> Samples:
    text, _ = exposition(MetricsSnapshot(tuple(store.series())))
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_observations_are_counted_in_the_bucket_whose_bound_they_do_not_exceed() -> None:
    read = exported(filled())
    labels = {("drafter", PAIR[0]), ("target", PAIR[1])}

    def up_to(bound: str) -> float:
        return read[("leadout_spec_decode_accepted_length_bucket", frozenset({*labels, ("le", bound)}))]

    assert [up_to(bound) for bound in ("1.0", "2.0", "25.0", "33.0", "+Inf")] == [1, 3, 3, 4, 5]
    assert read[("leadout_spec_decode_accepted_length_count", frozenset(labels))] == 5
    assert read[("leadout_spec_decode_accepted_length_sum", frozenset(labels))] == 71.5


def test_labels_survive_the_text_and_what_is_declared_stands_at_zero() -> None:
    read = exported(filled())
    assert read[("leadout_spec_decode_num_drafts_total", frozenset(zip(("drafter", "target"), PAIR, strict=True)))] == 3
    assert read[("leadout_generation_tokens_total", frozenset({("target", "tiny-code")}))] == 0


def test_a_client_that_accepts_openmetrics_gets_it() -> None:
    text, content_type = exposition(MetricsSnapshot(()), "application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert text.endswith(b"# EOF\n")


def test_gauges_say_the_same_as_the_text() -> None:
    gauges: Samples = {}

    class Gauge:
        def __init__(self, name: str, help: str, label_names: tuple[str, ...]) -> None:
            self.name, self.label_names = name, label_names
            assert help

        def set(self, value: float, tags: dict[str, str]) -> None:
            assert tuple(tags) == self.label_names
            gauges[(self.name, frozenset(tags.items()))] = value

    store = filled()
    export = GaugeExport(Gauge)
    export.publish(MetricsSnapshot(tuple(store.series())))
    assert gauges == exported(store)
    store.add("spec_decode_num_drafts", PAIR)
    export.publish(MetricsSnapshot(tuple(store.series())))
    assert gauges == exported(store)


def test_what_the_catalogue_does_not_list_cannot_be_counted() -> None:
    store = MetricStore()
    with pytest.raises(KeyError):
        store.add("spec_decode_num_drats")
    with pytest.raises(ValueError, match="drafter"):
        store.add("spec_decode_num_drafts", ("tiny",))


def test_every_metric_is_listed_once_with_a_help_text_and_growing_buckets() -> None:
    names = [name for metric in CATALOGUE for name in metric.sample_names]
    assert len(names) == len(set(names))
    for metric in CATALOGUE:
        assert metric.help.endswith("."), metric.name
        assert list(metric.buckets) == sorted(set(metric.buckets)), metric.name
        assert bool(metric.buckets) == (metric.type == "histogram"), metric.name
        assert all(math.isfinite(bound) for bound in metric.buckets), metric.name
