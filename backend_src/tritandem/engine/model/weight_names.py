"""Whether the files held every weight of the model that was built, and nothing else: refusals by name.

Knows nothing about where the files are from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...contracts.errors import ConfigError

MOST_NAMED = 3


def refuse_report(path: Path, report: Mapping[str, Any]) -> None:
    """`report`: what transformers says after loading. It leaves out what is known to be harmless: rotary frequencies
    and position numbers, which follow from the configuration, and what an architecture declares that it ignores
    (`_keys_to_ignore_on_load_unexpected`: causal masks, vision towers, layers that predict further tokens).

    Raises ConfigError.
    """
    refuse_names(path, "are missing", report["missing_keys"])
    mismatched = [
        f"{key} {tuple(given)} instead of {tuple(wanted)}" for key, given, wanted in report["mismatched_keys"]
    ]
    refuse_names(path, "have another shape than the configuration says", mismatched)
    refuse_names(path, "are not used by the model that the configuration describes", report["unexpected_keys"])


def refuse_names(path: Path, what: str, names: Iterable[str]) -> None:
    """Raises ConfigError that counts them and names the first few, unless there are none."""
    ordered = sorted(names)
    if ordered:
        more = ", ..." if len(ordered) > MOST_NAMED else ""
        raise ConfigError(f"{path}: weights {what} ({len(ordered)}): {', '.join(ordered[:MOST_NAMED])}{more}")
