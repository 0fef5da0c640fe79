"""The one page of figures, drawn by the browser from one JSON document, without a library and without a network.

Reports of runs and sweeps, the section in Locust's report and the page of a running test are the same page with other
documents. Owns the look; what a document holds is decided where its figures come from.
"""

from __future__ import annotations

import html
import json
from typing import Any

BLUE, ORANGE, GREEN, RED, GREY = "#2f6db3", "#d9822b", "#3a8f5c", "#c0392b", "#7a7f87"
Document = dict[str, Any]
"""`title`, `facts` (a line each); all else may be left out:

`notes`: [kind, text], kind "good" or "bad"; `tiles`: [value, label];
`charts`: title, `xs` (rising numbers), `unit` of xs, `lines` ([name, colour, ys], null where nothing was measured),
`limit` (a y that is drawn as a line), `limit_x`, `hollow` (for each x whether its points are);
`tables`: title, `head`, `rows` of texts; `texts`: [title, text].
"""

_STYLE = """<style>
.tokens{font:14px/1.45 system-ui,sans-serif;color:#1d2530}
.tokens h1{font-size:1.25rem;margin:0 0 .2rem}.tokens .facts{color:#5b6470;margin:0 0 1rem}
.tokens h2{font-size:.95rem;margin:0 0 .3rem}.tokens .key{font-size:.8rem;margin-right:1rem}
.tokens .charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,460px),1fr));gap:1rem}
.tokens .card{background:#fff;border:1px solid #e3e6ea;border-radius:8px;padding:.8rem 1rem}
.tokens table{border-collapse:collapse;width:100%;background:#fff;margin:.3rem 0 1rem;border:1px solid #e3e6ea}
.tokens th,.tokens td{padding:.4rem .8rem;text-align:right;border-bottom:1px solid #e3e6ea}
.tokens td{font-variant-numeric:tabular-nums}
.tokens th:first-child,.tokens td:first-child{text-align:left}.tokens svg{width:100%;height:auto;display:block}
.tokens .tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(118px,1fr));gap:.8rem;margin:1rem 0}
.tokens .tiles b{display:block;font-size:1.35rem}.tokens .tiles span{color:#5b6470;font-size:.85rem}
.tokens .note{padding:.6rem 1rem}.tokens .bad{background:#fdecea;border-left:4px solid #c0392b}
.tokens .good{background:#eaf6ee;border-left:4px solid #3a8f5c}
.tokens pre{background:#fff;padding:.8rem;overflow:auto;border-radius:6px;font-size:.8rem;white-space:pre-wrap}
</style>"""

# Defines drawTokens(element, document). Every text of the document is escaped: some are a server's own words.
_SCRIPT = """<script>
const drawTokens = (() => {
  const W = 560, H = 190, LEFT = 46, RIGHT = 8, BOTTOM = 22, TOP = 8, MOST_POINTS = 40;
  const marks = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"};
  const safe = text => String(text).replace(/[&<>"]/g, mark => marks[mark]);
  const roundUp = v => {
    const unit = 10 ** Math.floor(Math.log10(v));
    return [1, 2, 4, 6, 8, 10].map(k => k * unit).find(edge => edge >= v * 0.999999);
  };
  const short = v => v.toLocaleString("en", {maximumFractionDigits: v < 10 ? 2 : v < 100 ? 1 : 0});
  const label = (x, y, anchor, text) =>
    `<text x="${x}" y="${y}" text-anchor="${anchor}" font-size="11" fill="#5b6470">${safe(text)}</text>`;
  const rule = (x1, x2, y1, y2, look) => `<line x1="${x1}" x2="${x2}" y1="${y1}" y2="${y2}" ${look}/>`;
  const key = ([name, colour]) => `<span class="key" style="color:${colour}">&#9632; ${safe(name)}</span>`;
  const chart = ({title, xs, unit = "", lines, limit = null, limit_x = null, hollow = []}) => {
    const values = lines.flatMap(line => line[2]).filter(v => v !== null);
    const top = roundUp(Math.max(...values, limit || 0) || 1);
    const first = Math.min(xs.length ? xs[0] : 0, limit_x ?? Infinity);
    const last = Math.max(xs.length ? xs[xs.length - 1] : 0, limit_x || 0);
    const x = v => LEFT + (W - LEFT - RIGHT) * (last > first ? (v - first) / (last - first) : 0.5);
    const y = v => H - BOTTOM - (H - BOTTOM - TOP) * v / top;
    let svg = "";
    for (let k = 0; k <= 4; k++) {
      svg += rule(LEFT, W - RIGHT, y(top * k / 4), y(top * k / 4), 'stroke="#e3e6ea"');
      svg += label(LEFT - 6, y(top * k / 4) + 4, "end", short(top * k / 4));
    }
    svg += label(LEFT, H - 5, "start", `${short(first)} ${unit}`);
    svg += label(W - RIGHT, H - 5, "end", `${short(last)} ${unit}`);
    const dashed = 'stroke="#c0392b" stroke-dasharray="5 4"';
    if (limit !== null) svg += rule(LEFT, W - RIGHT, y(limit), y(limit), dashed);
    if (limit_x !== null) svg += rule(x(limit_x), x(limit_x), TOP, H - BOTTOM, dashed);
    for (const [, colour, ys] of lines) {
      let path = "", pen = "M", points = "";
      ys.forEach((v, i) => {
        if (v === null) { pen = "M"; return; }
        path += `${pen}${x(xs[i]).toFixed(1)},${y(v).toFixed(1)}`; pen = "L";
        const fill = hollow[i] ? "#fff" : colour;
        points += `<circle cx="${x(xs[i])}" cy="${y(v)}" r="2.5" stroke="${colour}" fill="${fill}"/>`;
      });
      svg += `<path d="${path}" fill="none" stroke="${colour}" stroke-width="1.8"/>`;
      if (xs.length <= MOST_POINTS) svg += points;
    }
    const keys = lines.map(key).join("");
    return `<div class="card"><h2>${safe(title)}</h2>${keys}<svg viewBox="0 0 ${W} ${H}">${svg}</svg></div>`;
  };
  const cells = (row, tag) => `<tr>${row.map(cell => `<${tag}>${safe(cell)}</${tag}>`).join("")}</tr>`;
  const table = ({title, head, rows}) =>
    `<h2>${safe(title)}</h2><table>${cells(head, "th")}${rows.map(row => cells(row, "td")).join("")}</table>`;
  const tile = ([value, name]) => `<div class="card"><b>${safe(value)}</b><span>${safe(name)}</span></div>`;
  const all = (parts, draw) => (parts || []).map(draw).join("");
  return (element, page) => {
    element.innerHTML = `<h1>${safe(page.title)}</h1><p class="facts">${safe(page.facts)}</p>` +
      all(page.notes, ([kind, text]) => `<p class="note ${safe(kind)}">${safe(text)}</p>`) +
      `<div class="tiles">${all(page.tiles, tile)}</div>${all(page.tables, table)}` +
      `<div class="charts">${all(page.charts, chart)}</div>` +
      all(page.texts, ([title, text]) => `<h2>${safe(title)}</h2><pre>${safe(text)}</pre>`);
  };
})();
</script>"""

_OUTSIDE = '<body style="margin:0;padding:1.2rem 1.6rem;background:#f5f6f8">'


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
