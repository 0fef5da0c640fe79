"""Every command that the pages give can be given: subcommands, flags, files, make targets and extras exist."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest
from tritandem.cli.main import build_parser
from tritandem.server.command import arguments
from tritandem.server.foreign_flags import known_flags
from tritandem.server.locate import find_install
from tritandem.server.options import ServeOptions

from tests.docker.deployment_files import ROOT

PAGES = (
    *sorted(ROOT.glob("*.md")),
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "benchmarks"),
)
# Those that must give some: were one empty, the pattern would have missed what it gives.
GUIDES = {"README.md", "docs/getting-started.md", "docs/deployment.md", "docs/security.md", "docs/observability.md"}
# tritonserver's, which `tritandem serve` hands on.
TRITONS_FLAGS = {
    "--allow-http",
    "--grpc-max-connection-age",
    "--grpc-restricted-protocol",
    "--grpc-root-cert",
    "--grpc-server-cert",
    "--grpc-server-key",
    "--grpc-use-ssl",
    "--grpc-use-ssl-mutual",
    "--http-restricted-api",
    "--trace-config",
}


def commands(page: Path, program: str) -> list[str]:
    """What follows `program` on the same line, wherever it begins a command in code."""
    code = "\n".join(re.findall(r"```[a-z]*\n(.*?)```", page.read_text(), re.DOTALL))
    code += "\n" + "\n".join(re.findall(r"`([^`\n]+)`", page.read_text()))
    code = re.sub(r"#.*|\\\n", "", code)
    start = r"^(?:\S*/|(?:\w+=\S+ )*|.*&& )"  # by path, behind variables, or behind another command
    return [found.strip() for found in re.findall(rf"{start}{program} ([^\n`&|]*)", code, re.MULTILINE)]


def subparsers() -> dict[str, argparse.ArgumentParser]:
    [found] = [action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(found.choices)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_subcommands_and_flags_exist(page: Path) -> None:
    known = subparsers()
    given = commands(page, "tritandem")
    assert given or page.relative_to(ROOT).as_posix() not in GUIDES
    for words in given:
        name = words.split()[0]
        if name == "--version":
            continue
        assert name in known, f"tritandem {words}"
        flags = {flag for action in known[name]._actions for flag in action.option_strings}
        used = set(re.findall(r"(?<=\s)--[a-z][a-z-]*", words))
        assert used <= flags | (TRITONS_FLAGS if name == "serve" else set()), f"tritandem {words}: {used - flags}"


def test_flags_of_tritons_are_those_of_the_installed_triton() -> None:
    pytest.importorskip("pytriton", reason="nvidia-pytriton is not installed")
    known = known_flags(find_install())
    assert {flag.removeprefix("--") for flag in TRITONS_FLAGS} <= known
    assert {word.partition("=")[0].removeprefix("--") for word in _our_flags()} <= known


def _our_flags() -> list[str]:
    return arguments(ServeOptions(None, Path()), find_install(), Path(), Path(), "prefix", "key")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    given = commands(page, "make")
    assert given or page.name not in ("README.md", "CONTRIBUTING.md", "getting-started.md")
    assert {words.split()[0] for words in given} <= targets


def test_files_of_compose_helm_and_docker_exist() -> None:
    named: list[str] = []
    for page in PAGES:
        named += [file for words in commands(page, "docker compose") for file in re.findall(r"-f (\S+)", words)]
        named += [file for words in commands(page, "docker build") for file in re.findall(r"-f (\S+)", words)]
        for words in commands(page, "helm install"):
            _, chart, *rest = words.split()
            named += [chart, *re.findall(r"--values (\S+)", " ".join(rest))]
    assert len(named) >= 10
    assert [file for file in named if not (ROOT / file).exists()] == []


def test_extras_that_pip_is_asked_for_are_declared() -> None:
    declared = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    asked = {
        extra
        for page in PAGES
        for extras in re.findall(r"(?:'\.|tritandem)\[([\w,]+)\]", page.read_text())
        for extra in extras.split(",")
    }
    assert asked
    assert asked <= declared
