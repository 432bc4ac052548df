"""Writes the Grafana dashboards of `components/monitoring`: `python k8s/dashboards.py`, after any change here.

A panel is a title and its queries; where it stands follows from the order. Queries use the names of Ray's export port.
"""

import json
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "components" / "monitoring" / "dashboards"
CLUSTER = 'ray_io_cluster=~"$cluster"'
WINDOW = "$__rate_interval"
COLUMNS = 24
HEIGHT = 8
QUANTILES = (0.5, 0.95, 0.99)


# --- queries ------------------------------------------------------------------------------------------------


def level(metric: str, *matchers: str) -> str:
    """A metric's samples, of the chosen clusters."""
    return f"{metric}{{{','.join((CLUSTER, *matchers))}}}"


def total(metric: str, by: str = "", *matchers: str) -> str:
    """The sum of a gauge."""
    return f"sum by ({by}) ({level(metric, *matchers)})"


def rate(metric: str, by: str = "", *matchers: str) -> str:
    """By how much a counter grows per second."""
    return f"sum by ({by}) (rate({level(metric, *matchers)}[{WINDOW}]))"


def ratio(part: str, whole: str) -> str:
    """A share, and nothing at all, rather than no number, where there is no whole."""
    return f"{part} / ({whole} > 0)"


def mean(histogram: str, by: str = "") -> str:
    """The mean of what a histogram has observed."""
    return ratio(rate(f"{histogram}_sum", by), rate(f"{histogram}_count", by))


def quantile(share: float, histogram: str, by: str = "") -> str:
    """A quantile of what a histogram has observed."""
    return f"histogram_quantile({share}, {rate(f'{histogram}_bucket', f'{by}, le' if by else 'le')})"


# --- panels -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Query:
    """An expression and how its series are called."""

    expression: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """One panel. `unit` is Grafana's name of it; `stacked` lays the series on top of each other."""

    title: str
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    description: str = ""
    stacked: bool = False


def panel(title: str, expression: str, legend: str = "", **options: Any) -> Panel:
    """A panel with one query."""
    return Panel(title, (Query(expression, legend),), **options)


def quantiles(title: str, histogram: str, **options: Any) -> Panel:
    """A panel with the median and the slowest of a histogram of seconds."""
    queries = tuple(Query(quantile(share, histogram), f"p{share * 100:g}") for share in QUANTILES)
    return Panel(title, queries, unit="s", **options)


def distribution(title: str, histogram: str, **options: Any) -> Panel:
    """A heatmap of a histogram."""
    return panel(title, rate(f"{histogram}_bucket", "le"), "{{le}}", kind="heatmap", **options)


SPEC = "ray_leadout_spec_decode"
FAILED = 'outcome!~"stop|length|cancelled"'
PAIR = "drafter, target"

SERVICE = {
    "Latency": (
        quantiles("Time to first token", "ray_leadout_time_to_first_token_seconds"),
        quantiles("Time per output token", "ray_leadout_time_per_output_token_seconds"),
        quantiles(
            "Between deliveries",
            "ray_leadout_inter_chunk_seconds",
            description="Tokens come in bursts, one per round: the gaps that a reader sees.",
        ),
        quantiles("Request duration", "ray_leadout_request_duration_seconds"),
        quantiles("Wait for a target", "ray_leadout_request_queue_seconds"),
        panel("Sequences waiting", total("ray_leadout_num_requests_waiting"), "waiting"),
    ),
    "Throughput": (
        panel("Tokens generated", rate("ray_leadout_generation_tokens_total", "target"), "{{target}}", unit="cps"),
        panel("Prompt tokens", rate("ray_leadout_prompt_tokens_total"), "prompt tokens", unit="cps"),
        panel("Sequences running", total("ray_leadout_num_requests_running"), "running"),
        panel(
            "Ends by outcome", rate("ray_leadout_requests_total", "outcome"), "{{outcome}}", unit="reqps", stacked=True
        ),
        panel(
            "HTTP requests",
            rate("ray_serve_num_http_requests_total", "method, status_code"),
            "{{method}} {{status_code}}",
            unit="reqps",
            description="Counted by Ray Serve, refused ones included.",
        ),
    ),
    "Errors": (
        panel(
            "Share of sequences that failed",
            ratio(rate("ray_leadout_requests_total", "", FAILED), rate("ray_leadout_requests_total")),
            "failed",
            unit="percentunit",
        ),
        panel("Failures by code", rate("ray_leadout_requests_total", "outcome", FAILED), "{{outcome}}", unit="reqps"),
        panel("Worker failures", rate("ray_leadout_worker_failures_total", "role"), "{{role}}", unit="cps"),
        panel(
            "Online checks",
            rate("ray_leadout_online_check_checked_total"),
            "checked",
            unit="cps",
            description="Finished requests that were decoded again without drafts.",
        ),
        panel(
            "Online check mismatches",
            total("ray_leadout_online_check_mismatched_total"),
            "mismatched",
            kind="stat",
            description="Since the router started. Must be 0.",
        ),
    ),
}

