"""Where the deployment's files lie, and how they are read: YAML with compose's own tags, names inside PromQL."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
CHART = DOCKER / "helm" / "tritandem"
DASHBOARD = DOCKER / "grafana" / "dashboards" / "tritandem.json"
DOCKERFILES = tuple(sorted(DOCKER.glob("Dockerfile*")))
COMPOSE_FILES = tuple(sorted(DOCKER.glob("compose*.yaml")))
METRIC = re.compile(r"\b(?:tritandem|nv)_[a-z0-9_]+\b|\btritandem:[a-z0-9_:]+")


class ComposeLoader(yaml.SafeLoader):
    """`!override` and `!reset` say how files are merged; here each file is read by itself."""


def _untagged(loader: yaml.SafeLoader, tag: str, node: yaml.Node) -> Any:
    if isinstance(node, yaml.SequenceNode):
        return loader.construct_sequence(node, deep=True)
    if isinstance(node, yaml.MappingNode):
        return loader.construct_mapping(node, deep=True)
    raise yaml.constructor.ConstructorError(None, None, f"!{tag} on a plain value", node.start_mark)


ComposeLoader.add_multi_constructor("!", _untagged)


def read_yaml(path: Path) -> Any:
    return yaml.load(path.read_text(), ComposeLoader)


def dashboard_queries() -> Iterator[tuple[str, str]]:
    """(panel title, PromQL)"""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def rule_queries() -> Iterator[tuple[str, str]]:
    """(alert or record, PromQL) of every Prometheus rule."""
    for name in ("rules.yaml", "alerts.yaml"):
        for group in read_yaml(DOCKER / "prometheus" / name)["groups"]:
            for rule in group["rules"]:
                yield rule.get("alert") or rule["record"], rule["expr"]


def adapter_rules() -> list[dict[str, Any]]:
    rules: list[dict[str, Any]] = read_yaml(CHART / "examples" / "prometheus-adapter-values.yaml")["rules"]["custom"]
    return rules


def all_queries() -> Iterator[tuple[str, str]]:
    yield from dashboard_queries()
    yield from rule_queries()
    for rule in adapter_rules():
        yield rule["name"]["as"], rule["seriesQuery"]
        yield rule["name"]["as"], rule["metricsQuery"]
