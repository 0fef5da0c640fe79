"""What the pages say about names, files, settings and other backends holds in the code."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tritandem.config import Config, WatchConfig
from tritandem.contracts.errors import Outcome
from tritandem.telemetry.families import FAMILIES
from tritandem.triton_io.request import schema
from tritandem.triton_io.request.sampling_fields import is_sampling_name

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "*/README.md")
    for path in ROOT.glob(pattern)
    if not path.is_relative_to(ROOT / "build")
)
MIGRATION = sorted((DOCS / "migration").glob("*.md"))
of_each_page = pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))


def rows(page: Path) -> Iterator[list[str]]:
    """The cells of every table's rows."""
    for line in page.read_text().splitlines():
        if line.startswith("|") and not line.startswith("|--"):
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


def names(cell: str) -> set[str]:
    """What stands in backquotes and is a whole name; one with a star stands for many."""
    return set(re.findall(r"`(\w+)`", cell))


@of_each_page
def test_every_linked_file_exists(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


@of_each_page
def test_every_make_target_named_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z]+)`", page.read_text())) <= targets


@of_each_page
def test_every_metric_named_exists(page: Path) -> None:
    known = {family.name for family in FAMILIES}
    named = set(re.findall(r"`(tritandem_[a-z_]+_(?:seconds|total|bytes))`", page.read_text()))
    assert named <= known


@of_each_page
def test_every_setting_named_with_its_table_exists(page: Path) -> None:
    tables = {field.name: set(dataclasses.asdict(Config())[field.name]) for field in dataclasses.fields(Config)}
    named = re.findall(rf"`({'|'.join(tables)})\.(\w+)( = \w+)?`", page.read_text())
    files = {"py", "md", "toml"}
    assert [f"{table}.{key}" for table, key, _ in named if key not in tables[table] | files] == []


def test_every_outcome_is_explained() -> None:
    explained = {row[0].strip("`") for row in rows(DOCS / "requests.md")}
    assert {outcome.value for outcome in Outcome} <= explained


def test_every_file_named_in_the_architecture_exists() -> None:
    package = ROOT / "backend_src" / "tritandem"
    rooms = "|".join(sorted(path.name for path in package.iterdir() if path.is_dir()))
    text = (DOCS / "architecture.md").read_text()
    named = re.findall(rf"`((?:{rooms})/[\w/]*(?:\.py)?)`", text)
    assert len(named) > 20
    assert [name for name in named if not (package / name).exists()] == []
    inside = re.findall(r"^\| `(\w+/)` \| (.*`.*) \|$", text.partition("rooms inside")[2].partition("\n\n## ")[0], re.M)
    assert inside
    assert [
        room + name
        for room, cell in inside
        for name in re.findall(r"`(\w+(?:/|\.py))`", cell)
        if not ((package / room / name).exists() or name == "linear/")
    ] == []


def test_the_limits_of_what_hangs_are_the_defaults() -> None:
    said = {row[1].strip("`"): row[2] for row in rows(DOCS / "troubleshooting.md") if len(row) == 3}
    for field in dataclasses.fields(WatchConfig):
        assert said[field.name] == f"{field.default:g} s"


@pytest.mark.parametrize("page", MIGRATION, ids=lambda path: path.name)
def test_what_is_the_same_or_accepted_is_served_and_what_is_refused_is_not(page: Path) -> None:
    refused = schema.by_name((*schema.REFUSED_INPUTS, *schema.FACADE_REFUSED_INPUTS))
    outputs = schema.by_name((*schema.OUTPUTS, *schema.FACADE_OUTPUTS))
    known = {*schema.INPUT_OF_NAME, *outputs, *schema.PARAMETERS} - refused.keys()
    served: set[str] = set()
    for theirs, here, *_ in rows(page):
        given = names(theirs)
        if here.startswith(("same", "accepted")):
            served |= given
            assert [name for name in given if name not in known and not is_sampling_name(name)] == []
        elif here.startswith(("refused", "not there")):
            assert [name for name in given if name in known or is_sampling_name(name)] == []
    assert len(served) > 15
