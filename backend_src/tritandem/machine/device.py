"""Where an engine computes, as operators write it: one value a device.

Pure: whether the machine has it is topology's to say. Several devices of one engine would be a tuple of these.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

FORMS = "auto, cpu, cuda, cuda:N"
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
            raise ValueError(f"given {text!r}, allowed: {FORMS}")
        return cls(found[1], int(found[2]) if found[2] else None)

    @property
    def number(self) -> int:
        """N of cuda:N, 0 without one."""
        return self.index or 0

    def __str__(self) -> str:
        return self.kind if self.index is None else f"{self.kind}:{self.index}"


def is_device(text: str) -> bool:
    """Whether `text` names a device; whether the machine has it is another question."""
    try:
        Device.parse(text)
    except ValueError:
        return False
    return True
