"""The one page of figures, drawn by the browser from one JSON document, without a library and without a network.

Reports of runs and sweeps, the section in Locust's report and the page of a running test are the same page with other
documents. Owns the look, `drawing/`; what a document holds is decided where its figures come from.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BLUE, ORANGE, GREEN, RED, GREY = "#2f6db3", "#d9822b", "#3a8f5c", "#c0392b", "#7a7f87"
Document = dict[str, Any]
"""`title`, `facts` (a line each); all else may be left out:

`notes`: [kind, text], kind "good" or "bad"; `tiles`: [value, label];
`charts`: title, `xs` (rising numbers), `unit` of xs, `lines` ([name, colour, ys], null where nothing was measured),
`limit` (a y that is drawn as a line), `limit_x`, `hollow` (for each x whether its points are; also as fourth of a
line), `log` (whether y is logarithmic);
`tables`: title, `head`, `rows` of texts; `texts`: [title, text].
"""

_DRAWING = Path(__file__).parent / "drawing"  # data of this package


def script(name: str) -> str:
    """A file of `drawing/` as an element of a page."""
    return f"<script>\n{(_DRAWING / name).read_text(encoding='utf-8')}</script>"


_STYLE = f"<style>\n{(_DRAWING / 'figures.css').read_text(encoding='utf-8')}</style>"
_SCRIPT = script("figures.js")
_OUTSIDE = '<body style="margin:0;padding:1.2rem 1.6rem;background:#f5f6f8">'


def line_chart(
    xs: Sequence[float],
    unit: str,
    rows: Sequence[Mapping[str, Any]],
    title: str,
    *lines: tuple[str, str, str],
    **more: Any,
) -> Document:
    """A chart of rows, one an x; `lines`: (name, colour, key in a row). What is None or NaN was not measured."""
    drawn = [[name, colour, [_known(row[key]) for row in rows]] for name, colour, key in lines]
    return {"title": title, "xs": [*xs], "unit": unit, "lines": drawn, **more}


def _known(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value


def page(document: Document) -> str:
    """A page of its own: nothing is loaded from elsewhere."""
    title = html.escape(str(document["title"]))
    head = f'<meta charset="utf-8"><title>{title}</title>{_STYLE}'
    drawn = _drawn(document, "max-width:1200px;margin:0 auto")
    return f'<!doctype html><html lang="en"><head>{head}</head>{_OUTSIDE}{drawn}</body></html>\n'


def section(document: Document) -> str:
    """The last part of somebody else's page."""
    return _STYLE + _drawn(document, "max-width:1200px;margin:2rem auto 4rem;padding:0 24px")


def following(title: str, url: str) -> str:
    """A page that asks `url` for its document every two seconds."""
    refresh = (
        'const refresh = async () => drawTokens(document.querySelector(".tokens"), '
        f"await (await fetch({json.dumps(url)})).json());\nrefresh(); setInterval(refresh, 2000);"
    )
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title>{_STYLE}'
    body = f'{_OUTSIDE}<div class="tokens"></div>{_SCRIPT}<script>\n{refresh}\n</script></body>'
    return f'<!doctype html><html lang="en"><head>{head}</head>{body}</html>'


def _drawn(document: Document, style: str) -> str:
    # A text may hold `</script>`; "<\\/" is the same to JSON.
    data = json.dumps(document).replace("</", "<\\/")
    draw = f"<script>drawTokens(document.getElementById('token-figures'), {data})</script>"
    return f'<div class="tokens" id="token-figures" style="{style}"></div>{_SCRIPT}{draw}'
