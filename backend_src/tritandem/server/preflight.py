"""Everything that can be known to fail before a process is started, each with its reason and its remedy.

Checks look, they change nothing. The order is the one in which a person would mend things.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ..config import Config, load_config, with_placement, with_replaced
from ..contracts.errors import ConfigError
from ..host import Refusal
from ..machine.device import FORMS, DeviceGroup, is_device
from ..machine.peer_access import why_apart
from ..model_facts import check_folder, read_folder
from ..model_facts.quantization import read_quantization, refuse_twice
from ..placement import plan_here, why_no_device
from ..telemetry.tracing import refuse_missing_packages
from . import guardian
from .foreign_flags import known_flags, refuse_unknown_flags
from .locate import TritonInstall, find_install
from .options import ServeOptions
from .repository import engine_devices, model_names

SHM_FOLDER = Path("/dev/shm")
# Every stub takes 1 MB at start and grows with the tensors under way; containers default to 64 MB in all.
MIN_SHM_BYTES = 128 << 20
# What tritonserver has open with the project's five models and nobody connected, and as much again for a GPU's.
OWN_DESCRIPTORS = 256
WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")


def check_all(options: ServeOptions) -> TritonInstall:
    """Run every check; the Triton to start. Raises Refusal (or ConfigError naming the file and key)."""
    for _, check in CHECKS:
        check(options)
    return find_install()


def findings(options: ServeOptions) -> list[tuple[str, ConfigError | None]]:
    """Every check by name with what it refused, None where all is well. What one check has said already is named, not
    said again: several read the configuration."""
    results: list[tuple[str, ConfigError | None]] = []
    said: dict[str, str] = {}
    for name, check in CHECKS:
        try:
            check(options)
            results.append((name, None))
        except ConfigError as error:
            first = said.setdefault(str(error), name)
            results.append((name, error if first == name else Refusal("not checked", f"fix the {first} first")))
    return results


def check_triton(options: ServeOptions) -> None:
    install = find_install()
    if not os.access(install.binary, os.X_OK):
        raise Refusal(f"{install.binary} is not executable", f"run: chmod +x {install.binary}")
    if not (Path(sys.executable).parent / "python3").exists():
        raise Refusal(
            f"there is no python3 beside {sys.executable}, and Triton's stubs look for that name",
            "install into a virtual environment and run tritandem from there",
        )


def check_flags(options: ServeOptions) -> None:
    if options.extra_flags and (known := known_flags(find_install())):
        refuse_unknown_flags(options.extra_flags, known)


def check_numpy(options: ServeOptions) -> None:
    try:
        installed = version("numpy")
    except PackageNotFoundError:
        raise Refusal("numpy is not installed", "install the package with its dependencies") from None
    refuse_numpy(installed, find_install().numpy2_corrupts)


def refuse_numpy(installed: str, numpy2_corrupts: bool) -> None:
    if numpy2_corrupts and int(installed.split(".")[0]) >= 2:
        raise Refusal(
            f"numpy {installed} is installed, but the Triton 2.51 in nvidia-pytriton returns corrupt tensors under "
            "numpy 2",
            "run: pip install 'numpy>=1.26,<2'",
        )


def check_engine_config(options: ServeOptions) -> None:
    _config(options)


def check_repository(options: ServeOptions) -> None:
    if not options.repository.is_dir():
        raise Refusal(f"model repository {options.repository} is not a folder", "name one with --model-repository DIR")
    if not model_names(options.repository):
        raise Refusal(f"model repository {options.repository} holds no model", "name one with --model-repository DIR")


def check_model(options: ServeOptions) -> None:
    if options.model is None:
        return
    engine = _config(options).engine
    refuse_model_folder(options.model, needs_weights=not engine.random_weights)
    if not engine.random_weights:
        refuse_twice(engine.quantization, read_quantization(read_folder(options.model)), str(options.model))


def refuse_model_folder(folder: Path, needs_weights: bool = True) -> None:
    """Raises Refusal unless `folder` is a Hugging Face model folder, ConfigError where its files contradict one
    another: what takes a minute to find out by loading it."""
    if not folder.is_dir():
        raise Refusal(
            f"model folder {folder} does not exist",
            "give --model a Hugging Face folder, a GGUF file, a hub id, or a name from `tritandem model list`",
        )
    needed = [("config.json", ("config.json",)), ("tokenizer", TOKENIZER_FILES)]
    if needs_weights:
        needed.append(("weights", WEIGHT_PATTERNS))
    for what, patterns in needed:
        if not any(path.stat().st_size for pattern in patterns for path in folder.glob(pattern)):
            raise Refusal(
                f"model folder {folder} has no {what} ({' or '.join(patterns)})",
                "give --model a complete Hugging Face model folder",
            )
    check_folder(folder, needs_weights)


def check_tracing(options: ServeOptions) -> None:
    refuse_missing_packages(_config(options).telemetry.traces_url)


def check_devices(options: ServeOptions) -> None:
    """Of `--devices`; else of the configuration, and of every engine of the repository that names its own."""
    # Ranks of one engine may share a GPU, engines may not.
    groups = [dict.fromkeys(group.members) for group in options.devices]
    gpus = [device.index for group in groups for device in group if device.kind != "cpu"]
    if len(options.devices) > 1 and (len(set(gpus)) < len(gpus) or None in gpus):
        given = ",".join(map(str, options.devices))
        raise Refusal(f"--devices: given {given}", "allowed: cpu, or cuda:N with each GPU once")
    for where, text in _devices(options):
        if not is_device(text):
            raise Refusal(f"{where}: given {text!r}", f"allowed: {FORMS}")
        members = DeviceGroup.parse(text).members
        if problem := next(filter(None, map(why_no_device, members)), None):
            raise Refusal(f"{where}: given {text!r}, but {problem}", f"allowed: {FORMS}, as far as they exist")
        if problem := why_apart([device.number for device in members if device.kind == "cuda"]):
            raise Refusal(f"{where}: given {text!r}, but {problem}", "allowed: GPUs that read each other's memory")


def _devices(options: ServeOptions) -> list[tuple[str, str]]:
    """(what names it, device)"""
    if options.devices:
        return [("--devices", str(device)) for device in options.devices]
    found = [("engine.device", _config(options).engine.device)]
    if options.repository.is_dir():
        for model, device in engine_devices(options.repository).items():
            found.append((f"{options.repository / model}/config.pbtxt, parameter device", device))
    return found


def check_placement(options: ServeOptions) -> None:
    plan_here(_config(options))


def refuse_shared_memory(folder: Path, needed_bytes: int = MIN_SHM_BYTES) -> None:
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise Refusal(f"{folder} cannot be used: {error.strerror}", "mount a tmpfs there") from error
    if free < needed_bytes:
        raise Refusal(
            f"{folder} has {free >> 20} MiB free, {needed_bytes >> 20} MiB are needed",
            "remove stale files there; in a container raise it with --shm-size=1g",
        )


def refuse_descriptors(limit: int) -> None:
    """Without enough for itself, a server that many are connected to cannot answer whether it is ready."""
    if limit < 2 * OWN_DESCRIPTORS:
        raise Refusal(
            f"{limit} files may be open, {2 * OWN_DESCRIPTORS} are needed",
            "raise the hard limit: ulimit -Hn, LimitNOFILE= of systemd, or --ulimit nofile= of docker",
        )


def connections_left(limit: int, config: Config) -> str:
    """What to say about `limit` open files; "": as many clients as may wait can each have a connection of their own."""
    left = limit - OWN_DESCRIPTORS
    if left >= config.scheduler.max_queued_requests:
        return ""
    return (
        f"room for {left} connections, and scheduler.max_queued_requests is {config.scheduler.max_queued_requests}: "
        f"raise the hard limit of open files ({limit}), or bound connections in a proxy"
    )


def check_ports(options: ServeOptions) -> None:
    if not options.host:
        raise Refusal("--host: given ''", "allowed: an address of this machine, or 0.0.0.0 for all of them")
    flag_of: dict[int, str] = {}
    for flag, port in options.ports().items():
        if port in flag_of:
            raise Refusal(f"{flag_of[port]} and {flag} are both {port}", "give each its own port")
        flag_of[port] = flag
        refuse_port(flag, options.host, port)


def refuse_port(flag: str, host: str, port: int) -> None:
    if problem := why_not_bindable(host, port):
        said = f"port {port} on {host} cannot be used ({problem})"
        raise Refusal(said, f"stop what listens there, or choose another with {flag}")


def why_not_bindable(host: str, port: int) -> str | None:
    """None when a server could listen on host:port now, else the system's words."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: connections of a former server that linger in TIME_WAIT are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except (OSError, OverflowError) as error:
            return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return None


def _config(options: ServeOptions) -> Config:
    config = with_replaced(load_config(options.engine_config), options.replaced())
    return with_placement(config, options.placement)


CHECKS: tuple[tuple[str, Callable[[ServeOptions], None]], ...] = (
    ("Triton binary and Python", check_triton),
    ("flags for Triton", check_flags),
    ("numpy", check_numpy),
    ("configuration file", check_engine_config),
    ("tracing", check_tracing),
    ("devices", check_devices),
    ("placement", check_placement),
    ("model repository", check_repository),
    ("model folder", check_model),
    ("/dev/shm", lambda options: refuse_shared_memory(SHM_FOLDER)),
    ("open files", lambda options: refuse_descriptors(guardian.descriptor_limit())),
    ("ports", check_ports),
)
