"""Both ports of a real service tell the same numbers, and these are what the clients were told."""

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.harness import Service, ray_metrics_address
from tests.end_to_end.requests import SEEDED, ask_all, body
from tests.limits import HANG_S, wait_until
from workers.metrics.catalogue import CATALOGUE

LABELS = {"le", *(label for metric in CATALOGUE for label in metric.labels)}
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(url: str, prefix: str) -> Samples:
    """All samples of the catalogue's metrics, without the labels that an exporter adds."""
    text = httpx.get(url, timeout=HANG_S).raise_for_status().text
    return {
        (sample.name.removeprefix(prefix), frozenset(pair for pair in sample.labels.items() if pair[0] in LABELS)): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith(f"{prefix}leadout_")
    }


def total(samples: Samples, name: str) -> float:
    return sum(value for (sample, _), value in samples.items() if sample == name)


def test_both_ports_tell_what_clients_were_told(service: Service, prompts: list[str]) -> None:
    url = f"{service.url}/metrics"
    before = scrape(url, "")
    usages = [answer["usage"] for answer in ask_all(service, [body(prompt, SEEDED) for prompt in prompts[:8]])]
    after = scrape(url, "")
    told = {
        "leadout_generation_tokens_total": sum(usage["completion_tokens"] for usage in usages),
        "leadout_prompt_tokens_total": sum(usage["prompt_tokens"] for usage in usages),
        "leadout_requests_total": len(usages),
        "leadout_spec_decode_num_draft_tokens_total": sum(usage["speculation"]["draft_tokens"] for usage in usages),
        "leadout_spec_decode_num_accepted_tokens_total": sum(
            usage["speculation"]["accepted_tokens"] for usage in usages
        ),
    }
    assert {name: total(after, name) - total(before, name) for name in told} == told
    assert told["leadout_spec_decode_num_accepted_tokens_total"] > 0
    # Ray is told every 5 s and exports every 10 s; nothing else happens meanwhile.
    wait_until(lambda: scrape(f"http://{ray_metrics_address(service)}/metrics", "ray_") == scrape(url, ""))
