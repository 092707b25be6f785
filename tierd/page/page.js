"use strict";
// -- numbers for people, as tierctl writes them

const digits = (value, whole) => whole || Math.abs(value) >= 99.95 ? value.toFixed(0) : Math.abs(value) >= 9.995 ? value.toFixed(1) : value.toFixed(2);
const grouped = value => Math.round(value).toLocaleString("en-US");
const percent = share => Number.isFinite(share) ? `${(100 * share).toFixed(1)} %` : "–";
const rate = value => value >= 0.5 || !value ? `${count(value)}/s` : `${value.toFixed(2)}/s`;

function scaled(value, step, units) {
  let unit = 0;
  while (Math.abs(value) >= step * 0.9995 && unit < units.length - 1) { value /= step; unit++; }
  return [value, units[unit]];
}

function bytes(size) {
  const [value, unit] = scaled(size, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]);
  return `${digits(value, unit === "B")} ${unit}`;
}

function count(number) {
  if (Math.abs(number) < 1e5) return grouped(number);
  const [value, unit] = scaled(number, 1000, ["", "k", "M", "G", "T"]);
  return `${digits(value)} ${unit}`;
}

function time(seconds) {
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60), hours = Math.floor(minutes / 60);
  if (minutes < 60) return `${minutes} min`;
  const [whole, rest, large, small] = hours < 48 ? [hours, minutes % 60, "h", "min"] : [Math.floor(hours / 24), hours % 24, "d", "h"];
  return `${whole} ${large}` + (rest ? ` ${rest} ${small}` : "");
}

// -- elements; text is never parsed as HTML

const SVG = "http://www.w3.org/2000/svg";
const byId = id => document.getElementById(id);

