"""The rooms stay apart: tiers are read off the import statements of every module."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "backend_src" / "tritandem"
TIERS = {
    "printable": 0,
    "errors": 0,
    "contracts": 0,
    "config": 0,
    "host": 0,
    "model_facts": 1,
    "telemetry": 1,
    "placement": 1,
    "tokenizer": 2,
    "scheduler": 2,
    "engine": 2,
    "triton_io": 3,
    "models": 4,
    "server": 4,
    "sizing": 4,
    "cli": 5,
}
FORBIDDEN_NAMES = {"utils", "common", "helpers", "misc"}


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py"))


def imported_names(path: Path) -> Iterator[str]:
    """Absolute dotted names of everything that a module imports, at any depth of its code."""
    package = ("tritandem", *path.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level == 0:
                yield node.module or ""
                continue
            base = package[: len(package) - node.level + 1]
            if node.module:
                yield ".".join((*base, node.module))
            else:
                yield from (".".join((*base, alias.name)) for alias in node.names)


def room(parts: tuple[str, ...]) -> str:
    return parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down_and_never_sideways(path: Path) -> None:
    own = room(path.relative_to(PACKAGE).parts)
    if own == "__init__":
        return
    assert own in TIERS, f"{own} has no tier: add it to the table in README and here"
    for name in imported_names(path):
        parts = name.split(".")
        if parts[0] != "tritandem" or len(parts) == 1 or parts[1] == own or parts[1] == "__version__":
            continue
        other = parts[1]
        assert other in TIERS, f"{name} is in no tier"
        below = TIERS[other] < TIERS[own] or TIERS[other] == TIERS[own] == 0
        assert below, f"{own} (tier {TIERS[own]}) imports {name} (tier {TIERS[other]})"


@pytest.mark.parametrize(
    ("library", "rooms"),
    [
        ("triton_python_backend_utils", {"triton_io"}),
        ("torch", {"engine", "cli"}),
        ("transformers", {"engine", "tokenizer", "models"}),
        ("tritonclient", {"cli"}),
        ("locust", set()),
        ("opentelemetry", {"telemetry"}),
    ],
)
def test_each_heavy_library_has_its_rooms(library: str, rooms: set[str]) -> None:
    for path in modules():
        own = room(path.relative_to(PACKAGE).parts)
        if any(name.split(".")[0] == library for name in imported_names(path)):
            assert own in rooms, f"{path.relative_to(PACKAGE)} imports {library}"


def test_the_client_knows_neither_the_server_nor_torch() -> None:
    for path in (ROOT / "client").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            for name in names:
                assert name.split(".")[0] not in {"tritandem", "torch", "transformers"}, f"{path.name} imports {name}"


def test_no_room_has_a_drawer_for_everything() -> None:
    assert not [p for p in modules() if p.stem in FORBIDDEN_NAMES]


def test_the_plugs_stay_plugs() -> None:
    plugs = list((ROOT / "model_repository").glob("*/1/model.py"))
    assert plugs
    for path in plugs:
        assert len(path.read_text().splitlines()) <= 60, f"{path} is more than a plug"


def test_no_module_outgrows_a_reader() -> None:
    long = {str(p.relative_to(ROOT)): n for p in modules() if (n := len(p.read_text().splitlines())) > 400}
    assert not long, f"split these by concept: {long}"
