"""JSON schemas and expressions, before they are compiled: what would be passed over although it means something. Pure.

What llguidance knows and cannot do it refuses itself, by name; a word that no draft of JSON Schema has is an
annotation, and says nothing, as the specification has it.
"""

from __future__ import annotations

from typing import Any

from ..contracts.errors import InvalidRequest

# Of older drafts and of OpenAPI; llguidance takes them for annotations.
PASSED_OVER = frozenset(("disallow", "divisibleBy", "extends", "nullable"))
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE = ("additionalProperties", "items", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames")


def check_characters(field: str, text: str) -> None:
    """Half characters, which JSON may name and no text has. Raises InvalidRequest."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise InvalidRequest(field, text, f"whole characters: {half} is half of a surrogate pair") from error


def check_pattern(field: str, pattern: str) -> None:
    """Raises InvalidRequest."""
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise InvalidRequest(field, pattern, "a regular expression: this one ends in a lone backslash")


def check_schema(field: str, schema: Any) -> None:
    """Raises InvalidRequest naming `field`, with the path inside the schema."""
    if not isinstance(schema, (dict, bool)):
        raise InvalidRequest(field, schema, "a JSON schema: an object, true or false")
    waiting: list[tuple[str, Any]] = [(field, schema)]
    while waiting:
        path, one = waiting.pop()
        if not isinstance(one, dict):
            continue
        for name in PASSED_OVER.intersection(one):
            if one[name] is not False:
                raise InvalidRequest(f"{path}.{name}", one[name], "no such word: it could not be honoured")
        if isinstance(one.get("pattern"), str):
            check_pattern(f"{path}.pattern", one["pattern"])
        for pattern in one["patternProperties"] if isinstance(one.get("patternProperties"), dict) else ():
            check_pattern(f"{path}.patternProperties", pattern)
        for name in _BY_NAME:
            if isinstance(one.get(name), dict):
                waiting += ((f"{path}.{name}.{key}", inner) for key, inner in one[name].items())
        for name in _LISTS:
            if isinstance(one.get(name), list):
                waiting += ((f"{path}.{name}[{at}]", inner) for at, inner in enumerate(one[name]))
        waiting += ((f"{path}.{name}", one[name]) for name in _SINGLE if isinstance(one.get(name), dict))
