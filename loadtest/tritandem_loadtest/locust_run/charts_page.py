"""The page at /tokens: four charts and the token-level table, drawn by the browser from /tokens/data. No library."""

PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Token charts</title><style>
body{font:14px/1.45 system-ui,sans-serif;margin:0;padding:1.2rem 1.6rem;background:#f5f6f8;color:#1d2530}
h1{font-size:1.25rem;margin:0 0 .2rem}#facts{color:#5b6470;margin:0 0 1rem}
#charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(430px,1fr));gap:1rem}
.card{background:#fff;border:1px solid #e3e6ea;border-radius:8px;padding:.8rem 1rem}
.card h2{font-size:.95rem;margin:0 0 .3rem}.key{font-size:.8rem;margin-right:1rem}
table{border-collapse:collapse;width:100%;background:#fff;margin-top:1rem;border:1px solid #e3e6ea}
th,td{padding:.4rem .8rem;text-align:right;border-bottom:1px solid #e3e6ea;font-variant-numeric:tabular-nums}
th:first-child,td:first-child{text-align:left}svg{width:100%;height:190px;display:block}
</style></head><body><h1>Token charts</h1><p id="facts">waiting for the first request</p>
<div id="charts"></div><table id="table"></table><script>
const CHARTS = [
  ["Time to first token, ms", [["ttft_p50", "p50", "#2f6db3"], ["ttft_p99", "p99", "#d9822b"]]],
  ["Inter-token latency, ms", [["itl_p50", "p50", "#2f6db3"], ["itl_p99", "p99", "#d9822b"]]],
  ["Output tokens of requests that ended, per second", [["tokens", "tokens", "#3a8f5c"]]],
  ["Requests that ended, per second", [["completed", "completed", "#3a8f5c"], ["failed", "failed", "#c0392b"]]],
];
const W = 560, H = 190, LEFT = 46, BOTTOM = 22, TOP = 8;
function roundUp(v) {
  const unit = 10 ** Math.floor(Math.log10(v));
  return [1, 2, 4, 6, 8, 10].map(k => k * unit).find(edge => edge >= v);
}
const label = (x, y, anchor, text) =>
  `<text x="${x}" y="${y}" text-anchor="${anchor}" font-size="11" fill="#5b6470">${text}</text>`;
const key = ([, name, colour]) => `<span class="key" style="color:${colour}">&#9632; ${name}</span>`;
function chart(title, lines, rows) {
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
  return `<div class="card"><h2>${title}</h2>${lines.map(key).join("")}<svg viewBox="0 0 ${W} ${H}">${svg}</svg></div>`;
}
async function refresh() {
  const data = await (await fetch("tokens/data")).json();
  document.getElementById("charts").innerHTML = CHARTS.map(([t, lines]) => chart(t, lines, data.rows)).join("");
  const ended = Object.entries(data.outcomes).map(([word, n]) => `${word} ${n}`).join(", ");
  const tokens = data.tokens.toLocaleString("en");
  if (ended) document.getElementById("facts").textContent = `${ended}; ${tokens} output tokens`;
  if (data.table.length) {
    const names = ["metric", "samples", "p50", "p90", "p95", "p99", "max"];
    const rows = data.table.map(r => "<tr>" + names.map(n => `<td>${r[n]}</td>`).join("") + "</tr>").join("");
    document.getElementById("table").innerHTML = `<tr>${names.map(n => `<th>${n}</th>`).join("")}</tr>${rows}`;
  }
}
refresh(); setInterval(refresh, 2000);
</script></body></html>"""
