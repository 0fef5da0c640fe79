"""JSON schemas, before they are compiled: words that would be passed over although they forbid something. Pure.

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
        for name in _BY_NAME:
            if isinstance(one.get(name), dict):
                waiting += ((f"{path}.{name}.{key}", inner) for key, inner in one[name].items())
        for name in _LISTS:
            if isinstance(one.get(name), list):
                waiting += ((f"{path}.{name}[{at}]", inner) for at, inner in enumerate(one[name]))
        waiting += ((f"{path}.{name}", one[name]) for name in _SINGLE if isinstance(one.get(name), dict))
