"""What the benchmarks of running servers share: a load of random words with answers of full length, and its table."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from tritandem_loadtest import RunConfig
from tritandem_loadtest.dialects import DIALECTS

Columns = Mapping[str, tuple[str, str]]  # figure -> (title, layout)


def word_load(url: str, model: str, words: int, tokens: int, **more: Any) -> RunConfig:
    """Prompts of `words` words, answers of `tokens` tokens; `more`: other fields of RunConfig."""
    more |= {"prompt_words": str(words), "output_tokens": str(tokens)}
    return RunConfig(url=url, model=model, workload="words", ignore_eos=True, **more)


def closed(streams: int, processes: int) -> dict[str, Any]:
    """The arrivals of a closed loop, as `more` of `word_load`."""
    return {"arrival": "closed", "users": streams, "processes": processes}


def add_prompts_flag(parser: argparse.ArgumentParser) -> None:
    what = "distinct: none twice (default); pool:N: N prompts again and again, for the prefix cache"
    add = parser.add_argument
    add("--prompts", dest="prompt_pool", type=read_prompts, default=0, metavar="distinct|pool:N", help=what)


def read_prompts(text: str) -> int:
    """`"distinct"` -> 0, `"pool:16"` -> 16: how many prompts are repeated."""
    kind, _, size = text.partition(":")
    if text == "distinct":
        return 0
    if kind == "pool" and size.isdecimal() and int(size) > 0:
        return int(size)
    raise argparse.ArgumentTypeError(f"given {text!r}, allowed: distinct or pool:N with N at least 1")


def per_request(summary: Mapping[str, Any]) -> dict[str, float | None]:
    """Mean prompt tokens of a completed request by the server's own count, and those from its prefix cache.

    None: the dialect has no output for it.
    """
    completed, dialect = summary["completed"], DIALECTS[summary["dialect"]]
    counts = {"input_tokens": dialect.input_count_output, "cached_tokens": dialect.cached_count_output}
    return {
        f"{name}_per_request": round(summary[name] / completed, 1) if output and completed else None
        for name, output in counts.items()
    }


def head(label: str, columns: Columns) -> str:
    return label + "".join(f"{title:>11}" for title, _ in columns.values())


def line(label: str, row: Mapping[str, Any], columns: Columns) -> str:
    """A row of the table; what was not measured is a dash."""
    cells = ("-" if row[name] is None else layout.format(row[name]) for name, (_, layout) in columns.items())
    return label + "".join(f"{cell:>11}" for cell in cells) + ("" if row["valid"] else "  INVALID")
