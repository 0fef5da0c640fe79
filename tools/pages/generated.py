"""Tables of docs/ that follow from code. They stand between `<!-- generated: NAME -->` and `<!-- end -->`.

`python -m tools.pages` writes them anew; a test compares them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from tritandem.cli import serve
from tritandem.config import Config, Setting, settings_of
from tritandem.front.fields import BOTH, FIELDS, NEUTRAL, WITHOUT_EFFECT
from tritandem.triton_io.request import dialects, schema

DOCS = Path(__file__).resolve().parents[2] / "docs"
_BLOCK = re.compile(r"(<!-- generated: ([\w.-]+) -->\n)\n(.*?)\n(\n<!-- end -->)", re.DOTALL)


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table of Markdown. A bar inside a cell is escaped, an empty cell shows a dash."""
    heads = tuple(heads)
    lines = [heads, ("---",) * len(heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") or "-" for cell in line) + " |" for line in lines)


def tensors(rows: Iterable[schema.PublicTensor]) -> str:
    def cells(t: schema.PublicTensor) -> tuple[str, ...]:
        shape = ", ".join("n" if d == -1 else str(d) for d in t.dims)
        return f"`{t.name}`", t.dtype, f"[{shape}]", t.default, t.allowed, t.doc

    return table(("name", "type", "shape", "default", "allowed", "meaning"), map(cells, rows))


def request_parameters() -> str:
    rows = [(f"`{name}`", meaning) for name, meaning in schema.PARAMETERS.items()]
    return table(("request parameter", "meaning"), rows)


def facades() -> str:
    """What each model's requests mean by what they leave out."""

    def cells(dialect: dialects.Dialect) -> tuple[str, ...]:
        greedy = "0" if dialect.temperature is None else f"{dialect.temperature:g}"
        draws = (
            "greedy without `top_k` > 1, `top_p` < 1 or `min_p`" if not dialect.lone_temperature_draws else "samples"
        )
        seed = "greedy" if not dialect.lone_temperature_draws else "samples"
        most = "the setting, 256" if dialect.max_tokens is None else str(dialect.max_tokens)
        echoed = {
            None: "the setting: of one response, not of a stream",
            "streams": "of one response, not of a stream",
            "all": "no",
        }
        reason = 'every response, "None" before the last' if dialect.finish_reason_always else "the last response"
        asked = "" if dialect.finish_reason else ", when asked"
        return (
            f"`{dialect.name}`",
            most,
            greedy,
            draws,
            seed,
            echoed[dialect.exclude_input] + ("" if dialect.echoes_in_streams else ", even if asked"),
            reason + asked,
        )

    heads = ("model", "no `max_tokens`", "no `temperature`", "`temperature` alone", "`seed` alone", "prompt repeated")
    every = (dialects.OWN, *(dialect for dialect, _ in dialects.PROMPTS.values()))
    return table((*heads, "`finish_reason`"), map(cells, every))


def settings() -> str:
    """A section for each table of the configuration."""
    parts: list[str] = []
    for section in dataclasses.fields(Config):
        values = getattr(Config(), section.name)
        rows = [cells_of(key, getattr(values, key), setting) for key, setting in settings_of(type(values)).items()]
        about = " ".join(str(type(values).__doc__).split())
        parts += [f"## [{section.name}]", about, table(("key", "unit", "default", "allowed", "meaning"), rows)]
    return "\n\n".join(parts)


def unit(key: str) -> str:
    """What its name says that a number counts."""
    words = {"s": "seconds", "fraction": "share", "rate": "share", "share": "share", "chars": "characters"}
    counted = ("tokens", "blocks", "bytes", "sequences", "steps", "threads", "requests")
    known = words | {word: word for word in counted}
    return next((known[word] for word in reversed(key.split("_")) if word in known), "")


def cells_of(key: str, default: object, setting: Setting) -> tuple[str, ...]:
    """Of one row."""
    if isinstance(default, bool):
        return f"`{key}`", "", f"`{str(default).lower()}`", "true, false", setting.doc
    if isinstance(default, str):
        return f"`{key}`", "", f'`"{default}"`', setting.allowed, setting.doc
    readable = f" ({default >> 20} MiB)" if isinstance(default, int) and unit(key) == "bytes" else ""
    return f"`{key}`", unit(key), f"`{default}`{readable}", setting.allowed, setting.doc


def serve_flags() -> str:
    """Flags of `tritandem serve`, in the order and words of its --help."""
    commands = argparse.ArgumentParser().add_subparsers()
    serve.add_parser(commands)
    parser = commands.choices["serve"]
    formatter = parser._get_formatter()
    rows = [
        (re.sub(r"^\S+", r"`\g<0>`", formatter._format_action_invocation(flag)), formatter._expand_help(flag))
        for flag in parser._actions
        if flag.dest != "help"
    ]
    return table(("flag", "meaning"), rows)


def openai_fields() -> str:
    """What the OpenAI API honours."""
    where = {BOTH: "both", **{(door,): door for door in BOTH}}
    rows = [(f"`{field.name}`", where[field.doors], field.default, field.doc) for field in FIELDS]
    return table(("field", "endpoint", "default", "meaning"), rows)


def openai_refused() -> str:
    """What it takes only with values that change nothing."""
    rows = [(f"`{one.name}`", ", ".join(f"`{json.dumps(v)}`" for v in one.values), one.doc) for one in NEUTRAL]
    rows.append((", ".join(f"`{name}`" for name in sorted(WITHOUT_EFFECT)), "any", "without effect on an answer"))
    return table(("field", "accepted", "because"), rows)


BLOCKS: Mapping[str, Callable[[], str]] = {
    "input-tensors": lambda: tensors(schema.INPUTS),
    "output-tensors": lambda: tensors(schema.OUTPUTS),
    "request-parameters": request_parameters,
    "facades": facades,
    "settings": settings,
    "serve-flags": serve_flags,
    "openai-fields": openai_fields,
    "openai-refused": openai_refused,
}


def filled(page: str, blocks: Mapping[str, str]) -> str:
    """`page` with these blocks in their places; others stay as they are."""
    return _BLOCK.sub(lambda found: f"{found[1]}\n{blocks.get(found[2], found[3])}\n{found[4]}", page)


def blocks() -> dict[str, str]:
    return {name: make() for name, make in BLOCKS.items()}


def write_pages() -> None:
    made = blocks()
    for path in sorted(DOCS.rglob("*.md")):
        page = path.read_text()
        if (new := filled(page, made)) != page:
            path.write_text(new)
            print(f"written: {path.relative_to(DOCS.parent)}")
