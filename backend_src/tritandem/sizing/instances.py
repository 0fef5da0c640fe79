"""Cloud instances with GPUs, from a dated data file: what they have beyond the need, and what more cores cost.

Prices are inputs that age; nothing here asks a network.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..contracts.errors import ConfigError

DEFAULT_FILE = "instances.json"


@dataclass(frozen=True, slots=True)
class CloudInstance:
    """`core_usd_h`: the list price of one more physical core on a CPU instance of the same cloud."""

    name: str
    cloud: str
    gpus: int
    gpu: str
    vcpus: int
    threads_per_core: int
    usd_h: float
    core_usd_h: float

    @property
    def cores(self) -> int:
        """Physical cores; a vCPU is one hardware thread."""
        return self.vcpus // self.threads_per_core


@dataclass(frozen=True, slots=True)
class InstancesFile:
    dated: str
    note: str
    instances: tuple[CloudInstance, ...]


@dataclass(frozen=True, slots=True)
class Offer:
    """One instance against a need that was computed for as many GPUs as it has."""

    instance: CloudInstance
    needed_cores: int

    @property
    def headroom_cores(self) -> int:
        """Negative: so many are missing."""
        return self.instance.cores - self.needed_cores

    @property
    def missing_cores_usd_h(self) -> float:
        """What the missing cores would cost an hour, 0 when none is missing."""
        return max(0, -self.headroom_cores) * self.instance.core_usd_h

    @property
    def eight_more_cores_percent(self) -> float:
        """Eight cores more, as a share of the instance's price."""
        return 100 * 8 * self.instance.core_usd_h / self.instance.usd_h


def load_instances(path: Path | None = None) -> InstancesFile:
    """Read a data file; None reads the default. Raises ConfigError naming file and entry."""
    name = str(path) if path else DEFAULT_FILE
    try:
        text = path.read_text() if path else files(__package__).joinpath("data").joinpath(DEFAULT_FILE).read_text()
        document: dict[str, Any] = json.loads(text)
        entries = [CloudInstance(**entry) for entry in document["instances"]]
        file = InstancesFile(document["dated"], document["note"], tuple(entries))
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{name}: not a file of instances: {error}") from error
    for entry in entries:
        if min(entry.gpus, entry.vcpus, entry.threads_per_core) < 1 or min(entry.usd_h, entry.core_usd_h) <= 0:
            raise ConfigError(f"{name}: {entry.name}: counts and prices must be above 0")
    return file
