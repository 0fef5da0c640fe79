"""Charts and the token-level table, drawn by the browser without a library: a page that follows a running test, and the
same as a section of Locust's report, which holds its figures itself."""

from __future__ import annotations

import json
from typing import Any

_STYLE = """<style>
.tokens{font:14px/1.45 system-ui,sans-serif;color:#1d2530}
.tokens h1{font-size:1.25rem;margin:0 0 .2rem}.tokens .facts{color:#5b6470;margin:0 0 1rem}
.tokens .charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,460px),1fr));gap:1rem}
.tokens .card{background:#fff;border:1px solid #e3e6ea;border-radius:8px;padding:.8rem 1rem}
.tokens .card h2{font-size:.95rem;margin:0 0 .3rem}.tokens .key{font-size:.8rem;margin-right:1rem}
.tokens table{border-collapse:collapse;width:100%;background:#fff;margin-top:1rem;border:1px solid #e3e6ea}
.tokens th,.tokens td{padding:.4rem .8rem;text-align:right;border-bottom:1px solid #e3e6ea}
.tokens td{font-variant-numeric:tabular-nums}
.tokens th:first-child,.tokens td:first-child{text-align:left}.tokens svg{width:100%;height:auto;display:block}
</style>"""

# Defines drawTokens(element, figures); `figures` is what `LiveFigures.figures` returns.
_SCRIPT = """<script>
const drawTokens = (() => {
  const CHARTS = [
    ["Time to first token, ms", [["ttft_p50", "p50", "#2f6db3"], ["ttft_p99", "p99", "#d9822b"]]],
    ["Inter-token latency, ms", [["itl_p50", "p50", "#2f6db3"], ["itl_p99", "p99", "#d9822b"]]],
    ["Output tokens of ended requests, per second", [["tokens", "tokens", "#3a8f5c"]]],
    ["Ended requests, per second", [["completed", "completed", "#3a8f5c"], ["failed", "failed", "#c0392b"]]],
  ];
  const W = 560, H = 190, LEFT = 46, BOTTOM = 22, TOP = 8;
  const roundUp = v => {
    const unit = 10 ** Math.floor(Math.log10(v));
    return [1, 2, 4, 6, 8, 10].map(k => k * unit).find(edge => edge >= v);
  };
  const label = (x, y, anchor, text) =>
    `<text x="${x}" y="${y}" text-anchor="${anchor}" font-size="11" fill="#5b6470">${text}</text>`;
  const key = ([, name, colour]) => `<span class="key" style="color:${colour}">&#9632; ${name}</span>`;
  const chart = (title, lines, rows) => {
    const values = lines.flatMap(([name]) => rows.map(r => r[name])).filter(v => v !== null);
    const top = roundUp(Math.max(...values, 1));
    const x = i => LEFT + (W - LEFT - 8) * (rows.length > 1 ? i / (rows.length - 1) : 0.5);
    const y = v => H - BOTTOM - (H - BOTTOM - TOP) * v / top;
    let svg = "";
    for (let k = 0; k <= 4; k++) {
      const v = top * k / 4, digits = Number.isInteger(top / 4) ? 0 : 1;
      svg += `<line x1="${LEFT}" x2="${W - 8}" y1="${y(v)}" y2="${y(v)}" stroke="#e3e6ea"/>`;
      svg += label(LEFT - 6, y(v) + 4, "end", v.toFixed(digits));
    }
    svg += label(LEFT, H - 5, "start", "0 s") + label(W - 8, H - 5, "end", `${rows.length} s`);
    for (const [name, , colour] of lines) {
      let path = "", pen = "M";
      rows.forEach((r, i) => {
        if (r[name] === null) { pen = "M"; return; }
        path += `${pen}${x(i).toFixed(1)},${y(r[name]).toFixed(1)}`; pen = "L";
      });
      svg += `<path d="${path}" fill="none" stroke="${colour}" stroke-width="1.8"/>`;
    }
    const keys = lines.map(key).join("");
    return `<div class="card"><h2>${title}</h2>${keys}<svg viewBox="0 0 ${W} ${H}">${svg}</svg></div>`;
  };
  const row = (cells, tag) => `<tr>${cells.map(cell => `<${tag}>${cell}</${tag}>`).join("")}</tr>`;
  return (element, figures) => {
    const ended = Object.entries(figures.outcomes).map(([word, n]) => `${word} ${n}`).join(", ");
    const tokens = figures.tokens.toLocaleString("en");
    const facts = ended ? `${ended}; ${tokens} output tokens` : "waiting for the first request";
    const names = ["metric", "samples", "p50", "p90", "p95", "p99", "max"];
    const rows = figures.table.map(r => row(names.map(n => r[n]), "td")).join("");
    element.innerHTML = `<h1>Token charts</h1><p class="facts">${facts}</p>
      <div class="charts">${CHARTS.map(([title, lines]) => chart(title, lines, figures.rows)).join("")}</div>
      ${rows ? `<table>${row(names, "th")}${rows}</table>` : ""}`;
  };
})();
</script>"""

PAGE = f"""<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Token charts</title>{_STYLE}</head>
<body style="margin:0;padding:1.2rem 1.6rem;background:#f5f6f8"><div class="tokens"></div>{_SCRIPT}<script>
const refresh = async () => drawTokens(document.querySelector(".tokens"), await (await fetch("tokens/data")).json());
refresh(); setInterval(refresh, 2000);
</script></body></html>"""

# Locust's charts tab is drawn by its own script and takes no charts of others. This puts the page above below them for
# as long as they are there.
EMBED = """<script>
setInterval(() => {
  const main = document.querySelector("main"), frame = document.getElementById("token-charts");
  const charts = main && main.querySelector("[_echarts_instance_]");
  if (!charts) { if (frame) frame.remove(); return; }
  if (!frame) {
    const made = document.createElement("iframe");
    Object.assign(made, {id: "token-charts", src: "tokens", title: "Token charts"});
    made.style.cssText = "width:100%;height:900px;border:0;border-radius:8px";
    main.append(made);
  } else if (frame.contentDocument && frame.contentDocument.body) {
    frame.style.height = `${frame.contentDocument.documentElement.scrollHeight}px`;
  }
}, 500);
</script>"""


def section(figures: dict[str, Any]) -> str:
    """The charts as the last part of a page of Locust's, figures included: the page needs no server."""
    data = json.dumps(figures).replace("</", "<\\/")
    draw = f"<script>drawTokens(document.getElementById('token-section'), {data})</script>"
    frame = (
        '<div class="tokens" id="token-section" style="max-width:1200px;margin:2rem auto 4rem;padding:0 24px"></div>'
    )
    return f"{_STYLE}{frame}{_SCRIPT}{draw}"
