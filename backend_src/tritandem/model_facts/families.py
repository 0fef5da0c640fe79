"""What is known of each family of models without loading one: how a tiny model of it was served.

The findings lie in families.json, which `python -m tools.pages.families` writes by loading such models.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("families.json")


@dataclass(frozen=True, slots=True)
class Finding:
    """Of a family, by `model_type`, in its default configuration."""

    family: str
    verdict: str  # on a GPU: fused, served (by transformers' own code), refused, or unbuilt
    reason: str = ""  # why refused, unbuilt, or not fused
    attention: str = ""  # full, sliding, or both
    experts: str = ""  # what runs them on a GPU, of a mixture of experts

    def words(self) -> str:
        """How a GPU serves the family, in one line."""
        how = {
            "fused": "fused kernels in CUDA Graphs",
            "served": "transformers' own code over this server's attention",
            "refused": "not at all",
            "unbuilt": "not known: no tiny model of the family could be made",
        }[self.verdict]
        experts = f"; experts on {self.experts}" if self.experts else ""
        return how + experts + (f" ({self.reason})" if self.reason else "")


def findings() -> tuple[str, list[Finding]]:
    """The release of transformers that they are of, and all of them by name."""
    stated: dict[str, Any] = json.loads(FILE.read_text())
    return stated["transformers"], [Finding(**found) for found in stated["families"]]


def finding_of(family: str | None) -> Finding | None:
    """None for a family that transformers did not have."""
    return next((found for found in findings()[1] if found.family == family), None)
