"""The model repository as a server will load it: found, checked, and copied where a count must differ."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from ..host import Refusal

TOKENIZER_MODEL = "tokenizer"
_GROUP = re.compile(r"instance_group\s*(?::\s*)?\[.*?\]", re.DOTALL)
_DEVICE = re.compile(r'^[^#\n]*key:\s*"device"\s*,?\s*value:?\s*\{\s*string_value:\s*"([^"]+)"', re.MULTILINE)


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
    found = {name: _DEVICE.search(path.read_text()) for name, path in configs.items() if path.is_file()}
    return {name: match[1] for name, match in found.items() if match is not None}


def with_tokenizer_instances(repository: Path, count: int, run_folder: Path) -> Path:
    """A copy of `repository` in `run_folder` whose tokenizer has `count` instances; the original when count is 0.

    Raises Refusal when the repository has no tokenizer.
    """
    if count == 0:
        return repository
    source = repository / TOKENIZER_MODEL / "config.pbtxt"
    if not source.is_file():
        raise Refusal(f"{repository} has no model {TOKENIZER_MODEL!r}", "leave --tokenizer-instances out")
    copy = run_folder / "model_repository"
    shutil.copytree(repository, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / TOKENIZER_MODEL / "config.pbtxt").write_text(set_instance_count(source.read_text(), count))
    return copy


def set_instance_count(pbtxt: str, count: int) -> str:
    """`pbtxt` with one CPU instance group of `count` instances in place of whatever it had."""
    group = f"instance_group [ {{ count: {count} kind: KIND_CPU }} ]"
    changed, replaced = _GROUP.subn(group, pbtxt)
    return changed if replaced else f"{pbtxt.rstrip()}\n{group}\n"
