"""Prometheus's own checker: rules parse, every alert fires when it should, every dashboard query is PromQL."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.debian_program import debian_program
from tests.docker.deployment_files import DOCKER, dashboard_queries, read_yaml, rule_queries

PROMETHEUS = DOCKER / "prometheus"


@pytest.fixture(scope="module")
def promtool() -> Callable[..., None]:
    program = debian_program("promtool")

    def run(*words: str) -> None:
        done = subprocess.run([program, *words], cwd=PROMETHEUS, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr

    return run


def test_the_configuration_and_its_rules_are_valid(promtool: Callable[..., None]) -> None:
    promtool("check", "config", "prometheus.yaml")


def test_alerts_fire_for_what_they_are_about_and_for_nothing_else(promtool: Callable[..., None]) -> None:
    promtool("test", "rules", "alerts.test.yaml")


def test_every_dashboard_query_is_promql(promtool: Callable[..., None], tmp_path: Path) -> None:
    rules = [
        {"record": f"panel_{n}", "expr": query.replace("$__rate_interval", "1m").replace("$instance", ".*")}
        for n, (_, query) in enumerate(dashboard_queries())
    ]
    file = tmp_path / "panels.yaml"  # JSON is YAML
    file.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    promtool("check", "rules", str(file))


def test_every_alert_is_provoked_by_a_unit_test_and_held_back_by_another() -> None:
    alerts = {name for name, _ in rule_queries() if ":" not in name}
    fired: set[str] = set()
    quiet: set[str] = set()
    for case in read_yaml(PROMETHEUS / "alerts.test.yaml")["tests"]:
        for check in case["alert_rule_test"]:
            (fired if check["exp_alerts"] else quiet).add(check["alertname"])
    assert fired == alerts
    assert quiet == alerts


def test_every_alert_says_what_is_wrong_and_what_to_do() -> None:
    for group in read_yaml(PROMETHEUS / "alerts.yaml")["groups"]:
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in {"warning", "critical"}, rule["alert"]
            assert set(rule["annotations"]) == {"summary", "action"}, rule["alert"]
