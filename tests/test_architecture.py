"""The rooms stay apart: tiers are read off the import statements of every module."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tritandem.engine.rows.layout import FIELDS

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "backend_src" / "tritandem"
TIERS = {
    "contracts": 0,
    "config": 0,
    "host": 0,
    "machine": 0,
    "model_facts": 1,
    "grammar": 1,
    "telemetry": 2,
    "placement": 2,
    "tokenizer": 3,
    "scheduler": 3,
    "engine": 3,
    "triton_io": 4,
    "front": 5,
    "models": 5,
    "server": 5,
    "sizing": 5,
    "cli": 6,
}
# Rooms inside rooms, by the same rule. Files that lie in the room itself are its doors, or what all of it shares.
SUB_ROOMS: dict[str, dict[str, int]] = {
    "engine": {
        "step": 0,
        "kernels_ahead": 0,
        "prefetch_kernels": 0,
        "parallel": 1,
        "structure": 1,
        "attention": 1,
        "host": 2,
        "rows": 2,
        "sampling": 3,
        "model": 3,
        "runners": 4,
        "service": 5,
    },
    "triton_io": {"stub_2_51": 0, "request": 1, "answer": 2, "hops": 3, "reports": 3, "plugs": 4},
    "tokenizer": {"files": 0, "chats": 1, "encode": 2, "decode": 2, "text_tokenizer": 3, "load": 4, "__init__": 5},
}
FORBIDDEN_NAMES = {"utils", "common", "helpers", "misc"}


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py"))


def test_the_tables_name_the_rooms_that_there_are() -> None:
    for folder, table in ((PACKAGE, TIERS), *((PACKAGE / name, rooms) for name, rooms in SUB_ROOMS.items())):
        there = {path.relative_to(folder).parts[0].removesuffix(".py") for path in folder.rglob("*.py")}
        assert set(table) - {"__init__"} == there - {"__init__"}


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
    assert own in TIERS, f"{own} has no tier: add it to the table in docs/architecture.md and here"
    for name in imported_names(path):
        parts = name.split(".")
        if parts[0] != "tritandem" or len(parts) == 1 or parts[1] == own or parts[1] == "__version__":
            continue
        other = parts[1]
        assert other in TIERS, f"{name} is in no tier"
        below = TIERS[other] < TIERS[own] or TIERS[other] == TIERS[own] == 0
        assert below, f"{own} (tier {TIERS[own]}) imports {name} (tier {TIERS[other]})"


@pytest.mark.parametrize(
    "path",
    [path for path in modules() if room(path.relative_to(PACKAGE).parts) in SUB_ROOMS],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_rooms_inside_a_room_know_only_those_below_them(path: Path) -> None:
    outer, *inner = path.relative_to(PACKAGE).parts
    tiers, own = SUB_ROOMS[outer], room(tuple(inner))
    if own == "__init__" and not path.read_text().strip():
        return
    assert own in tiers, f"{outer}/{own} has no place in the table"
    for name in imported_names(path):
        parts = name.split(".")
        if parts[:2] != ["tritandem", outer] or len(parts) < 3 or parts[2] == own:
            continue
        assert tiers[parts[2]] < tiers[own], f"{outer}/{own} imports {name}"


@pytest.mark.parametrize(
    "module", ["engine.host.core", "engine.service", "engine.runners.program", "engine.rows.words", "scheduler.service"]
)
def test_who_decides_what_runs_brings_no_torch(module: str) -> None:
    heavy = {"torch", "transformers", "triton"}
    code = f"import sys, tritandem.{module}; print(*{heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


def test_only_the_room_of_rows_writes_rows() -> None:
    """Nothing outside of `engine/rows` assigns into a field of a row."""
    fields = {field.name for field in FIELDS} | {"block_table", "bad_words", "words"}
    written = [
        f"{path.name}:{target.lineno}: {ast.unparse(target)}"
        for path in (PACKAGE / "engine").rglob("*.py")
        if "rows" not in path.parts
        for node in ast.walk(ast.parse(path.read_text()))
        for target in (*getattr(node, "targets", ()), *filter(None, [getattr(node, "target", None)]))
        if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Attribute)
        if target.value.attr in fields and ast.unparse(target.value.value).endswith(("state", "slots"))
    ]
    assert written == []


def test_only_one_room_names_a_version_of_triton() -> None:
    """In code: messages and documentation may say on what a thing was tried."""
    rooms = [path for path in PACKAGE.rglob("*") if path.is_dir() and re.search(r"\d_\d", path.name)]
    assert rooms == [PACKAGE / "triton_io" / "stub_2_51"]
    named = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {word}"
        for path in modules()
        if rooms[0] not in path.parents
        for node in ast.walk(ast.parse(path.read_text()))
        for word in words_of(node)
        if re.search(r"\b2[._]\d\d(_|\b)|_2_\d\d(_|\b)", word)
    ]
    assert named == []


def words_of(node: ast.AST) -> Iterator[str]:
    """The names that a piece of code gives or uses, and the texts of one word, which it could compare."""
    names = (getattr(node, field, None) for field in ("id", "attr", "name", "arg"))
    yield from (name for name in names if isinstance(name, str))
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
        yield node.value


@pytest.mark.parametrize(
    ("library", "rooms"),
    [
        ("triton_python_backend_utils", {"triton_io"}),
        ("torch", {"engine", "cli"}),
        ("transformers", {"engine", "tokenizer", "models"}),
        ("tritonclient", {"server"}),  # one file of it, without grpc
        ("llguidance", {"grammar"}),
        ("locust", set()),
        ("tritandem_loadtest", {"cli"}),
        ("tritandem_bench", set()),
        ("opentelemetry", {"telemetry"}),
        ("uvicorn", {"front"}),
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


DISTRIBUTIONS = ("backend_src", "client", "loadtest", "bench")
REST = ("tests", "tools", "docker", "model_repository")


def programs(folders: tuple[str, ...]) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def test_nothing_is_imported_by_editing_the_path() -> None:
    edits = re.compile(r"sys\.path\b(?!\w)|syspath_" + "prepend")
    assert [
        str(path.relative_to(ROOT)) for path in programs(DISTRIBUTIONS + REST) if edits.search(path.read_text())
    ] == []


def test_no_module_outgrows_a_reader() -> None:
    files = programs(DISTRIBUTIONS)
    long = {str(p.relative_to(ROOT)): n for p in files if (n := len(p.read_text().splitlines())) > 400}
    assert not long, f"split these by concept: {long}"
