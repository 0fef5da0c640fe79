"""Dashboard, alerts and autoscaler ask for metrics that the code publishes, by labels that these have."""

from __future__ import annotations

import importlib.util
import json
import re

import pytest
from tritandem.contracts.errors import Outcome
from tritandem.front.books import NAME as OPENAI_REQUESTS
from tritandem.telemetry.families import FAMILIES, Kind

from tests.docker.deployment_files import (
    DASHBOARD,
    DOCKER,
    METRIC,
    ROOT,
    all_queries,
    dashboard_queries,
    read_yaml,
    rule_queries,
)

# Triton's own, from its documentation; label sets are Triton's.
TRITON_METRICS = {
    "nv_cpu_utilization": (),
    "nv_inference_pending_request_count": ("model", "version"),
    "nv_gpu_utilization": ("gpu_uuid",),
    "nv_gpu_power_usage": ("gpu_uuid",),
    "nv_gpu_power_limit": ("gpu_uuid",),
    "nv_gpu_memory_used_bytes": ("gpu_uuid",),
    "nv_gpu_memory_total_bytes": ("gpu_uuid",),
}
# What Prometheus and Kubernetes add to every series.
TARGET_LABELS = {"instance", "job", "namespace", "pod"}
QUERIES = sorted(set(all_queries()))


def published() -> dict[str, set[str]]:
    """Label names by metric name, as they appear on /metrics."""
    names: dict[str, set[str]] = {name: set(labels) for name, labels in TRITON_METRICS.items()}
    names[OPENAI_REQUESTS] = {"endpoint", "outcome"}
    for family in FAMILIES:
        if family.kind is Kind.HISTOGRAM:
            names[f"{family.name}_bucket"] = {*family.labels, "le"}
            names[f"{family.name}_sum"] = names[f"{family.name}_count"] = set(family.labels)
        else:
            names[family.name] = set(family.labels)
    return names


RECORDED = {name for name, _ in rule_queries() if ":" in name}


@pytest.mark.parametrize(("where", "query"), QUERIES, ids=lambda value: value[:60])
def test_every_metric_that_is_asked_for_exists(where: str, query: str) -> None:
    names = set(METRIC.findall(query))
    assert names or query.startswith("up{"), f"{where}: no metric in {query}"
    assert names <= set(published()) | RECORDED, f"{where}: {names - set(published()) - RECORDED}"


@pytest.mark.parametrize(("where", "query"), QUERIES, ids=lambda value: value[:60])
def test_every_label_that_is_grouped_or_matched_by_exists(where: str, query: str) -> None:
    known = set(TARGET_LABELS)
    for name in METRIC.findall(query):
        known |= published().get(name, set())
    asked = {label.strip() for group in re.findall(r"\b(?:by|on) \(([^)]*)\)", query) for label in group.split(",")}
    for selector in re.findall(r"\{([^}]*)\}", query):
        asked |= set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))
    assert {label for label in asked if "<<" not in label} <= known, f"{where}: {asked - known}"


@pytest.mark.parametrize(("where", "query"), QUERIES, ids=lambda value: value[:60])
def test_outcomes_and_bucket_bounds_in_selectors_exist(where: str, query: str) -> None:
    for outcome in re.findall(r'outcome="([^"]*)"', query):
        assert outcome in {o.value for o in Outcome}, where
    for metric, bound in re.findall(r'(\w+)_bucket\{le="([^"]*)"', query):
        family = next(f for f in FAMILIES if f.name == metric)
        assert float(bound) in family.buckets, f"{where}: {metric} has no bucket {bound}"


def test_every_recorded_ratio_is_used_or_offered_once() -> None:
    names = [name for name, _ in rule_queries()]
    assert len(names) == len(set(names))


def test_the_dashboard_file_is_what_its_table_makes() -> None:
    path = DOCKER / "grafana" / "make_dashboard.py"
    spec = importlib.util.spec_from_file_location("make_dashboard", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert DASHBOARD.read_text() == module.rendered(), f"run: python {path}"


def test_panels_do_not_overlap_and_name_a_provisioned_datasource() -> None:
    [source] = read_yaml(DOCKER / "grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    taken: set[tuple[int, int]] = set()
    panels = json.loads(DASHBOARD.read_text())["panels"]
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, f"{panel['title']} covers another panel"
        taken |= cells
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == source["uid"]
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_every_family_that_the_code_publishes_is_on_the_dashboard() -> None:
    shown = {name for _, query in dashboard_queries() for name in METRIC.findall(query)}
    assert not {f.name for f in FAMILIES if not any(name.startswith(f.name) for name in shown)}
    assert OPENAI_REQUESTS in shown


def test_the_guide_names_only_what_is_published_also_in_its_table_of_vllms_names() -> None:
    guide = (ROOT / "docs" / "observability.md").read_text()
    named = set(re.findall(r"`((?:tritandem|nv)_[a-z_]+)`", guide))
    assert named <= {family.name for family in FAMILIES} | set(TRITON_METRICS)
    rows = dict(re.findall(r"^\| `(vllm:\w+)` \| `(\w+)` \|$", guide, re.MULTILINE))
    assert len(rows) > 10
    assert set(rows.values()) <= {family.name for family in FAMILIES}
