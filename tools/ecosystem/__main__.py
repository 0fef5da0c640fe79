"""Other people's programs against a live server of this tree: `make ecosystem`. Writes the table of docs/ecosystem.md.

Each program is installed from its registry into `.ecosystem/`, in an environment of its own, and called as its own
documentation says; what it prints last is its result. Needs the network, so no test runs it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
import venv
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path

from google.protobuf import descriptor_pb2
from tritandem.models.catalog import DEFAULT_MODEL
from tritandem.models.fetch import fetch
from tritandem.server import TritonServer
from tritandem.server.front_workers import FrontOptions, FrontWorkers
from tritonclient.grpc import model_config_pb2, service_pb2

from tools.ecosystem.every import EVERY, Program
from tools.pages import generated

ROOT = Path(__file__).resolve().parents[2]
PLACE = ROOT / ".ecosystem"
PAGE = ROOT / "docs" / "ecosystem.md"
PROTOCOL = PLACE / "triton.protoset"
TIMEOUT_S = 240
MAX_WORDS_CHARS = 160
HEADS = ("program", "version", "calls", "run on", "result", "the last that it wrote")


def install(program: Program) -> tuple[Path, str]:
    """Where it is; the version. Raises CalledProcessError."""
    place = PLACE / "".join(char if char.isalnum() else "-" for char in program.packages[0].partition("[")[0])
    place.mkdir(parents=True, exist_ok=True)
    if program.npm:
        subprocess.run(["npm", "install", "--silent", "--no-audit", *program.packages], cwd=place, check=True)
        package = place / "node_modules" / program.packages[0] / "package.json"
        return place, str(json.loads(package.read_text())["version"])
    if not (place / "bin" / "pip").exists():
        venv.create(place, with_pip=True)
    pip = [place / "bin" / "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "-qq", *program.packages], check=True)
    shown = subprocess.run([*pip, "show", program.packages[0].partition("[")[0]], capture_output=True, text=True)
    return place, next(line.split()[1] for line in shown.stdout.splitlines() if line.startswith("Version:"))


def run(program: Program, place: Path, environment: dict[str, str]) -> tuple[bool, str]:
    """Whether it ended well; the last line that it wrote."""
    try:
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", program.command], cwd=place, env=os.environ | environment, text=True,
            timeout=TIMEOUT_S, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return False, f"no end within {TIMEOUT_S} s"
    lines = [" ".join(line.split()) for line in done.stdout.splitlines() if line.strip()]
    return done.returncode == 0 and bool(lines), (lines[-1] if lines else f"exit code {done.returncode}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def write_protocol() -> None:
    """Triton's gRPC protocol, for clients that compile it themselves."""
    files = descriptor_pb2.FileDescriptorSet()
    for module in (model_config_pb2, service_pb2):
        module.DESCRIPTOR.CopyToProto(files.file.add())
    PLACE.mkdir(exist_ok=True)
    PROTOCOL.write_bytes(files.SerializeToString())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.ecosystem", description=__doc__)
    parser.add_argument("--only", default="", help="programs whose name holds one of these, by commas; other rows stay")
    only = parser.parse_args().only
    write_protocol()
    chosen = [one for one in EVERY if any(word.lower() in one.name.lower() for word in only.split(","))]
    rows, failed, day = {}, 0, datetime.now(timezone.utc).date().isoformat()
    model = fetch(DEFAULT_MODEL, print)
    installed = []
    for program in chosen:
        if program.npm and shutil.which("npm") is None:
            print(f"{program.name}: no npm here, left out")
            continue
        try:
            installed.append((program, *install(program)))
        except (subprocess.CalledProcessError, OSError) as error:
            print(f"{program.name}: could not be installed ({error}), left out")
    with TritonServer(model) as server:
        port = free_port()
        options = dataclasses.replace(server.options, openai_port=port)
        front = FrontWorkers(FrontOptions((DEFAULT_MODEL,), workers=1, tool_parser="hermes"), print)
        front.start(options, PLACE / "front.log", server.cpus)
        try:
            addresses = {"HTTP": server.http_url, "GRPC": server.grpc_url, "OPENAI": front.options.base_url(options)}
            files = {"MODEL": DEFAULT_MODEL, "MODEL_FOLDER": str(model), "PROTOCOL": str(PROTOCOL)}
            for program, place, version in installed:
                served, words = run(program, place, addresses | files)
                failed += not served
                print(f"{program.name} {version}: {'served' if served else 'FAILED'}: {words}", flush=True)
                result = "served" if served else "**failed**"
                said = f"`{words[:MAX_WORDS_CHARS]}`"
                rows[program.name] = (program.name, version, program.calls, day, result, said)
        finally:
            front.kill()
    write_page(rows)
    return 1 if failed else 0


def write_page(rows: Mapping[str, tuple[str, ...]]) -> None:
    """With these rows; what was not run keeps the row that it has."""
    page = PAGE.read_text()
    before = {line.split(" | ")[0].removeprefix("| "): line for line in page.splitlines() if line.startswith("| ")}
    head, line, *made = generated.table(HEADS, rows.values()).splitlines()
    new = dict(zip(rows, made, strict=True))
    lines = [new.get(one.name) or before.get(one.name) for one in EVERY]
    PAGE.write_text(generated.filled(page, {"ecosystem": "\n".join([head, line, *filter(None, lines)])}))


if __name__ == "__main__":
    sys.exit(main())