SPECULATION = {
    "Does it pay?": (
        panel(
            "Speed-up over plain decoding",
            ratio(
                rate("ray_leadout_plain_decode_seconds_total", "target"),
                rate("ray_leadout_decode_seconds_total", "target"),
            ),
            "{{target}}",
            description="The time that plain decoding would have taken, by the target's step times, over that taken.",
        ),
        panel(
            "Accepted length",
            f"1 + {ratio(rate(f'{SPEC}_num_accepted_tokens_total', PAIR), rate(f'{SPEC}_num_drafts_total', PAIR))}",
            "{{drafter}} for {{target}}",
            description="Tokens per verification with drafts, the target's own one included.",
        ),
        panel(
            "Acceptance rate",
            ratio(rate(f"{SPEC}_num_accepted_tokens_total", PAIR), rate(f"{SPEC}_num_draft_tokens_total", PAIR)),
            "{{drafter}} for {{target}}",
            unit="percentunit",
        ),
        distribution("Distribution of accepted length", f"{SPEC}_accepted_length"),
        panel(
            "Acceptance by position",
            ratio(
                rate(f"{SPEC}_num_accepted_tokens_per_pos_total", "drafter, position"),
                rate(f"{SPEC}_num_draft_tokens_per_pos_total", "drafter, position"),
            ),
            "{{drafter}} {{position}}",
            unit="percentunit",
            description="Of the drafts at a position, those that were accepted, which takes all before them to be.",
        ),
        panel(
            "Tokens per round and sequence",
            ratio(
                rate("ray_leadout_generation_tokens_total", "target"), rate("ray_leadout_verifications_total", "target")
            ),
            "{{target}}",
        ),
    ),
    "What is drafted": (
        distribution("Chosen draft length", f"{SPEC}_draft_length"),
        panel("Mean draft length", mean(f"{SPEC}_draft_length", "target"), "{{target}}"),
        panel("Drafted tokens", rate(f"{SPEC}_num_draft_tokens_total", "drafter"), "{{drafter}}", unit="cps"),
        panel("Benched drafters", total("ray_leadout_drafter_benched", "drafter"), "{{drafter}}"),
        panel(
            "Verifications without a drafter",
            ratio(rate("ray_leadout_fallback_rounds_total"), rate("ray_leadout_verifications_total")),
            "share",
            unit="percentunit",
        ),
        panel("Looked-up tokens", rate("ray_leadout_looked_up_tokens_total", "target"), "{{target}}", unit="cps"),
    ),
    "Where the time goes": (
        Panel(
            "Shares of a round",
            tuple(
                Query(
                    ratio(rate(f"ray_leadout_round_{part}_seconds_sum"), rate("ray_leadout_round_seconds_sum")), legend
                )
                for part, legend in (
                    ("draft_wait", "wait for drafts"),
                    ("verify", "verification"),
                    ("verify_queue", "wait for the target"),
                    ("overhead", "router"),
                )
            ),
            unit="percentunit",
            stacked=True,
        ),
        panel("Round", mean("ray_leadout_round_seconds", "target"), "{{target}}", unit="s"),
        panel(
            "Exposed wait for drafts",
            mean("ray_leadout_round_draft_wait_seconds", "target"),
            "{{target}}",
            unit="s",
            description="Per round: what drafting ahead did not hide.",
        ),
        panel("Drafting", mean("ray_leadout_draft_seconds", "drafter"), "{{drafter}}", unit="s"),
        panel("Verification", mean("ray_leadout_round_verify_seconds", "target"), "{{target}}", unit="s"),
        panel(
            "Hit rate of drafting ahead",
            ratio(
                rate("ray_leadout_ahead_hits_total", "drafter"),
                f"({rate('ray_leadout_ahead_hits_total', 'drafter')} + "
                f"{rate('ray_leadout_ahead_misses_total', 'drafter')})",
            ),
            "{{drafter}}",
            unit="percentunit",
        ),
        panel("Late drafts", rate("ray_leadout_late_drafts_total"), "late", unit="cps"),
    ),
}

