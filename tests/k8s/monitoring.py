"""What tests and benchmarks read from the manifests of monitoring."""

import re
from pathlib import Path
from typing import Any

import yaml

COMPONENT = Path(__file__).parents[2] / "k8s" / "components" / "monitoring"
RAY_METRICS = {
    "ray_node_cpu_utilization",
    "ray_node_mem_total",
    "ray_node_mem_used",
    "ray_serve_autoscaling_target_replicas",
    "ray_serve_deployment_replica_healthy",
    "ray_serve_num_http_requests_total",
    "ray_serve_replica_processing_queries",
}
"""Metrics of Ray itself that panels and alerts may use; all were seen on its export port."""
RAY_LABELS = {"IsHeadNode", "deployment", "instance", "le", "method", "ray_io_cluster", "status_code"}
"""Labels that Ray or Prometheus adds."""


def rule_spec() -> dict[str, Any]:
    """Return the spec of the PrometheusRule, which is what Prometheus itself takes as a file of rules."""
    manifest = yaml.safe_load((COMPONENT / "rules.yaml").read_text("utf-8"))
    return dict(manifest["spec"])


def metrics_in(expression: str) -> set[str]:
    """Return the metrics that a query names; recorded series, which have a colon, are not among them."""
    return set(re.findall(r"(?<![\w:])ray_\w+", expression)) - {"ray_io_cluster"}


def labels_in(expression: str) -> set[str]:
    """Return the labels that a query matches or sums by."""
    matched = re.findall(r"[{,](\w+)(?:=|!=|=~|!~)\"", expression)
    summed = [name.strip() for names in re.findall(r"\bby \(([^)]*)\)", expression) for name in names.split(",")]
    return {*matched, *summed} - {""}
