"""Alerts name metrics that exist, and fire when they should."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.k8s.monitoring import RAY_LABELS, RAY_METRICS, labels_in, metrics_in, rule_spec
from tests.k8s.test_dashboards import EXPORTED

UNIT_TESTS = Path(__file__).parent / "alerts_test.yaml"
OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"
RULES: list[dict[str, Any]] = [rule for group in rule_spec()["groups"] for rule in group["rules"]]
ALERTS = [rule for rule in RULES if "alert" in rule]
RECORDED = {rule["record"] for rule in RULES if "record" in rule}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert") or rule["record"])
def test_every_rule_names_metrics_labels_and_bounds_that_exist(rule: dict[str, Any]) -> None:
    named = metrics_in(rule["expr"])
    assert named <= EXPORTED.keys() | RAY_METRICS
    recorded = set(re.findall(r"\bleadout:[\w:]+", rule["expr"]))
    assert recorded <= RECORDED
    assert named or recorded
    labels = {label for name in named & EXPORTED.keys() for label in EXPORTED[name].labels}
    assert labels_in(rule["expr"]) <= labels | RAY_LABELS | ({"objective"} if recorded else set())
    for name, bound in re.findall(r'(\w+)_bucket{le="([^"]+)"}', rule["expr"]):
        assert bound in map(str, EXPORTED[f"{name}_bucket"].buckets)


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_every_alert_says_how_urgent_it_is_and_what_to_do(alert: dict[str, Any]) -> None:
    assert alert["labels"]["severity"] in ("page", "warning")
    assert set(alert["annotations"]) == {"summary", "description"}
    for title in re.findall(r'See "([^"]+)" in docs', alert["annotations"]["description"]):
        assert re.search(rf"^#+ {re.escape(title)}$", OPERATIONS.read_text("utf-8"), re.M), title


def test_a_mismatch_of_an_online_check_pages_without_delay() -> None:
    (alert,) = [alert for alert in ALERTS if "mismatched" in alert["expr"]]
    assert alert["labels"]["severity"] == "page"
    assert "for" not in alert


def test_every_alert_is_shown_firing_and_silent() -> None:
    cases = [
        case for test in yaml.safe_load(UNIT_TESTS.read_text("utf-8"))["tests"] for case in test["alert_rule_test"]
    ]
    names = {alert["alert"] for alert in ALERTS}
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == names
    assert {case["alertname"] for case in cases if not case["exp_alerts"]} == names


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool, of Debian's package prometheus, is not installed"
)
def test_promtool_agrees(tmp_path: Path) -> None:
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(rule_spec()))
    shutil.copy(UNIT_TESTS, tmp_path)
    for command in (["check", "rules", "rules.yml"], ["test", "rules", UNIT_TESTS.name]):
        outcome = subprocess.run(["promtool", *command], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert outcome.returncode == 0, outcome.stdout + outcome.stderr
