"""What can be chosen about one run of the Triton binary."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ..config import GENERATION_ENV, KV_DTYPE_ENV, QUANTIZATION_ENV
from ..machine.device import DeviceGroup

LOOPBACK = "127.0.0.1"
_WILDCARDS = {"0.0.0.0": LOOPBACK, "::": "::1"}
# Flags that Triton accepts several times; any other one of the user's replaces ours.
REPEATABLE_FLAGS = frozenset({"backend-config", "metrics-config", "trace-config", "host-policy", "cache-config"})


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """One server. `model` is a folder that exists; None serves a repository that needs no model."""

    model: Path | None
    repository: Path
    host: str = LOOPBACK
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    openai_port: int = 0  # 0: the OpenAI API is not served
    engine_config: Path | None = None
    tokenizer_instances: int = 0  # 0: what the repository says
    devices: tuple[
        DeviceGroup, ...
    ] = ()  # an engine on each; none: one engine, on what configuration and repository say
    drain_timeout_s: float = 30.0  # how long running requests may take after a stop was asked for
    log_path: Path | None = None  # None: a new file in the cache folder
    max_log_bytes: int = 64 << 20  # beyond it the log begins anew, and what it held is kept beside it, once
    # "": what the configuration says
    generation_config: str = ""  # none or auto
    quantization: str = ""  # none, fp8 or int4
    kv_dtype: str = ""  # auto, bf16 or fp8_e4m3
    placement: str = ""  # auto, off, or COMPONENT=CPUS words; "": what the configuration says
    extra_flags: tuple[str, ...] = ()  # handed to tritonserver as they are

    @property
    def client_host(self) -> str:
        """Where a client on this machine finds the server."""
        return _WILDCARDS.get(self.host, self.host)

    def url(self, port: int) -> str:
        """`host:port` for clients, IPv6 addresses in brackets."""
        host = self.client_host
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def replaced(self) -> dict[str, str]:
        """Settings that were chosen here, by the variable of `config.REPLACING`."""
        words = {
            GENERATION_ENV: self.generation_config,
            QUANTIZATION_ENV: self.quantization,
            KV_DTYPE_ENV: self.kv_dtype,
        }
        return {variable: word for variable, word in words.items() if word}

    def ports(self) -> dict[str, int]:
        """Port by the name of the flag that sets it."""
        ports = {"--http-port": self.http_port, "--grpc-port": self.grpc_port, "--metrics-port": self.metrics_port}
        return ports | ({"--openai-port": self.openai_port} if self.openai_port else {})


def flag_names(flags: tuple[str, ...]) -> set[str]:
    """Names, without dashes and values, of the flags in a list of command-line words."""
    return {match[1] for word in flags if (match := re.match(r"--([a-z0-9][a-z0-9-]*)", word))}
