"""The model repository as a server will load it: found, checked, and copied where a run wants something else."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from ..host import Refusal

TOKENIZER_MODEL, SCHEDULER_MODEL, ENGINE_MODEL = "tokenizer", "scheduler", "engine"
_RELAY = "{}_calls"  # every engine has one
_GROUP = re.compile(r"instance_group\s*(?::\s*)?\[.*?\]", re.DOTALL)


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
    out."""
    configs = {name: repository / name / "config.pbtxt" for name in model_names(repository)}
    device = _parameter("device")
    found = {name: device.search(path.read_text()) for name, path in configs.items() if path.is_file()}
    return {name: match[2] for name, match in found.items() if match is not None and match[2]}


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
        needed |= dict.fromkeys((SCHEDULER_MODEL, ENGINE_MODEL, _RELAY.format(ENGINE_MODEL)), "--devices")
    for model, flag in needed.items():
        if not (repository / model / "config.pbtxt").is_file():
            raise Refusal(f"{repository} has no model {model!r}", f"leave {flag} out")
    copy = run_folder / "model_repository"
    shutil.copytree(repository, copy, ignore=shutil.ignore_patterns("__pycache__"))
    if tokenizer_instances:
        config = copy / TOKENIZER_MODEL / "config.pbtxt"
        config.write_text(set_instance_count(config.read_text(), tokenizer_instances))
    if devices:
        _add_engines(copy, devices)
    return copy


def _add_engines(repository: Path, devices: Sequence[str]) -> None:
    """`engine` computes on the first device, copies of it, `engine_2` and so on, on the others."""
    names = [ENGINE_MODEL, *(f"{ENGINE_MODEL}_{number}" for number in range(2, len(devices) + 1))]
    for name in names[1:]:
        for model, twin in ((ENGINE_MODEL, name), (_RELAY.format(ENGINE_MODEL), _RELAY.format(name))):
            if (repository / twin).exists():
                raise Refusal(f"the model repository has a model {twin!r} already", "leave --devices out")
            shutil.copytree(repository / model, repository / twin)
            config = repository / twin / "config.pbtxt"
            config.write_text(re.sub(rf'^name:\s*"{model}"', f'name: "{twin}"', config.read_text(), flags=re.MULTILINE))
    for name, device in zip(names, devices, strict=True):
        _set_parameter(repository / name / "config.pbtxt", "device", device)
    _set_parameter(repository / SCHEDULER_MODEL / "config.pbtxt", "engines", ", ".join(names))


def _parameter(key: str) -> re.Pattern[str]:
    """Finds a parameter in config.pbtxt, not in a comment: what stands before its value, and the value."""
    return re.compile(rf'^([^#\n]*key:\s*"{key}"\s*,?\s*value:?\s*\{{\s*string_value:\s*")([^"]*)', re.MULTILINE)


def _set_parameter(config: Path, key: str, value: str) -> None:
    """Replace the value of a parameter that config.pbtxt has. Raises Refusal where it has none."""
    changed, count = _parameter(key).subn(lambda found: f"{found[1]}{value}", config.read_text())
    if count != 1:
        raise Refusal(f"{config.parent.name}/config.pbtxt has no parameter {key!r}", "leave --devices out")
    config.write_text(changed)


def set_instance_count(pbtxt: str, count: int) -> str:
    """`pbtxt` with one CPU instance group of `count` instances in place of whatever it had."""
    group = f"instance_group [ {{ count: {count} kind: KIND_CPU }} ]"
    changed, replaced = _GROUP.subn(group, pbtxt)
    return changed if replaced else f"{pbtxt.rstrip()}\n{group}\n"
