"""The description of this API for programs: /openapi.json, made of the table of fields. Pure."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from .fields import CHAT, COMPLETIONS, FIELDS

_ERRORS = {
    "400": "a field is wrong, or cannot be honoured; `param` names it",
    "401": "no key, or an unknown one",
    "404": "no such model",
    "413": "the body is too long",
    "429": "no room now; Retry-After says when",
    "500": "the request, or the engine under it, failed",
    "503": "draining, or not ready",
    "504": "the deadline passed",
}


@cache
def document() -> bytes:
    """OpenAPI 3.1, as JSON."""
    health = {"get": {"summary": "Whether requests are taken", "responses": {"200": _said("yes"), "503": _said("no")}}}
    paths = {
        "/v1/chat/completions": _post("The next turn of a conversation", CHAT),
        "/v1/completions": _post("The continuation of a text", COMPLETIONS),
        "/v1/responses": _conversation("A turn of a conversation, as OpenAI's Responses", "input"),
        "/v1/messages": _conversation("A turn of a conversation, as Anthropic's Messages", "messages", "max_tokens"),
        "/v1/messages/count_tokens": _conversation("How many tokens such a body has", "messages"),
        "/tokenize": _conversation("The ids of a prompt or a chat"),
        "/detokenize": _conversation("The text of ids", "tokens"),
        "/v1/models": {"get": {"summary": "Names of the model", "responses": {"200": _said("a list")}}},
        "/health": health,
        "/health/ready": health,
        "/health/live": {"get": {"summary": "Whether the process runs", "responses": {"200": _said("yes")}}},
    }
    about = {"title": "Tritandem", "version": "1", "description": "OpenAI-compatible API of a Tritandem server"}
    return json.dumps({"openapi": "3.1.0", "info": about, "paths": paths}).encode()


def _post(summary: str, door: str) -> dict[str, Any]:
    fields = [field for field in FIELDS if door in field.doors]
    schema = {
        "type": "object",
        "required": ["messages" if door == CHAT else "prompt"],
        "properties": {field.name: {**field.schema, "description": field.doc} for field in fields},
    }
    return _answered(summary, schema)


def _conversation(summary: str, *required: str) -> dict[str, Any]:
    """Described whole by its own makers."""
    return _answered(summary, {"type": "object", "required": list(required)})


def _answered(summary: str, schema: dict[str, Any]) -> dict[str, Any]:
    answers = {status: _said(meaning) for status, meaning in _ERRORS.items()}
    answers["200"] = _said("the answer, or events with parts of it")
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {"post": {"summary": summary, "requestBody": body, "responses": answers}}


def _said(description: str) -> dict[str, str]:
    return {"description": description}
