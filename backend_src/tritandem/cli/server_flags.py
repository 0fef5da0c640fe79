"""The flags that describe a server, shared by `serve`, `demo` and `doctor`."""

from __future__ import annotations

import argparse
import os
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tritandem.config import CONFIG_ENV, MODEL_ENV, PLACEMENT_ENV, REPLACING, placement_from_words
from tritandem.contracts.errors import ConfigError
from tritandem.front.formats.choose import AUTO, REASONING_WORDS, TOOL_WORDS
from tritandem.machine.device import DeviceGroup
from tritandem.models import resolve_model
from tritandem.models.catalog import DEFAULT_MODEL
from tritandem.placement import COMPONENTS
from tritandem.server.front_workers import MAX_WORKERS, FrontOptions
from tritandem.server.options import ServeOptions

from .memory_flags import add_memory_flags
from .numbers import seconds, whole

OPENAI_PORT = 8080


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    defaults = ServeOptions(None, Path())
    add = parser.add_argument
    add(
        "--model",
        default=os.environ.get(MODEL_ENV) or DEFAULT_MODEL,
        metavar="DIR|GGUF|NAME|HUB_ID",
        help=f"a Hugging Face folder, a GGUF file, a name of `tritandem model list`, or a hub id (default: "
        f"${MODEL_ENV}, or {DEFAULT_MODEL})",
    )
    add(
        "--engine-config",
        type=Path,
        default=os.environ.get(CONFIG_ENV) or None,
        metavar="FILE",
        help=f"TOML with the tables of docs/settings.md (default: ${CONFIG_ENV}, or none)",
    )
    add("--model-repository", type=Path, metavar="DIR", help="what Triton loads (default: the project's own)")
    add(
        "--tokenizer-instances",
        type=whole(1, 64),
        default=0,
        metavar="N",
        help="processes that tokenize (default: as many as the model repository says)",
    )
    add(
        "--devices",
        type=_devices,
        default=(),
        metavar="LIST",
        help="an engine on each of these, e.g. cuda:0,cuda:1, or one over several: cuda:0+cuda:1 (default: one engine, "
        "on the device of the configuration)",
    )
    add("--host", default=defaults.host, help="address to listen on (default: %(default)s, this machine only)")
    ports = {"HTTP": defaults.http_port, "gRPC": defaults.grpc_port, "metrics": defaults.metrics_port}
    for name, port in ports.items():
        flag = f"--{name.lower()}-port"
        add(
            flag,
            type=whole(1, 65_535),
            default=port,
            metavar="PORT",
            help=f"of {name} (default: %(default)s)",
        )
    add_memory_flags(parser, default=None)
    _add_front_flags(parser)
    add(
        "--drain-timeout-s",
        type=seconds,
        default=defaults.drain_timeout_s,
        metavar="SECONDS",
        help="how long running requests may take once a stop was asked for (default: %(default)s)",
    )
    add(
        "--generation-config",
        choices=("auto", "none"),
        help="auto: what a request leaves out of its sampling is as the model's generation_config.json says (default: "
        "the setting scheduler.generation_config, or none)",
    )
    add(
        "--placement",
        choices=("auto", "off"),
        help="which CPUs each component runs on: from the machine, or wherever the kernel likes (default: the table "
        "[placement] of the configuration, or auto)",
    )
    add(
        "--cpus",
        action="append",
        default=[],
        metavar="COMPONENT=LIST",
        help=f"put a component on these CPUs, e.g. engine=2-5,8; repeat it for others of {', '.join(COMPONENTS)}",
    )
    add("--log-file", type=Path, metavar="FILE", help="Triton's log (default: a new file in the cache folder)")
    add(
        "--log-mb",
        type=whole(1, 1 << 20),
        default=defaults.max_log_bytes >> 20,
        metavar="N",
        help="the log begins anew at this size, what it held is kept as FILE.1 (default: %(default)s)",
    )


