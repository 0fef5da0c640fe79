"""Where an engine computes, as operators write it: a device, or several that hold a part of the model each.

Pure: whether the machine has them is topology's to say.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

FORM = "auto, cpu, cuda, cuda:N"
FORMS = f"{FORM}; several of one model: cuda:N+cuda:M+..., cpu+cpu"
_FORM = re.compile(r"(auto|cpu|cuda)(?::(\d{1,4}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Device:
    """`kind`: cpu, cuda, or auto, which is CUDA where there is one. `index`: of a GPU as CUDA counts in this process;
    None: the first, without naming it."""

    kind: str
    index: int | None = None

    @classmethod
    def parse(cls, text: str) -> Device:
        """Raises ValueError saying what was given and what is allowed."""
        found = _FORM.fullmatch(text)
        if found is None or (found[2] and found[1] != "cuda"):
            raise ValueError(f"given {text!r}, allowed: {FORM}")
        return cls(found[1], int(found[2]) if found[2] else None)

    @property
    def number(self) -> int:
        """N of cuda:N, 0 without one."""
        return self.index or 0

    def __str__(self) -> str:
        return self.kind if self.index is None else f"{self.kind}:{self.index}"


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """The devices of one engine, one for each rank and of one kind; in most cases one. The same may stand there twice:
    ranks that share it."""

    members: tuple[Device, ...]

    @classmethod
    def parse(cls, text: str) -> DeviceGroup:
        """Raises ValueError saying what was given and what is allowed."""
        words = text.split("+")
        if len(words) == 1:
            return cls((Device.parse(text),))
        try:
            members = tuple(Device.parse(word.strip()) for word in words)
        except ValueError:
            raise ValueError(f"given {text!r}, allowed: {FORMS}") from None
        named = all(device.kind == "cuda" and device.index is not None for device in members)
        if not named and any(device.kind != "cpu" for device in members):
            raise ValueError(f"given {text!r}, allowed: {FORMS}")
        return cls(members)

    @property
    def first(self) -> Device:
        """Near which the engine's host threads run."""
        return self.members[0]

    def __str__(self) -> str:
        return "+".join(map(str, self.members))


def is_device(text: str) -> bool:
    """Whether `text` names devices of an engine; whether the machine has them is another question."""
    try:
        DeviceGroup.parse(text)
    except ValueError:
        return False
    return True
