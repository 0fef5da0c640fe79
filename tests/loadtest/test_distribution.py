"""The load generator stands alone: what it declares is what it imports, and nothing of the server comes along."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points, packages_distributions, requires
from pathlib import Path

import tritandem_loadtest

PACKAGE = Path(tritandem_loadtest.__file__).parent
OF_THE_SERVER = ("tritandem", "torch", "transformers")


def imported() -> Iterator[str]:
    """Top-level names of everything that the package imports from outside of the standard library and itself."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            for name in names:
                top = name.partition(".")[0]
                if top not in sys.stdlib_module_names and top != PACKAGE.name:
                    yield top


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_what_is_declared_is_what_is_imported() -> None:
    of_package = packages_distributions()
    needed = {normal(of_package[name][0]) for name in imported()}
    declared = {normal(re.split(r"[\[<>=!~; ]", line)[0]) for line in requires("tritandem-loadtest") or []}
    assert needed == declared


def test_no_other_distribution_ships_it() -> None:
    assert packages_distributions()[PACKAGE.name] == ["tritandem-loadtest"]


def test_importing_all_of_it_brings_nothing_of_the_server() -> None:
    code = (
        "import locust.env\n"  # it patches the standard library, so it is first
        "import importlib, pkgutil, sys, tritandem_loadtest as t\n"
        "names = [m.name for m in pkgutil.walk_packages(t.__path__, t.__name__ + '.')]\n"
        "assert len(names) > 20\n"
        "for name in names: name.endswith('__main__') or importlib.import_module(name)\n"
        f"print([name for name in {OF_THE_SERVER} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr


def test_its_command_is_the_module() -> None:
    [script] = entry_points(group="console_scripts", name="tritandem-loadtest")
    said = [
        subprocess.run([*words, "--help"], capture_output=True, text=True, timeout=60, check=True).stdout
        for words in ([str(Path(sys.executable).with_name(script.name))], [sys.executable, "-m", PACKAGE.name])
    ]
    assert said[0] == said[1]
    assert said[0].startswith("usage: tritandem-loadtest ")
