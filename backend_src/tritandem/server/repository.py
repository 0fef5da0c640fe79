"""The model repository as a server will load it: found, checked, and copied where a run wants something else."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from ..config import RELAY_SUFFIX
from ..host import Refusal
from .model_config import read_config, set_instances, write_config

TOKENIZER_MODEL, SCHEDULER_MODEL, ENGINE_MODEL = "tokenizer", "scheduler", "engine"


def default_repository() -> Path:
    """The repository beside the source tree, or the one that a container image mounts at /models. Raises Refusal."""
    beside_sources = Path(__file__).resolve().parents[3] / "model_repository"
    for path in (beside_sources, Path("/models")):
        if path.is_dir():
            return path
    raise Refusal("no model repository found", "name it with --model-repository DIR")


def model_names(repository: Path) -> tuple[str, ...]:
    """Models that Triton will load from here: folders with a config.pbtxt or a numbered version."""
    folders = (path for path in repository.iterdir() if path.is_dir() and not path.name.startswith("."))
    return tuple(sorted(p.name for p in folders if (p / "config.pbtxt").is_file() or any(p.glob("[0-9]*/model.py"))))


def engine_devices(repository: Path) -> dict[str, str]:
    """The device that a model's config.pbtxt names in its parameter `device`, by model; models without one are left
    out. Raises Refusal."""
    models = (name for name in model_names(repository) if (repository / name / "config.pbtxt").is_file())
    found = {name: read_config(repository / name).parameters for name in models}
    return {name: given["device"].string_value for name, given in found.items() if given["device"].string_value}


def repository_of_run(
    repository: Path, run_folder: Path, tokenizer_instances: int = 0, devices: Sequence[str] = ()
) -> Path:
    """A copy of `repository` in `run_folder` whose tokenizer has so many instances and which has an engine for each of
    `devices`; the original when neither is asked for (0 and none). Raises Refusal when it has no such models.
    """
    if not tokenizer_instances and not devices:
        return repository
    needed = {TOKENIZER_MODEL: "--tokenizer-instances"} if tokenizer_instances else {}
    if devices:
        needed |= dict.fromkeys((SCHEDULER_MODEL, ENGINE_MODEL, ENGINE_MODEL + RELAY_SUFFIX), "--devices")
    for model, flag in needed.items():
        if not (repository / model / "config.pbtxt").is_file():
            raise Refusal(f"{repository} has no model {model!r}", f"leave {flag} out")
    copy = run_folder / "model_repository"
    shutil.copytree(repository, copy, ignore=shutil.ignore_patterns("__pycache__"))
    if tokenizer_instances:
        config = read_config(copy / TOKENIZER_MODEL)
        set_instances(config, tokenizer_instances)
        write_config(copy / TOKENIZER_MODEL, config)
    if devices:
        _add_engines(copy, devices)
    return copy


def _add_engines(repository: Path, devices: Sequence[str]) -> None:
    """`engine` computes on the first device, copies of it, `engine_2` and so on, on the others."""
    names = [ENGINE_MODEL, *(f"{ENGINE_MODEL}_{number}" for number in range(2, len(devices) + 1))]
    for name in names[1:]:
        for model, twin in ((ENGINE_MODEL, name), (ENGINE_MODEL + RELAY_SUFFIX, name + RELAY_SUFFIX)):
            if (repository / twin).exists():
                raise Refusal(f"the model repository has a model {twin!r} already", "leave --devices out")
            shutil.copytree(repository / model, repository / twin)
            config = read_config(repository / twin)
            config.name = twin
            write_config(repository / twin, config)
    for name, device in zip(names, devices, strict=True):
        _set_parameter(repository / name, "device", device)
    _set_parameter(repository / SCHEDULER_MODEL, "engines", ", ".join(names))


def _set_parameter(model: Path, key: str, value: str) -> None:
    """Replace the value of a parameter that config.pbtxt has. Raises Refusal where it has none."""
    config = read_config(model)
    if key not in config.parameters:
        raise Refusal(f"{model.name}/config.pbtxt has no parameter {key!r}", "leave --devices out")
    config.parameters[key].string_value = value
    write_config(model, config)
