"""API keys: who a key belongs to, and which class it may ask for. Read once, from a TOML file.

[sk-one-key]
tenant = "search"        # whose fair share its requests count against; the field `user` is not heard then
class = "interactive"    # the class of its requests, and the highest that a header may ask for; default: normal
tokens_per_minute = 60_000    # limits of this key, each where it is given: also requests_per_minute, requests_at_once
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..contracts.errors import ConfigError
from ..contracts.requests import PriorityClass
from .errors import ApiError, invalid
from .limits import MAX_KEYS, NAMES, Limits

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_MOST = 2**31 - 1
_ALLOWED = f"tenant, class, {', '.join(NAMES)}"
_CLASSES = {one.name.lower(): one for one in PriorityClass}


@dataclass(frozen=True, slots=True)
class Caller:
    """Without keys everybody is a caller without a tenant, who may ask for any class."""

    tenant: str | None = None
    priority: str | None = None
    limits: Limits | None = None
    key: bytes = b""  # its hash

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
        hashed = {_hash(key): caller for key, caller in callers.items()}
        self._callers = {key: replace(caller, key=key) for key, caller in hashed.items()}

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
    callers = {key: _caller(f"--openai-keys {path}: [{key[:6]}...]", said) for key, said in document.items()}
    if (limited := sum(caller.limits is not None for caller in callers.values())) > MAX_KEYS:
        raise ConfigError(f"--openai-keys {path}: given {limited} keys with limits, allowed: at most {MAX_KEYS}")
    return Keys(callers)


def _caller(where: str, said: Any) -> Caller:
    if not isinstance(said, dict):
        raise ConfigError(f"{where}: given {type(said).__name__}, allowed: a table with {_ALLOWED}")
    for name in said.keys() - {"tenant", "class", *NAMES}:
        raise ConfigError(f"{where}: given {name}, allowed: {_ALLOWED}")
    tenant, priority = said.get("tenant"), said.get("class", "normal")
    if tenant is not None and (not isinstance(tenant, str) or not 0 < len(tenant) <= 128):
        raise ConfigError(f"{where}.tenant: given {tenant!r}, allowed: a text of 1 to 128 characters")
    if priority not in _CLASSES:
        raise ConfigError(f"{where}.class: given {priority!r}, allowed: one of {', '.join(_CLASSES)}")
    given = {name: said[name] for name in NAMES if name in said}
    for name, limit in given.items():
        if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= _MOST:
            raise ConfigError(f"{where}.{name}: given {limit!r}, allowed: a whole number in [1, {_MOST}]")
    return Caller(tenant, priority, Limits(**given) if given else None)


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
