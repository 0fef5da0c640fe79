"""What every start-up command needs to know: where files are cached, and how a start is refused.

Tier 0. Knows nothing about models, servers or threads.
"""

from __future__ import annotations

import os
from pathlib import Path

from .contracts.errors import ConfigError


class Refusal(ConfigError):
    """A start that cannot succeed, in one line: `reason` says what is wrong, `remedy` what to do about it."""

    def __init__(self, reason: str, remedy: str) -> None:
        self.reason, self.remedy = reason, remedy
        super().__init__(f"{reason}: {remedy}")


def cache_root() -> Path:
    """`$XDG_CACHE_HOME/tritandem`, or `~/.cache/tritandem`. Not created here."""
    base = os.environ.get("XDG_CACHE_HOME")
    # The XDG specification says that relative paths are to be ignored.
    root = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    return root / "tritandem"
