"""Tables of docs/ that follow from code. They stand between `<!-- generated: NAME -->` and `<!-- end -->`.

`python -m tools.pages` writes them anew; a test compares them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from tritandem.triton_io.request import schema

DOCS = Path(__file__).resolve().parents[2] / "docs"
_BLOCK = re.compile(r"(<!-- generated: ([\w.-]+) -->\n).*?(\n<!-- end -->)", re.DOTALL)


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


BLOCKS: Mapping[str, Callable[[], str]] = {
    "input-tensors": lambda: tensors(schema.INPUTS),
    "output-tensors": lambda: tensors(schema.OUTPUTS),
    "request-parameters": request_parameters,
}


def filled(page: str) -> str:
    """`page` with every block as the code says it. Raises KeyError for a block of an unknown name."""
    return _BLOCK.sub(lambda found: f"{found[1]}\n{BLOCKS[found[2]]()}\n{found[3]}", page)


def write_pages() -> None:
    for path in sorted(DOCS.rglob("*.md")):
        page = path.read_text()
        if (new := filled(page)) != page:
            path.write_text(new)
            print(f"written: {path.relative_to(DOCS.parent)}")
