"""A JSON schema as a part of another: references to its root follow it, definitions stay at the top. Pure."""

from __future__ import annotations

from typing import Any

DEFINITIONS = ("$defs", "definitions")
MOST_LEVELS = 200  # of a schema; what is deeper is refused where it is compiled
_VALUES = ("const", "enum", "default", "examples")  # hold instances, which refer to nothing
_BY_NAME = ("properties", "patternProperties", "dependentSchemas", *DEFINITIONS)  # hold schemas by names of their own


def moved(schema: Any, root: str, levels: int = MOST_LEVELS) -> Any:
    """The schema as it stands at `root`, a reference such as #/properties/x."""
    if not levels:
        return schema
    if isinstance(schema, list):
        return [moved(one, root, levels - 1) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _member(key, value, root, levels - 1) for key, value in schema.items()}


def _member(key: str, value: Any, root: str, levels: int) -> Any:
    if key == "$ref" and isinstance(value, str):
        parts = value.split("/")
        stays = parts[0] != "#" or (len(parts) > 1 and parts[1] in DEFINITIONS)
        return value if stays else "/".join((root, *parts[1:]))
    if key in _VALUES:
        return value
    if key in _BY_NAME and isinstance(value, dict):
        return {name: moved(one, root, levels) for name, one in value.items()}
    return moved(value, root, levels)
