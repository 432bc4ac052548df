"""docs/metrics.md lists every metric as the catalogue has it, and no other."""

import re
from pathlib import Path

from workers.metrics.catalogue import CATALOGUE, MetricType

TEXT = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text("utf-8")


def rows(columns: int) -> list[list[str]]:
    """The cells of all table rows with so many columns that begin with a metric."""
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in TEXT.splitlines() if line[:1] == "|"]
    return [row for row in cells if len(row) == columns and row[0].startswith("`leadout_")]


def test_every_metric_is_documented_as_it_is_and_no_other() -> None:
    expected = [
        [
            f"`{metric.family}{'_total' if metric.type is MetricType.COUNTER else ''}`",
            metric.type.value,
            metric.unit,
            ", ".join(f"`{label}`" for label in metric.labels) or "none",
            metric.help,
        ]
        for metric in CATALOGUE
    ]
    documented = [row for row in rows(5) if row[1] != "names"]
    assert documented == expected


def test_the_buckets_of_every_histogram_are_documented() -> None:
    documented = {
        name: tuple(float(bound) for bound in bounds.split(", "))
        for names, bounds in rows(2)
        for name in re.findall(r"`(\w+)`", names)
    }
    assert documented == {metric.family: metric.buckets for metric in CATALOGUE if metric.buckets}
