"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const page = JSON.parse(byId("report-data").textContent);
  if (!window.Plotly) {
    for (const each of document.querySelectorAll(".needs-plotly")) each.hidden = true;
    byId("no-chart").hidden = false;
    return;
  }
  const config = { responsive: true, displayModeBar: false };
  const scheme = window.matchMedia("(prefers-color-scheme: dark)");
  const narrow = window.matchMedia("(max-width: 50rem)");
  const coarse = window.matchMedia("(pointer: coarse)");

  // Typed arrays travel as base64.
  const unpacked = (packed) => {
    const raw = Uint8Array.from(atob(packed.bdata), (letter) => letter.charCodeAt(0));
    const kinds = { f4: Float32Array, f8: Float64Array, i4: Int32Array, i8: BigInt64Array, u1: Uint8Array };
    return new kinds[packed.dtype](raw.buffer);
  };
  const axis = page.axis ? unpacked(page.axis) : null;
  const onAxis = (trace) => (trace.x === "axis" ? { ...trace, x: axis.subarray(trace.from || 0) } : trace);

  const painted = (layout) => {
    const style = getComputedStyle(document.body);
    const ground = scheme.matches ? "#1d1f23" : "#ffffff";
    const made = structuredClone(layout);
    made.font = { color: style.color, family: style.fontFamily, size: narrow.matches ? 11 : 12 };
    made.hoverlabel = { ...made.hoverlabel, bgcolor: ground, font: { color: style.color } };
    // A finger that scrolls past must not zoom.
    if (coarse.matches || narrow.matches) made.dragmode = false;
    if (axis && axis.length <= (narrow.matches ? 8 : 16) && made.xaxis.title.text === "step") made.xaxis.dtick = 1;
    return made;
  };
  const marked = (layout) => {
    if (!page.first) return layout;
    const line = { color: "#c62828", width: 1.5, dash: "dash" };
    const at = { x0: page.first, x1: page.first, yref: "paper", y0: 0, y1: 1 };
    layout.shapes = [...(layout.shapes || []), { type: "line", ...at, line }];
    return layout;
  };

  const values = page.values && byId("values");
  const distance = page.distance && byId("distance");
  const map = page.map && byId("map");
  const chosen = (id, otherwise) => (byId(id) ? byId(id).value : otherwise);
  // Where all arms are shown, those are held against each other that part first.
  const chosenPair = () => {
    const pair = chosen("pair", "all");
    return pair === "all" ? page.pair || 0 : Number(pair);
  };
  const ticked = (id) => Boolean(byId(id) && byId(id).checked);

  const drawValues = () => {
    const metric = Number(chosen("metric", 0));
    const pair = chosen("pair", "all");
    const runs = pair === "all" || !page.pairs[pair] ? null : [page.pairs[pair].a, page.pairs[pair].b];
    const data = page.values.data.filter(
      (trace) => trace.meta.metric === metric && (!runs || runs.includes(trace.meta.run)));
    const layout = marked(painted(page.values.layout));
    layout.yaxis.title.text = page.metrics[metric];
    layout.yaxis.type = ticked("log") ? "log" : "linear";
    layout.yaxis.nticks = 8;
    return Plotly.react(values, data.map(onAxis), layout, config);
  };

  const drawDistance = () => {
    const shown = chosenPair();
    const data = page.distance.data.filter((trace) => !trace.meta || trace.meta.pair === shown);
    const layout = painted(page.distance.layout);
    layout.yaxis.type = chosen("scale", "log");
    if (layout.yaxis.type === "linear") {
      for (const key of ["range", "dtick"]) delete layout.yaxis[key];
      layout.yaxis.rangemode = "tozero";
    }
    const none = byId("no-distance");
    none.hidden = data.length > 0;
    distance.hidden = data.length === 0;
    return data.length ? Plotly.react(distance, data.map(onAxis), layout, config) : null;
  };

  const cells = new Map();
  const ranksOf = (pair) => {
    if (!cells.has(pair)) {
      const flat = unpacked(page.map.pairs[pair]);
      const count = page.map.ranks.length;
      const wide = flat.length / count;
      cells.set(pair, Array.from({ length: count }, (_, at) => flat.subarray(at * wide, (at + 1) * wide)));
    }
    return cells.get(pair);
  };
  const differs = (row) => row.some((code) => code !== 0 && code !== 255);
  let rows = [];

  const drawMap = () => {
    const all = ranksOf(chosenPair());
    rows = all.map((row, at) => ({ rank: page.map.ranks[at], row }));
    if (ticked("differing")) rows = rows.filter((each) => differs(each.row));
    byId("no-rank").hidden = rows.length > 0;
    map.hidden = rows.length === 0;
    const used = new Set();
    for (const each of rows) for (const code of each.row) used.add(code);
    const legend = page.map.legend.filter((each) => used.has(each.code));
    const place = new Map(legend.map((each, at) => [each.code, at]));
    drawLegend(legend);
    byId("map-count").textContent = `${rows.length} of ${all.length} rank${all.length === 1 ? "" : "s"}`;
    if (!rows.length) return null;
    const scale = legend.flatMap((each, at) => [
      [at / legend.length, each.color],
      [(at + 1) / legend.length, each.color],
    ]);
    const trace = {
      type: "heatmap",
      x: axis,
      y: rows.map((_, at) => at),
      z: rows.map((each) => Uint8Array.from(each.row, (code) => place.get(code))),
      colorscale: scale,
      zmin: -0.5,
      zmax: legend.length - 0.5,
      showscale: false,
      hoverinfo: "none",
      ygap: rows.length <= 64 ? 1 : 0,
    };
    const layout = marked(painted(page.map.layout));
    const every = Math.ceil(rows.length / (narrow.matches ? 8 : 16));
    const ticks = rows.map((_, at) => at).filter((at) => at % every === 0);
    layout.yaxis.tickvals = ticks;
    layout.yaxis.ticktext = ticks.map((at) => String(rows[at].rank));
    layout.yaxis.range = [rows.length - 0.5, -0.5];
    layout.height = Math.max(180, Math.min(560, 90 + rows.length * 14));
    return Plotly.react(map, [trace], layout, config);
  };
  const drawLegend = (legend) => {
    const list = byId("map-legend");
    list.replaceChildren(...legend.map((each) => {
      const item = document.createElement("li");
      const swatch = document.createElement("span");
      swatch.className = "swatch";
      swatch.style.background = each.color;
      item.append(swatch, each.name);
      return item;
    }));
  };
  const say = (event) => {
    const point = event.points[0];
    const each = rows[point.y];
    const code = each.row[point.pointIndex[1]];
    const entry = page.map.legend.find((known) => known.code === code);
    const until = page.width > 1 ? ` to ${Number(point.x) + page.width - 1}` : "";
    const what = code > 0 && code < 254 ? `${entry.name} differs first` : entry.name;
    byId("map-note").textContent = `rank ${each.rank}, step ${point.x}${until}: ${what}`;
  };

  const places = { spread: "spread", attempts: "attempts-chart", times: "times-chart" };
  const figures = Object.entries(page.figures).map(([id, figure]) => [places[id], figure]).filter(([id]) => byId(id));
  const drawFigures = () => {
    for (const [id, figure] of figures) Plotly.react(byId(id), figure.data, painted(figure.layout), config);
  };
  const draw = () => {
    const names = page.pairs ? page.pairs.map((each) => each.name) : [];
    for (const each of document.querySelectorAll(".pair-name")) each.textContent = names[chosenPair()] || "";
    if (values) drawValues();
    if (distance) drawDistance();
    if (map) drawMap();
  };
  draw();
  drawFigures();
  if (map) {
    map.on("plotly_hover", say);
    map.on("plotly_click", say);
  }
  for (const id of ["metric", "pair", "log", "scale", "differing"]) if (byId(id)) byId(id).addEventListener("change", draw);
  for (const query of [scheme, narrow]) {
    query.addEventListener("change", () => {
      draw();
      drawFigures();
    });
  }
  document.documentElement.dataset.drawn = "true";
})();
