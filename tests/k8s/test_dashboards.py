"""Every panel asks for metrics that exist, by labels that they have."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from k8s.dashboards import files
from tests.k8s.monitoring import COMPONENT, RAY_LABELS, RAY_METRICS, labels_in, metrics_in
from workers.metrics.catalogue import CATALOGUE

EXPORTED = {f"ray_{name}": metric for metric in CATALOGUE for name in metric.sample_names}


def panels() -> list[tuple[str, dict[str, Any]]]:
    """Every panel that asks for something, with the name of its dashboard."""
    found = []
    for path in sorted((COMPONENT / "dashboards").glob("*.json")):
        dashboard = json.loads(path.read_text("utf-8"))
        found += [(path.stem, panel) for panel in dashboard["panels"] if panel["type"] != "row"]
    return found


def queries() -> list[tuple[str, str]]:
    """Every query, with a name of its panel."""
    return [
        (f"{dashboard}: {panel['title']}", target["expr"])
        for dashboard, panel in panels()
        for target in panel["targets"]
    ]


def test_the_committed_files_are_those_that_the_script_writes() -> None:
    written = files()
    assert set(written) == set((COMPONENT / "dashboards").glob("*.json"))
    for path, text in written.items():
        assert path.read_text("utf-8") == text, f"run `python k8s/dashboards.py`: {path.name}"


def test_every_file_is_in_a_config_map_of_its_own() -> None:
    kustomization = yaml.safe_load((COMPONENT / "kustomization.yaml").read_text("utf-8"))
    in_maps = [file for entry in kustomization["configMapGenerator"] for file in entry["files"]]
    assert sorted(in_maps) == sorted(f"dashboards/{path.name}" for path in files())
    assert kustomization["kind"] == "Component"
    assert kustomization["generatorOptions"]["labels"] == {"grafana_dashboard": "1"}
    assert all((COMPONENT / resource).exists() for resource in kustomization["resources"])


@pytest.mark.parametrize(("panel", "expression"), queries(), ids=lambda value: value if ": " in value[:40] else "")
def test_every_query_names_metrics_and_labels_that_exist(panel: str, expression: str) -> None:
    named = metrics_in(expression)
    assert named, expression
    assert named <= EXPORTED.keys() | RAY_METRICS
    labels = {label for name in named & EXPORTED.keys() for label in EXPORTED[name].labels}
    assert labels_in(expression) <= labels | RAY_LABELS
    assert expression.count('ray_io_cluster=~"$cluster"') == len(re.findall(r"\bray_(?!io_cluster)\w+", expression))


@pytest.mark.parametrize(("dashboard", "panel"), panels(), ids=lambda value: value if isinstance(value, str) else "")
def test_legends_use_labels_that_are_left_in_the_result(dashboard: str, panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        kept = {label for metric in metrics_in(target["expr"]) & EXPORTED.keys() for label in EXPORTED[metric].labels}
        summed = re.findall(r"\bby \(([^)]*)\)", target["expr"])
        if summed:
            kept = {name.strip() for names in summed for name in names.split(",")}
        assert shown <= kept | {"instance", "IsHeadNode"}, panel["title"]


def test_panels_do_not_overlap_and_fit_the_width() -> None:
    for path in files():
        taken: set[tuple[int, int]] = set()
        for panel in json.loads(path.read_text("utf-8"))["panels"]:
            place = panel["gridPos"]
            cells = {
                (x, y)
                for x in range(place["x"], place["x"] + place["w"])
                for y in range(place["y"], place["y"] + place["h"])
            }
            assert not cells & taken, panel["title"]
            assert all(x < 24 for x, _ in cells)
            taken |= cells


def test_what_the_questions_of_an_operator_are_about_has_a_panel() -> None:
    used = {name for _, expression in queries() for name in metrics_in(expression)}
    for metric in CATALOGUE:
        if metric.name.startswith(("spec_decode", "round_", "time_", "kv_blocks_used", "plain_decode", "ahead")):
            assert used & {f"ray_{name}" for name in metric.sample_names}, metric.name


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool, of Debian's package prometheus, is not installed"
)
def test_prometheus_can_read_every_query(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:query{index}", "expr": expression.replace("$__rate_interval", "5m")}
        for index, (_, expression) in enumerate(queries())
    ]
    path = tmp_path / "queries.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    outcome = subprocess.run(["promtool", "check", "rules", path], capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
