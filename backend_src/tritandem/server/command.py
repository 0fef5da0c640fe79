"""The command line and environment of tritonserver, as pure functions of the options."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from ..config import CONFIG_ENV, MODEL_ENV, REPLACING
from ..host import cache_root
from ..machine.cpu_list import format_cpus
from ..placement import ALLOWED_CPUS_ENV, limit_blas_threads
from .locate import TritonInstall
from .options import REPEATABLE_FLAGS, ServeOptions, flag_names

# Nobody needs these over the network: models are loaded at start, and shared memory of other processes
# must not be mapped in on a stranger's word.
RESTRICTED_APIS = "shared-memory,model-repository,trace,logging"
# Seconds. Capturing graphs and compiling happens while a model initialises.
STUB_START_TIMEOUT_S = 600
# The Triton language's own name for the folder of compiled kernels.
KERNEL_CACHE_ENV = "TRITON_CACHE_DIR"
# Milliseconds. A peer that vanished without a word is noticed within the sum of the two.
KEEPALIVE_INTERVAL_MS, KEEPALIVE_ANSWER_MS = 30_000, 20_000


def arguments(
    options: ServeOptions, install: TritonInstall, backends: Path, repository: Path, shm_prefix: str, admin_key: str
) -> list[str]:
    """The words after the binary's name. A flag among `options.extra_flags` replaces ours of the same name."""
    ours = [
        ("model-repository", str(repository)),
        ("backend-directory", str(backends)),
        ("cache-directory", str(install.caches)),
        ("model-control-mode", "none"),
        ("strict-readiness", "true"),
        ("exit-on-error", "true"),
        ("exit-timeout-secs", str(max(1, round(options.drain_timeout_s)))),
        ("http-address", options.host),
        ("http-port", str(options.http_port)),
        ("http-restricted-api", f"{RESTRICTED_APIS}:tritandem-admin={admin_key}"),
        ("grpc-address", options.host),
        ("grpc-port", str(options.grpc_port)),
        ("grpc-restricted-protocol", f"{RESTRICTED_APIS}:tritandem-admin={admin_key}"),
        ("grpc-keepalive-time", str(KEEPALIVE_INTERVAL_MS)),
        ("grpc-keepalive-timeout", str(KEEPALIVE_ANSWER_MS)),
        ("grpc-keepalive-permit-without-calls", "1"),
        # Clients may ping as often as the server does, with no data under way, without being cut off.
        ("grpc-http2-max-pings-without-data", "0"),
        ("grpc-http2-min-recv-ping-interval-without-data", "5000"),
        ("metrics-address", options.host),
        ("metrics-port", str(options.metrics_port)),
        ("log-verbose", "0"),
        ("backend-config", f"python,shm-region-prefix-name={shm_prefix}"),
        ("backend-config", f"python,stub-timeout-seconds={STUB_START_TIMEOUT_S}"),
    ]
    replaced = flag_names(options.extra_flags) - REPEATABLE_FLAGS
    return [f"--{name}={value}" for name, value in ours if name not in replaced] + list(options.extra_flags)


def environment(options: ServeOptions, install: TritonInstall, inherited: Mapping[str, str]) -> dict[str, str]:
    """What the server and its stubs see. The stub is isolated: PYTHONPATH does not reach it, and its packages are
    those of the first `python3` on PATH, so that the running Python's folder comes first there."""
    env = dict(inherited)
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
    libraries = [str(path) for path in install.library_dirs]
    if inherited_libraries := env.get("LD_LIBRARY_PATH"):
        libraries.append(inherited_libraries)
    env["LD_LIBRARY_PATH"] = os.pathsep.join(libraries)
    for name, path in ((MODEL_ENV, options.model), (CONFIG_ENV, options.engine_config)):
        env.pop(name, None)
        if path is not None:
            env[name] = str(path.resolve())
    for name in REPLACING:
        env.pop(name, None)
    env |= options.replaced()
    # Model processes inherit the server's mask: this is what they may choose from. The launcher counts GPUs as the
    # kernel does, and so must CUDA.
    env[ALLOWED_CPUS_ENV] = format_cpus(os.sched_getaffinity(0))
    env.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    env.setdefault(KERNEL_CACHE_ENV, str(cache_root() / "kernels"))
    limit_blas_threads(env)
    # The model is a folder on this disk: its libraries have nothing to ask a hub for.
    env.setdefault("HF_HUB_OFFLINE", "1")
    env.setdefault("PYTHONUNBUFFERED", "1")
    return env
