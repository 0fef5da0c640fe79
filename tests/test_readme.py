"""What README says about names must hold in the code."""

from __future__ import annotations

import re
from pathlib import Path

from tritandem.contracts.errors import Outcome
from tritandem.telemetry.families import FAMILIES

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def test_every_outcome_is_named() -> None:
    assert [outcome.value for outcome in Outcome if f"`{outcome.value}`" not in README] == []


def test_every_linked_file_exists() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    assert [link for link in links if not link.startswith("http") and not (ROOT / link).exists()] == []


def test_every_file_named_in_the_tables_exists() -> None:
    package = ROOT / "backend_src" / "tritandem"
    named = re.findall(
        r"`((?:contracts|machine|scheduler|engine|triton_io|telemetry|tokenizer|cli|server|models|sizing)/"
        r"[\w/]*(?:\.py)?)`",
        README,
    )
    assert named
    assert [name for name in named if not (package / name).exists()] == []


def test_every_metric_named_exists() -> None:
    known = {family.name for family in FAMILIES}
    named = set(re.findall(r"`(tritandem_[a-z_]+_(?:seconds|total|bytes))`", README))
    assert named
    assert named <= known


def test_every_make_target_named_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z]+)`", README)) <= targets