function make(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function drawn(name, attributes = {}, text = "") {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

function key(colour, className = "") {
  const made = make("span", { class: `key ${className}` });
  if (colour) made.style.background = colour;
  return made;
}

function table(head, rows) {
  const cells = (name, row) => row.map((cell, place) => make(name, { class: head[place][1] || "" }, cell));
  const lines = rows.map(row => make("tr", {}, ...cells("td", row)));
  return make("table", {}, make("tr", {}, ...cells("th", head.map(([title]) => title))), ...lines);
}

function empty(host, text) {
  host.replaceChildren(make("div", { class: "empty" }, text));
}

// -- one colour for each tier, everywhere

function colourOf(tier) {
  const [kind, index] = tier.split(".");
  const share = Math.max(40, 100 - 25 * Number(index));
  return `color-mix(in oklab, var(--${kind}) ${share}%, var(--ink))`;
}

// -- a chart: lines, stacked areas or bars over one axis, with a cursor for pointer and keys

const MARGIN = { left: 62, right: 12, top: 8, bottom: 22 };

function niceStep(most, base) {
  const unit = base ** Math.floor(Math.log(Math.max(most, 1e-9)) / Math.log(base));
  const steps = base === 1024 ? [1, 2, 4, 8, 16, 32, 64, 128, 256, 512] : [1, 2, 5];
  return unit * (steps.find(step => step * unit * 4 >= most) || base);
}

class Chart {
  constructor(id) {
    this.host = byId(id);
    this.name = this.host.querySelector("h2").textContent;
    this.body = this.host.appendChild(make("div", { class: "drawing" }));
    this.tip = this.host.appendChild(make("div", { class: "tip", role: "status" }));
    this.at = null;
    new ResizeObserver(() => this.spec && this.draw(this.spec)).observe(this.host);
  }

  // spec: x ascending, ticks [[x, text]], series [{name, colour, values, dash}], text(value), title(row),
  // most: top of the axis; base: 1024 for bytes; kind: line, stack or bars; empty: words instead.
  draw(spec) {
    this.spec = spec;
    if (spec.empty) { this.tip.style.display = "none"; return empty(this.body, spec.empty); }
    const width = Math.max(200, this.body.clientWidth), height = 184;
    const svg = drawn("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, height, tabindex: 0, role: "img", "aria-label": this.words() });
    const [first, last] = spec.range;
    const layers = this.layers();
    const most = spec.most || Math.max(...layers.flat().map(([, high]) => high).filter(Number.isFinite), 0) || 1;
    const step = spec.most ? most / 4 : niceStep(most, spec.base || 10), top = Math.ceil(most / step - 1e-9) * step;
    this.x = value => MARGIN.left + (value - first) / (last - first || 1) * (width - MARGIN.left - MARGIN.right);
    this.y = value => height - MARGIN.bottom - Math.min(1, value / top) * (height - MARGIN.top - MARGIN.bottom);
    this.bottom = height - MARGIN.bottom;
    this.axes(svg, step, top, width);
    const plot = svg.appendChild(drawn("g"));
    layers.forEach((layer, place) => this.layer(plot, layer, spec.series[place]));
    this.cursor = svg.appendChild(drawn("line", { class: "cursor", y1: MARGIN.top, y2: this.bottom, visibility: "hidden" }));
    svg.addEventListener("pointermove", event => this.point(this.nearest(event.offsetX), event.offsetX));
    svg.addEventListener("pointerleave", () => this.point(null));
    svg.addEventListener("blur", () => this.point(null));
    svg.addEventListener("keydown", event => this.press(event));
    const hadFocus = this.body.contains(document.activeElement);
    this.body.replaceChildren(svg, this.legend());
    if (hadFocus) svg.focus({ preventScroll: true });
    this.point(this.at === null ? null : Math.min(this.at, spec.x.length - 1));
  }

  layers() {
    const { series, kind } = this.spec, sums = new Float64Array(this.spec.x.length);
    return series.map(({ values }) => values.map((value, i) => {
      const low = kind === "stack" ? sums[i] : 0;
      if (kind === "stack" && Number.isFinite(value)) sums[i] += value;
      return [low, low + value];
    }));
  }

  axes(svg, step, top, width) {
    for (let value = 0; value <= top * 1.001; value += step) {
      const y = this.y(value);
      svg.append(drawn("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y, y2: y }));
      svg.append(drawn("text", { x: MARGIN.left - 7, y: y + 4, "text-anchor": "end" }, this.spec.text(value).replace(/\.0+ /, " ")));
    }
    let free = 0;
    for (const [value, text] of this.spec.ticks) {
      const x = this.x(value), half = text.length * 3.4;
      if (x - half < free || x < MARGIN.left - 1) continue;
      const shift = Math.min(0, width - half - x - 1);
      svg.append(drawn("text", { x: x + shift, y: this.bottom + 16, "text-anchor": "middle" }, text));
      free = x + half + 8;
    }
  }

  layer(plot, layer, { colour, dash }) {
    const { x, kind } = this.spec;
    if (kind === "bars") return layer.forEach(([, high], i) => this.bar(plot, i, high, colour));
    let line = "", area = "", run = [];
    const close = () => {
      if (!run.length) return;
      const upper = run.map(i => `${this.x(x[i]).toFixed(1)},${this.y(layer[i][1]).toFixed(1)}`);
      const lower = run.map(i => `${this.x(x[i]).toFixed(1)},${this.y(layer[i][0]).toFixed(1)}`).reverse();
      line += `M${upper.join("L")}${run.length === 1 ? "h1" : ""}`;
      area += `M${upper.join("L")}L${lower.join("L")}Z`;
      run = [];
    };
    layer.forEach(([, high], i) => {
      const isFar = run.length && this.spec.gap && x[i] - x[run.at(-1)] > this.spec.gap;
      if (!Number.isFinite(high) || isFar) close();
      if (Number.isFinite(high)) run.push(i);
    });
    close();
    if (kind === "stack") { plot.appendChild(drawn("path", { class: "mark area", d: area })).style.fill = colour; return; }
    const made = plot.appendChild(drawn("path", { class: "mark", d: line, fill: "none", "stroke-width": 1.8, "stroke-linejoin": "round", "stroke-dasharray": dash || "none" }));
    made.style.stroke = colour;
    if (this.spec.dots) layer.forEach(([, high], i) => { plot.appendChild(drawn("circle", { cx: this.x(x[i]), cy: this.y(high), r: 3 })).style.fill = colour; });
  }

  bar(plot, i, value, colour) {
    const half = Math.min(24, (this.x(1) - this.x(0)) * .36), y = this.y(value);
    const made = drawn("rect", { class: "mark", x: this.x(i) - half, y, width: 2 * half, height: this.bottom - y, rx: 2 });
    made.style.fill = colour;
    plot.append(made);
  }

  legend() {
    const { series, kind, text } = this.spec;
    if (kind === "bars") return "";
    const last = values => Number.isFinite(values.at(-1)) ? text(values.at(-1)) : "–";
    return make("ul", { class: "legend" }, ...series.map(one =>
      make("li", {}, key(one.colour, one.dash ? "dashed" : ""), one.name, " ", make("b", {}, one.now || last(one.values)))));
  }

  words() {
    const { series, text } = this.spec;
    return `${this.name}: ` + series.map(one => `${one.name} ${Number.isFinite(one.values.at(-1)) ? text(one.values.at(-1)) : "no value"}`).join(", ");
  }

  nearest(x) {
    let best = null, least = Infinity;
    this.spec.x.forEach((value, i) => {
      const far = Math.abs(this.x(value) - x);
      if (far < least && this.x(value) >= MARGIN.left - 1) { least = far; best = i; }
    });
    return best;
  }

  press(event) {
    const end = this.spec.x.length - 1, at = this.at === null ? end + 1 : this.at;
    const next = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: end }[event.key];
    if (event.key === "Escape") return this.point(null);
    if (next === undefined) return;
    event.preventDefault();
    this.point(Math.max(0, Math.min(end, next)));
  }

  point(at) {
    this.at = at;
    const isShown = at !== null && this.spec.x.length > 0;
    this.cursor.setAttribute("visibility", isShown ? "visible" : "hidden");
    this.tip.style.display = isShown ? "block" : "none";
    if (!isShown) return;
    const x = this.x(this.spec.x[at]);
    this.cursor.setAttribute("x1", x);
    this.cursor.setAttribute("x2", x);
    const { series, text, title, tip } = this.spec;
    const lines = tip ? tip(at) : series.map(one => [one.name, Number.isFinite(one.values[at]) ? text(one.values[at]) : "–", one.colour]);
    show(this.tip, this.host, x + 14, title(at), lines);
  }
}

// Fills a tip and puts it beside x, a distance from the left of its drawing.
function show(tip, host, x, title, lines) {
  tip.replaceChildren(make("p", {}, title), ...lines.map(([name, value, colour]) =>
    make("div", {}, colour ? make("span", {}, key(colour), name) : make("span", {}, name), make("b", {}, value))));
  tip.style.display = "block";
  const isRight = x > host.clientWidth / 2;
  tip.style.left = isRight ? "auto" : `${Math.round(x + 12)}px`;
  tip.style.right = isRight ? `${Math.round(host.clientWidth - x + 12)}px` : "auto";
  tip.style.top = "58px";
}

// -- a tier's pages as squares

const STEPS = {
  age_s: [[10, "10 s"], [60, "1 min"], [600, "10 min"], [3600, "1 h"], [86400, "1 day"], [Infinity, "older"]],
  hits: [[64, "64 and more"], [16, "16"], [4, "4"], [2, "2"], [1, "1"], [0, "none"]],
};
const stepOf = (by, value) => by === "age_s" ? STEPS.age_s.findIndex(([limit]) => value < limit) : STEPS.hits.findIndex(([limit]) => value >= limit);

class PageMap {
  constructor(tier, host) {
    this.tier = tier;
    this.figure = host.appendChild(make("figure", {}, this.caption = make("figcaption")));
    this.figure.style.setProperty("--tier", colourOf(tier.name));
    this.body = this.figure.appendChild(make("div"));
    this.tip = this.figure.appendChild(make("div", { class: "tip", role: "status" }));
    this.at = null;
    new ResizeObserver(() => this.cells && this.draw(this.cells, this.by)).observe(this.figure);
  }

  draw(cells, by) {
    [this.cells, this.by] = [cells, by];
    const total = cells.pages.length, width = Math.max(200, this.body.clientWidth);
    const most = Math.max(1, Math.round(width / Math.max(6.5, Math.sqrt(width * 190 / total))));
    const left = columns => Math.ceil(total / columns) * columns - total;
    this.columns = Array.from({ length: Math.min(most, 5) }, (_, less) => most - less).reduce((best, one) => left(one) < left(best) ? one : best);
    this.size = width / this.columns;
    const height = Math.ceil(total / this.columns) * this.size;
    const paths = ["", "", "", "", "", ""];
    let none = "";
    for (let i = 0; i < total; i++) {
      none += this.square(i, 1);
      if (cells.pages[i]) paths[stepOf(by, cells[by][i])] += this.square(i, this.part(i) > .8 ? 1 : Math.max(.35, Math.sqrt(this.part(i))));
    }
    const svg = drawn("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, height, tabindex: 0, role: "img", "aria-label": `Pages of ${this.tier.name}` });
    svg.append(drawn("path", { class: "void", d: none }));
    paths.forEach((d, step) => d && svg.append(drawn("path", { class: `mark s${step}`, d })));
    this.chosen = svg.appendChild(drawn("path", { class: "chosen" }));
    svg.addEventListener("pointermove", event => this.point(Math.floor(event.offsetY / this.size) * this.columns + Math.min(this.columns - 1, Math.floor(event.offsetX / this.size))));
    svg.addEventListener("pointerleave", () => this.point(null));
    svg.addEventListener("blur", () => this.point(null));
    svg.addEventListener("keydown", event => this.press(event));
    const hadFocus = this.body.contains(document.activeElement);
    this.body.replaceChildren(svg);
    if (hadFocus) svg.focus({ preventScroll: true });
    const pages = cells.pages.reduce((sum, one) => sum + one, 0);
    this.caption.replaceChildren(key(colourOf(this.tier.name)), make("b", {}, this.tier.name), ` ${grouped(pages)} pages; a square is ${bytes(this.tier.capacity / total)}`);
    this.point(this.at);
  }

  part(i) { return Math.min(1, this.cells.bytes[i] / (this.tier.capacity / this.cells.pages.length)); }

  square(i, share) {
    const side = (this.size - 1.5) * share, x = (i % this.columns) * this.size + (this.size - 1.5 - side) / 2;
    const y = Math.floor(i / this.columns) * this.size + (this.size - 1.5 - side) / 2;
    return `M${x.toFixed(1)} ${y.toFixed(1)}h${side.toFixed(1)}v${side.toFixed(1)}h-${side.toFixed(1)}z`;
  }

  press(event) {
    const at = this.at ?? 0, end = this.cells.pages.length - 1;
    const next = { ArrowLeft: at - 1, ArrowRight: at + 1, ArrowUp: at - this.columns, ArrowDown: at + this.columns, Home: 0, End: end }[event.key];
    if (event.key === "Escape") return this.point(null);
    if (next === undefined) return;
    event.preventDefault();
    this.point(Math.max(0, Math.min(end, next)));
  }

  point(at) {
    const { cells, tier } = this;
    this.at = at === null || at < 0 || at >= cells.pages.length ? null : at;
    this.chosen.setAttribute("d", this.at === null ? "" : this.square(this.at, 1.1));
    if (this.at === null) { this.tip.style.display = "none"; return; }
    const each = tier.capacity / cells.pages.length, pages = cells.pages[at];
    const lines = pages ? [["pages", grouped(pages)], ["in use", percent(this.part(at))], ["last use", `${time(cells.age_s[at])} ago`], ["hits of a page", String(cells.hits[at])]] : [["free", ""]];
    show(this.tip, this.figure, (at % this.columns) * this.size, `from ${bytes(at * each)}`, lines);
    this.tip.style.top = `${Math.floor(at / this.columns) * this.size + 44}px`;
  }
}

// -- the daemon's answers: rows are samples of totals, in the order of `columns`

const SAMPLES = 720, POLL_MS = 2500;
const REASONS = ["absent", "no_room", "busy", "failed", "other"];
const seen = { run: "", last: 0, walk: 0, rows: [], map: null, answer: null, lostAt: 0, seconds: 900, by: "age_s" };
const charts = {}, maps = new Map();

const column = name => seen.answer.columns.indexOf(name);
const values = name => { const place = column(name); return seen.rows.map(row => row[place]); };
const latest = name => seen.rows.length ? seen.rows.at(-1)[column(name)] : 0;
const tiers = () => seen.answer.tiers;

// Growth of a total over so many samples, at each row; NaN at the first.
function growth(name, samples) {
  const totals = values(name);
  return totals.map((total, i) => i ? total - totals[Math.max(0, i - samples)] : NaN);
}

function rates(name, samples) {
  const at = values("uptime_s");
  return growth(name, samples).map((grown, i) => grown / (at[i] - at[Math.max(0, i - samples)]));
}

const sum = lists => lists.length ? lists[0].map((_, i) => lists.reduce((total, list) => total + list[i], 0)) : seen.rows.map(() => 0);

function shares(samples) {
  const hits = tiers().map(tier => growth(`hit:${tier.name}`, samples));
  const asked = sum([...hits, ...REASONS.map(reason => growth(`missed:${reason}`, samples))]);
  return hits.map(list => list.map((hit, i) => asked[i] ? hit / asked[i] : NaN));
}

// -- sections

function overTime(more) {
  const x = values("uptime_s"), now = seen.answer.uptime_s;
  const first = Math.max(now - seen.seconds, Math.min(x[0] ?? now, now - 60));
  const from = x.findIndex(at => at >= first), keep = list => list.slice(Math.max(0, from - 1));
  const step = [10, 30, 60, 120, 300, 900].find(step => (now - first) / step <= 5) || 900;
  const name = ago => step < 60 ? `${ago} s` : ago < 3600 ? `${ago / 60} min` : `${ago / 3600} h`;
  const ticks = [];
  for (let ago = Math.floor((now - first) / step) * step; ago > 0; ago -= step) ticks.push([now - ago, `−${name(ago)}`]);
  const shown = keep(x).map(at => Math.max(at, first));
  return {
    kind: "line", range: [first, now], gap: 4 * seen.answer.interval_s, x: shown, ticks: [...ticks, [now, "now"]],
    title: i => `${time(Math.max(0, now - shown[i]))} ago`, ...more,
    series: more.series.map(one => ({ ...one, values: keep(one.values) })),
  };
}

function drawTimes() {
  if (!seen.rows.length) return;
  charts.occupancy.draw(overTime({
    most: 1, text: value => `${Math.round(100 * value)} %`,
    series: tiers().map(tier => ({ name: tier.name, colour: colourOf(tier.name), values: values(`used:${tier.name}`).map(used => used / tier.capacity) })),
  }));
  const parts = shares(12), isAsked = parts.some(list => list.some(Number.isFinite));
  charts.hits.draw(overTime({
    kind: "stack", most: 1, text: value => `${Math.round(100 * value)} %`, empty: isAsked ? "" : "No tokens asked for yet.",
    series: tiers().map((tier, i) => ({ name: tier.name, colour: colourOf(tier.name), values: parts[i] })),
  }));
  const missed = REASONS.filter(reason => reason === "absent" || latest(`missed:${reason}`));
  charts.misses.draw(overTime({
    kind: "stack", text: rate, empty: REASONS.some(reason => latest(`missed:${reason}`)) ? "" : "No misses yet.",
    series: missed.map(reason => ({ name: reason.replace("_", " "), colour: `var(--${reason})`, values: rates(`missed:${reason}`, 12) })),
  }));
  const far = tiers().filter(tier => tier.kind !== tiers()[0].kind);  // all bytes pass through one of them
  const moved = ["read", "written"].flatMap(way => (far.length ? far : tiers()).map(tier => ({
    name: `${tier.name} ${way}`, colour: colourOf(tier.name), dash: way === "written" ? "5 3" : "", values: rates(`${way}:${tier.name}`, 3),
  })));
  charts.transfers.draw(overTime({
    base: 1024, text: value => `${bytes(value)}/s`, series: moved,
    empty: tiers().some(tier => latest(`read:${tier.name}`) + latest(`written:${tier.name}`)) ? "" : "No bytes moved between tiers yet.",
  }));
}

function drawDepths() {
  const depths = seen.map ? seen.map.depths : [];
  const last = depths.findLastIndex(([, , blocks]) => blocks);
  const shown = depths.slice(0, last + 1);
  const name = ([low]) => low ? count(low) : "0";
  charts.depths.draw({
    kind: "bars", range: [-.5, Math.max(1, shown.length) - .5], x: shown.map((_, i) => i), ticks: shown.map(([low, high], i) => [i, low ? count(low) : `< ${count(high)}`]),
    text: value => value >= 10 || Number.isInteger(value) ? count(value) : value.toFixed(1), title: i => `${name(shown[i])} to ${shown[i][1] ? count(shown[i][1]) : "the end"} tokens`,
    tip: i => [["blocks held", grouped(shown[i][2])], ["their hits", grouped(shown[i][3])]],
    series: [{ name: "hits of a block", colour: "var(--dim)", values: shown.map(([, , blocks, hits]) => blocks ? hits / blocks : 0) }],
    empty: shown.length ? "" : seen.map ? "No blocks held yet." : "Looking at the pages.",
  });
}

function drawCeiling() {
  const ceiling = seen.answer.ceiling, all = ceiling ? ceiling.windows.filter(one => one.points.length && one.tokens) : [];
  const windows = all.filter((one, i) => !i || one.covered_s > all[i - 1].seconds);  // a young daemon's are equal
  const limited = one => one.points.filter(([times]) => times);
  const points = windows.length ? limited(windows.at(-1)) : [], x = points.map(([times]) => Math.log2(times));
  const at = (one, wanted) => percent(one.points.find(([times]) => times === wanted)?.[2]);
  const told = one => `${at(one, 1)}; with twice ${at(one, 2)}; without a limit ${at(one, 0)}`;
  const factor = one => one < 1 ? `1/${Math.round(1 / one)}` : String(+one.toPrecision(3));
  charts.ceiling.draw({
    kind: "line", dots: true, most: 1, text: value => `${Math.round(100 * value)} %`, range: [Math.min(...x), Math.max(...x)], x,
    ticks: x.map((place, i) => [place, `${factor(points[i][0])} ×`]), title: i => `${factor(points[i][0])} × today's: ${bytes(points[i][1])}`,
    series: windows.map((one, i) => ({ name: `over ${time(Math.min(one.seconds, one.covered_s))}`, now: told(one), colour: "var(--ink)", dash: ["2 3", "6 3", ""][3 - windows.length + i], values: limited(one).map(point => point[2]) })),
    empty: !ceiling ? "The ceiling is not recorded." : ceiling.trouble || (windows.length ? "" : "No tokens asked for yet."),
  });
}

function drawMaps() {
  if (!seen.map) return;
  const host = document.querySelector("#map .maps");
  for (const tier of tiers()) {
    if (!seen.map.tiers[tier.name]) continue;
    if (!maps.has(tier.name)) maps.set(tier.name, new PageMap(tier, host));
    maps.get(tier.name).tier = tier;
    maps.get(tier.name).draw(seen.map.tiers[tier.name], seen.by);
  }
  const steps = STEPS[seen.by].map(([, text], step) => make("span", {}, key("", `s${step}`), text));
  document.querySelector("#map .steps").replaceChildren(seen.by === "hits" ? "hits of a page" : "used within", ...steps);
}

function drawTiles() {
  const [now] = [shares(12)].map(parts => sum(parts).at(-1));
  const hits = tiers().reduce((total, tier) => total + latest(`hit:${tier.name}`), 0);
  const missed = REASONS.reduce((total, reason) => total + latest(`missed:${reason}`), 0);
  const asked = [...tiers().map(tier => `hit:${tier.name}`), ...REASONS.map(reason => `missed:${reason}`)].map(name => rates(name, 12));
  const open = latest("sessions"), busy = rates("cpu_s", 12).at(-1);
  const tiles = [
    ["Hit ratio, last minute", percent(now), `${percent(hits / (hits + missed))} since start`],
    ["Tokens asked for", Number.isFinite(sum(asked).at(-1)) ? rate(sum(asked).at(-1)) : "–", `${count(hits + missed)} in all`],
    ["Blocks held", count(latest("blocks")), "in all tiers"],
    ["Leases", grouped(latest("leases")), `${grouped(open)} session${open === 1 ? "" : "s"}`],
    ["Transfers in flight", grouped(latest("transfers")), `${grouped(latest("queued"))} batches queued`],
    ["Processor", Number.isFinite(busy) ? percent(busy) : "–", "of a core"],
  ];
  byId("tiles").replaceChildren(...tiles.map(([name, value, more]) => make("div", {}, make("dt", {}, name), make("dd", {}, value, make("small", {}, more)))));
}

function drawTiers() {
  const last = (name, samples) => { const found = rates(name, samples).at(-1); return found >= 1 ? `${bytes(found)}/s` : "–"; };
  const asked = tiers().reduce((total, tier) => total + latest(`hit:${tier.name}`), 0) + REASONS.reduce((total, reason) => total + latest(`missed:${reason}`), 0);
  const rows = tiers().flatMap(tier => {
    const used = latest(`used:${tier.name}`), fill = make("div"), trough = make("div", { class: "trough" }, fill);
    fill.style.width = `${100 * used / tier.capacity}%`;
    fill.style.background = colourOf(tier.name);
    const name = make("span", {}, key(colourOf(tier.name)), make("b", {}, tier.name), tier.codec ? make("span", { class: "dim spare" }, ` ${tier.codec}`) : "");
    return [[name, trough, `${bytes(used)} of ${bytes(tier.capacity)}`, percent(used / tier.capacity), grouped(latest(`pages:${tier.name}`)),
      asked ? percent(latest(`hit:${tier.name}`) / asked) : "–", last(`read:${tier.name}`, 3), last(`written:${tier.name}`, 3), grouped(latest(`evicted:${tier.name}`))]];
  });
  const head = [["tier"], ["", "fill"], ["in use", "spare"], ["full"], ["pages", "spare"], ["hits"], ["read", "spare"], ["written", "spare"], ["evicted", "spare"]];
  const troubles = tiers().filter(tier => tier.trouble || !tier.serving || !tier.writable)
    .map(tier => make("p", { class: "trouble" }, `${tier.name}: ${tier.trouble || (tier.serving ? "takes no new blocks" : "out of service")}`));
  document.querySelector("#tiers .body").replaceChildren(table(head, rows), ...troubles);
}

function drawDecisions() {
  const host = document.querySelector("#decisions .body"), found = seen.answer.decisions;
  if (!found) return empty(host, "Decisions are not recorded.");
  if (!found.length) return empty(host, "No misses yet.");
  const head = [["ago"], ["call", "text spare"], ["missed"], ["of tokens"], ["why", "text"], ["tier", "text spare"]];
  host.replaceChildren(table(head, found.map(one => [time(one.ago_s), one.kind, count(one.missed), count(one.asked), one.cause.replaceAll("_", " "), one.tier || "–"])),
    make("p", {}, make("code", {}, "tierctl explain --misses"), " tells more."));
}

function drawSessions() {
  const host = document.querySelector("#sessions .body"), { all, shown } = seen.answer.sessions;
  if (!all) return empty(host, "No client is connected.");
  const head = [["engine", "text"], ["state", "text spare"], ["age", "spare"], ["leases"], ["pinned"], ["reserved", "spare"]];
  const rows = shown.map(one => [one.engine || "client", one.state, time(one.age_s), grouped(one.leases), bytes(one.pinned), bytes(one.reserved)]);
  host.replaceChildren(table(head, rows), ...(all > shown.length ? [make("p", {}, `${grouped(all - shown.length)} more`)] : []));
}

function drawNotices() {
  const found = seen.answer.notices;
  byId("notices").hidden = !found.length;
  document.querySelector("#notices .body").replaceChildren(make("ul", {}, ...found.map(text => make("li", {}, text))));
}

function drawAbout() {
  const { state, version, instance, uptime_s } = seen.answer;
  byId("state").textContent = state;
  byId("state").className = state === "serving" ? "well" : "ill";
  byId("about").textContent = `version ${version}, up ${time(uptime_s)}, instance ${instance.slice(0, 8)}`;
}

function drawAll() {
  for (const draw of [drawAbout, drawTiles, drawTiers, drawTimes, drawDepths, drawCeiling, drawDecisions, drawSessions, drawNotices]) draw();
}

// -- polling

function take(answer) {
  if (answer.run !== seen.run) Object.assign(seen, { run: answer.run, rows: [], map: null });
  seen.answer = answer;
  seen.last = answer.last;
  seen.rows = [...seen.rows, ...answer.rows].slice(-SAMPLES);
  drawAll();
  if (answer.walk) {
    [seen.map, seen.walk] = [answer.walk, answer.walk.number];
    drawMaps();
    drawDepths();
  }
}

function warn(text) {
  byId("banner").hidden = !text;
  if (byId("banner").textContent !== text) byId("banner").textContent = text;
}

async function poll() {
  try {
    const wanted = new URLSearchParams({ run: seen.run, since: seen.last, walk: seen.walk });
    const reply = await fetch(`page.json?${wanted}`, { cache: "no-store", signal: AbortSignal.timeout(5000) });
    if (!reply.ok) throw new Error(`it answers ${reply.status}`);
    take(await reply.json());
    seen.lostAt = 0;
    warn("");
  } catch (error) {
    seen.lostAt ||= Date.now();
    [byId("state").textContent, byId("state").className] = ["out of reach", "ill"];
    const why = error.message.startsWith("it answers") ? error.message : "it does not answer";
    warn(`The daemon is out of reach since ${new Date(seen.lostAt).toLocaleTimeString("en-GB")}: ${why}. Trying again. The figures are of that time.`);
  }
  if (document.hidden) await new Promise(shown => document.addEventListener("visibilitychange", shown, { once: true }));
  setTimeout(poll, POLL_MS);
}

function choose(group, name, chosen, change) {
  for (const button of document.querySelectorAll(`${group} button`)) {
    const isOn = () => button.setAttribute("aria-pressed", String(button.dataset[name] === String(chosen())));
    button.addEventListener("click", () => {
      change(button.dataset[name]);
      for (const other of document.querySelectorAll(`${group} button`)) other.setAttribute("aria-pressed", String(other === button));
    });
    isOn();
  }
}

for (const id of ["occupancy", "hits", "misses", "transfers", "depths", "ceiling"]) charts[id] = new Chart(id);
choose("#windows", "seconds", () => seen.seconds, value => { seen.seconds = Number(value); if (seen.answer) drawTimes(); });
choose("#map", "by", () => seen.by, value => { seen.by = value; drawMaps(); });
poll();
