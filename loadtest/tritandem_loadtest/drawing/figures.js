// Defines drawTokens(element, document). Every text of the document is escaped: some are a server's own words.
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
  const chart = ({title, xs, unit = "", lines, limit = null, limit_x = null, hollow = [], log = false}) => {
    const values = lines.flatMap(line => line[2]).filter(v => v !== null);
    const top = roundUp(Math.max(...values, limit || 0) || 1);
    const first = Math.min(xs.length ? xs[0] : 0, limit_x ?? Infinity);
    const last = Math.max(xs.length ? xs[xs.length - 1] : 0, limit_x || 0);
    const x = v => LEFT + (W - LEFT - RIGHT) * (last > first ? (v - first) / (last - first) : 0.5);
    const low = log ? Math.min(...values) : 0;
    const height = v => log ? Math.log(v / low) / Math.log(top / low) : v / top;
    const y = v => H - BOTTOM - (H - BOTTOM - TOP) * height(v);
    let svg = "";
    for (let k = 0; k <= 4; k++) {
      const edge = log ? low * (top / low) ** (k / 4) : top * k / 4;
      svg += rule(LEFT, W - RIGHT, y(edge), y(edge), 'stroke="#e3e6ea"');
      svg += label(LEFT - 6, y(edge) + 4, "end", short(edge));
    }
    svg += label(LEFT, H - 5, "start", `${short(first)} ${unit}`);
    svg += label(W - RIGHT, H - 5, "end", `${short(last)} ${unit}`);
    const dashed = 'stroke="#c0392b" stroke-dasharray="5 4"';
    if (limit !== null) svg += rule(LEFT, W - RIGHT, y(limit), y(limit), dashed);
    if (limit_x !== null) svg += rule(x(limit_x), x(limit_x), TOP, H - BOTTOM, dashed);
    for (const [, colour, ys, hollows = hollow] of lines) {
      let path = "", pen = "M", points = "";
      ys.forEach((v, i) => {
        if (v === null) { pen = "M"; return; }
        path += `${pen}${x(xs[i]).toFixed(1)},${y(v).toFixed(1)}`; pen = "L";
        const fill = hollows[i] ? "#fff" : colour;
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
