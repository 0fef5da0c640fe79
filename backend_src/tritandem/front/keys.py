"""API keys: who a key belongs to, and which class it may ask for. Read once, from a TOML file.

[sk-one-key]
tenant = "search"        # whose fair share its requests count against; the field `user` is not heard then
class = "interactive"    # the class of its requests, and the highest that a header may ask for; default: normal
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..contracts.errors import ConfigError
from ..contracts.requests import PriorityClass
from .errors import ApiError, invalid

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_CLASSES = {one.name.lower(): one for one in PriorityClass}


@dataclass(frozen=True, slots=True)
class Caller:
    """Without keys everybody is a caller without a tenant, who may ask for any class."""

    tenant: str | None = None
    priority: str | None = None

    def choose(self, asked: str | None) -> str | None:
        """The class of a request; None: the server's default. Raises ApiError."""
        if asked is None:
            return self.priority
        allowed = [name for name, rank in _CLASSES.items() if rank >= _CLASSES[self.priority or "interactive"]]
        if asked not in allowed:
            raise invalid("x-priority", asked, ", ".join(allowed))
        return asked


class Keys:
    """Keys are kept as hashes: looking one up tells nothing about the others by the time that it takes."""

    def __init__(self, callers: Mapping[str, Caller]) -> None:
        self._callers = {_hash(key): caller for key, caller in callers.items()}

    def caller(self, authorization: str) -> Caller:
        """`authorization`: of the header, "" without one. Raises ApiError, 401."""
        if not self._callers:
            return Caller()
        scheme, _, key = authorization.partition(" ")
        found = self._callers.get(_hash(key.strip())) if scheme.lower() == "bearer" else None
        if found is None:
            said = "Authorization: given " + ("an unknown key" if authorization else "nothing")
            raise ApiError(401, f"{said}, allowed: Bearer and a key of this server", code="invalid_api_key",
                           headers={"www-authenticate": "Bearer"})  # fmt: skip
        return found


def read_keys(path: Path | None) -> Keys:
    """Raises ConfigError naming file, key and field."""
    if path is None:
        return Keys({})
    try:
        document = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--openai-keys {path}: {error}") from None
    if not document:
        raise ConfigError(f"--openai-keys {path}: given no key, allowed: a table [KEY] for each")
    return Keys({key: _caller(f"--openai-keys {path}: [{key[:6]}...]", said) for key, said in document.items()})


def _caller(where: str, said: Any) -> Caller:
    if not isinstance(said, dict):
        raise ConfigError(f"{where}: given {type(said).__name__}, allowed: a table with tenant and class")
    for name in said.keys() - {"tenant", "class"}:
        raise ConfigError(f"{where}: given {name}, allowed: tenant and class")
    tenant, priority = said.get("tenant"), said.get("class", "normal")
    if tenant is not None and (not isinstance(tenant, str) or not 0 < len(tenant) <= 128):
        raise ConfigError(f"{where}.tenant: given {tenant!r}, allowed: a text of 1 to 128 characters")
    if priority not in _CLASSES:
        raise ConfigError(f"{where}.class: given {priority!r}, allowed: one of {', '.join(_CLASSES)}")
    return Caller(tenant, priority)


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