CAPACITY = {
    "KV cache": (
        panel(
            "KV blocks in use",
            f"{level('ray_leadout_kv_blocks_used')} / {level('ray_leadout_kv_blocks_total')}",
            "{{role}} {{name}} {{worker}}",
            unit="percentunit",
        ),
        panel("Sequences per worker", level("ray_leadout_worker_sequences"), "{{role}} {{name}} {{worker}}"),
        panel("Preemptions", rate("ray_leadout_num_preemptions_total"), "preemptions", unit="cps"),
        panel(
            "Prefix cache hit rate",
            ratio(
                rate("ray_leadout_prefix_cache_hits_total", "role, name"),
                rate("ray_leadout_prefix_cache_queries_total", "role, name"),
            ),
            "{{role}} {{name}}",
            unit="percentunit",
        ),
        panel("Cached blocks", total("ray_leadout_kv_blocks_cached", "role, name"), "{{role}} {{name}}"),
    ),
    "Replicas": (
        panel("Workers", total("ray_leadout_workers", "role"), "{{role}}"),
        panel(
            "Running replicas",
            total("ray_serve_deployment_replica_healthy", "deployment"),
            "{{deployment}}",
            description="Counted by Ray Serve.",
        ),
        panel(
            "Wanted replicas",
            f"max by (deployment) ({level('ray_serve_autoscaling_target_replicas')}) or vector(0)",
            "{{deployment}}",
            description="What autoscaling asks for; 0 without a deployment that scales.",
        ),
        panel(
            "Requests in Serve's replicas",
            total("ray_serve_replica_processing_queries", "deployment"),
            "{{deployment}}",
        ),
    ),
    "Nodes": (
        panel(
            "Memory in use",
            f"{level('ray_node_mem_used')} / {level('ray_node_mem_total')}",
            "{{IsHeadNode}} {{instance}}",
            unit="percentunit",
        ),
        panel("CPU", level("ray_node_cpu_utilization"), "{{instance}}", unit="percent"),
    ),
}

DASHBOARDS = {
    "service": ("Leadout: service", SERVICE),
    "speculation": ("Leadout: speculation", SPECULATION),
    "capacity": ("Leadout: capacity", CAPACITY),
}


# --- Grafana's JSON -----------------------------------------------------------------------------------------

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
VARIABLES = [
    {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
    {
        "name": "cluster",
        "label": "Cluster",
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": "label_values(ray_leadout_workers, ray_io_cluster)", "refId": "cluster"},
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
    },
]


def dashboard(name: str, title: str, sections: dict[str, tuple[Panel, ...]]) -> dict[str, Any]:
    """Return a dashboard; the panels of a section fill its rows from left to right."""
    panels: list[dict[str, Any]] = []
    ids, top = count(1), 0
    for heading, members in sections.items():
        place = {"x": 0, "y": top, "w": COLUMNS, "h": 1}
        panels.append({"id": next(ids), "type": "row", "title": heading, "gridPos": place, "panels": []})
        top, left = top + 1, 0
        for member in members:
            if left + member.width > COLUMNS:
                top, left = top + HEIGHT, 0
            place = {"x": left, "y": top, "w": member.width, "h": HEIGHT}
            panels.append({"id": next(ids), "gridPos": place, **_panel(member)})
            left += member.width
        top += HEIGHT
    return {
        "uid": f"leadout-{name}",
        "title": title,
        "tags": ["leadout"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": VARIABLES},
        "panels": panels,
    }


def _panel(panel: Panel) -> dict[str, Any]:
    heatmap = panel.kind == "heatmap"
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": SOURCE,
            "expr": query.expression,
            "legendFormat": query.legend,
            "format": "heatmap" if heatmap else "time_series",
        }
        for index, query in enumerate(panel.queries)
    ]
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.stacked:
        defaults["custom"] = {"stacking": {"mode": "normal"}, "fillOpacity": 30}
    drawn: dict[str, Any] = {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": defaults, "overrides": []},
    }
    if heatmap:
        drawn["options"] = {"calculate": False, "yAxis": {"unit": panel.unit}}
    return drawn


def files() -> dict[Path, str]:
    """Return the text of each dashboard's file."""
    return {
        FOLDER / f"{name}.json": json.dumps(dashboard(name, title, sections), indent=2) + "\n"
        for name, (title, sections) in DASHBOARDS.items()
    }


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path, text in files().items():
        path.write_text(text, "utf-8")