def _add_front_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--openai-port",
        type=whole(0, 65_535),
        default=OPENAI_PORT,
        metavar="PORT",
        help="where the OpenAI API is served; 0: nowhere (default: %(default)s)",
    )
    add(
        "--openai-model",
        action="append",
        default=[],
        metavar="NAME",
        help="what the model is called there; repeat it for further names (default: the name given by --model)",
    )
    add("--openai-keys", type=Path, metavar="FILE", help="TOML file of API keys (default: no key is asked for)")
    add("--openai-tls-cert", type=Path, metavar="FILE", help="PEM file of a certificate chain: HTTPS (default: HTTP)")
    add("--openai-tls-key", type=Path, metavar="FILE", help="PEM file of its key")
    add(
        "--openai-cors",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="an origin whose pages may ask, or *; repeat it for others (default: none)",
    )
    add(
        "--openai-workers",
        type=whole(0, MAX_WORKERS),
        default=0,
        metavar="N",
        help="processes of the OpenAI API; 0: one for every four cores (default: %(default)s)",
    )
    for kind, words, what in (("tool", TOOL_WORDS, "calls functions"), ("reasoning", REASONING_WORDS, "thinks")):
        add(
            f"--openai-{kind}-parser",
            choices=words,
            default=AUTO,
            metavar="NAME",
            help=f"the form in which the model {what}: one of {', '.join(words)}; auto goes by its chat template "
            "(default: %(default)s)",
        )


def front_options(args: argparse.Namespace) -> FrontOptions | None:
    """None: the OpenAI API is not served. Raises ConfigError for files that cannot be read."""
    from tritandem.front.keys import read_keys

    if not args.openai_port:
        return None
    read_keys(args.openai_keys)
    names = tuple(args.openai_model) or (Path(args.model).name.removesuffix(".gguf"),)
    tls = _certificate(args.openai_tls_cert, args.openai_tls_key)
    return FrontOptions(
        names,
        args.openai_keys,
        tuple(args.openai_cors),
        args.openai_workers,
        tls,
        args.openai_tool_parser,
        args.openai_reasoning_parser,
    )


def _certificate(chain: Path | None, key: Path | None) -> tuple[Path, Path] | None:
    if chain is None and key is None:
        return None
    if chain is None or key is None:
        raise ConfigError("--openai-tls-cert: given without --openai-tls-key or the other way round, allowed: both")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(chain, key)
    except OSError as error:
        raise ConfigError(
            f"--openai-tls-cert: given {chain} and {key}, allowed: PEM files that fit ({error})"
        ) from None
    return chain, key


def server_arguments(args: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Keyword arguments of TritonServer; fetches or converts the model when needed. Raises Refusal."""
    config = Path(args.engine_config) if args.engine_config else None
    return {
        "model": resolve_model(args.model, say),
        "repository": args.model_repository.resolve() if args.model_repository else None,
        "host": args.host,
        "http_port": args.http_port,
        "grpc_port": args.grpc_port,
        "metrics_port": args.metrics_port,
        "openai_port": args.openai_port,
        "engine_config": config,
        "tokenizer_instances": args.tokenizer_instances,
        "devices": args.devices,
        "drain_timeout_s": args.drain_timeout_s,
        "log_path": args.log_file,
        "max_log_bytes": args.log_mb << 20,
        **{name: getattr(args, name) or os.environ.get(variable, "") for variable, (_, name) in REPLACING.items()},
        "placement": _placement(args),
        "extra_flags": tuple(args.unknown),
    }


def _placement(args: argparse.Namespace) -> str:
    """Words as the server's processes read them. Raises ConfigError."""
    if args.placement and args.cpus:
        raise ConfigError(f"--placement: given {args.placement} with --cpus, allowed: one of the two")
    words = args.placement or " ".join(args.cpus) or os.environ.get(PLACEMENT_ENV, "")
    if words:
        placement_from_words(words)
    return words


def _devices(text: str) -> tuple[DeviceGroup, ...]:
    try:
        return tuple(DeviceGroup.parse(word.strip()) for word in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}, separated by commas") from None
