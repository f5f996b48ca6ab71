// Charts over steps and the distributions, drawn by plotly from the page's own JSON.

const DASHES = ["solid", "dash", "dot"];
const charts = { data: null, hidden: new Set(), smoothing: 1, runs: false, plots: [], pass: 0 };

// plotly reads a little HTML in its texts; a label is shown as it is.
function plain(text) {
  return String(text).replace(/[&<>]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[c]);
}

function labelColour(label) {
  const place = charts.data.labels.indexOf(label);
  return colour(`--c${place % 8}`);
}

function faint(rgb, alpha) {
  return rgb.replace(/^rgb\(([^)]*)\)$/, `rgba($1, ${alpha})`);
}

// A running mean over `width` points, centred, shorter at both ends.
function smooth(values, width) {
  if (width <= 1) return values;
  const half = Math.floor(width / 2);
  return values.map((_, place) => {
    const part = values.slice(Math.max(0, place - half), place + half + 1);
    return part.reduce((sum, value) => sum + value, 0) / part.length;
  });
}

function lineTraces(chart) {
  const traces = [];
  const window = chart.key === "pass1" ? 1 : charts.smoothing;
  for (const curve of chart.curves) {
    if (charts.hidden.has(curve.label)) continue;
    const tone = labelColour(curve.label);
    const dash = DASHES[curve.part % 3];
    const name = plain(curve.label) + (curve.name ? " · " + plain(curve.name) : "");
    const base = { x: curve.x, type: "scatter", mode: "lines", hoverinfo: "skip" };
    if (curve.low) {
      const edge = { ...base, line: { width: 0 }, meta: "band" };
      traces.push({ ...edge, y: smooth(curve.low, window) });
      traces.push({ ...edge, y: smooth(curve.high, window), fill: "tonexty", fillcolor: faint(tone, 0.16) });
    }
    if (charts.runs && curve.runs) {
      for (const run of curve.runs) {
        traces.push({ ...base, x: run.x || curve.x, y: smooth(run.y, window), meta: "run",
          line: { width: 0.8, color: faint(tone, 0.5), dash } });
      }
    }
    const few = curve.x.length <= 25;
    traces.push({ ...base, y: smooth(curve.y, window), name, meta: curve.metric, hoverinfo: "all",
      mode: few ? "lines+markers" : "lines", marker: { size: 5, color: tone },
      customdata: curve.n, line: { width: few ? 1.8 : 1.4, color: tone, dash },
      hovertemplate: `%{y:${chart.percent ? ".2~%" : ".4~g"}}` +
        (curve.n ? " (%{customdata} runs)" : "") + `<extra>${name}</extra>` });
  }
  return traces;
}

function passTraces(chart) {
  const traces = [];
  for (const curve of chart.curves) {
    if (charts.hidden.has(curve.label)) continue;
    const tone = labelColour(curve.label);
    const before = curve.moment === "before";
    const name = plain(curve.label) + (before ? " · before training" : "");
    const base = { x: curve.k, type: "scatter", mode: "lines", hoverinfo: "skip" };
    if (!before) {
      traces.push({ ...base, y: curve.low, line: { width: 0 }, meta: "band" });
      traces.push({ ...base, y: curve.high, line: { width: 0 }, meta: "band", fill: "tonexty",
        fillcolor: faint(tone, 0.16) });
    }
    traces.push({ ...base, y: curve.mean, name, mode: "lines+markers", meta: "pass@k", hoverinfo: "all",
      line: { color: tone, width: before ? 1.2 : 1.8, dash: before ? "dash" : "solid" },
      marker: { size: before ? 4 : 6, color: tone },
      hovertemplate: `%{y:.1%}<extra>${name}</extra>` });
  }
  return traces;
}

function histogramTraces(chart) {
  return chart.curves.filter((curve) => !charts.hidden.has(curve.label)).map((curve) => {
    const tone = labelColour(curve.label);
    const x = [], y = [];
    curve.share.forEach((share, bin) => {
      x.push(curve.edges[bin], curve.edges[bin + 1]);
      y.push(share, share);
    });
    return { x, y, type: "scatter", mode: "lines", name: plain(curve.label), meta: "histogram",
      line: { color: tone, width: 1.6 }, fill: "tozeroy", fillcolor: faint(tone, 0.12),
      hovertemplate: `%{y:.1%} of ${curve.steps} steps<extra>${plain(curve.label)}</extra>` };
  });
}

// A column a label and sign beside each step, so that none hides another.
function klTraces(chart) {
  const steps = [...new Set(chart.curves.flatMap((curve) => curve.steps))].sort((a, b) => a - b);
  const gaps = steps.slice(1).map((step, place) => step - steps[place]);
  const room = 0.8 * (gaps.length ? Math.min(...gaps) : 1);
  const shown = chart.curves.filter((curve) => !charts.hidden.has(curve.label));
  return shown.map((curve, place) => {
    const tone = labelColour(curve.label);
    const failed = curve.sign === "negative";
    const name = `${plain(curve.label)} · ${curve.sign}`;
    const shift = room * ((place + 0.5) / shown.length - 0.5);
    return { x: curve.steps.map((step) => step + shift), y: curve.kl, customdata: curve.steps, type: "scatter",
      mode: "markers", name, meta: "kl", marker: { size: 4.5, color: tone, opacity: 0.8,
        symbol: failed ? "x-thin" : "circle-open", line: { width: 1, color: tone } },
      hovertemplate: `step %{customdata}: %{y:.3g}<extra>${name}</extra>` };
  });
}

// Round numbers over the span of the values: the narrower it is, the closer they stand.
function logTicks(values) {
  const known = values.filter((value) => value > 0);
  const low = Math.min(...known), high = Math.max(...known);
  const leads = high / low > 1000 ? [1] : high / low > 8 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 7];
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)) - 1; power <= Math.log10(high) + 1; power++) {
    for (const lead of leads) ticks.push(Number((lead * 10 ** power).toPrecision(2)));
  }
  return { type: "log", tickvals: ticks, ticktext: ticks.map(String) };
}

// The four quadrants share one scale, so that they can be held against each other.
function quadrantTop() {
  const curves = charts.plots.filter((chart) => chart.section === "quadrants").flatMap((chart) => chart.curves);
  const tops = curves.filter((curve) => !charts.hidden.has(curve.label)).map((curve) => Math.max(...(curve.high || curve.y)));
  return Math.max(...tops, 0) || 1;
}

function layoutOf(chart) {
  const grid = colour("--grid"), ink = colour("--muted");
  const axis = { gridcolor: grid, linecolor: colour("--line"), zeroline: false, color: ink,
    tickfont: { size: 11 }, title: { font: { size: 11 }, standoff: 4 } };
  const x = { ...axis, title: { ...axis.title, text: chart.xTitle || "step" } };
  const y = { ...axis, nticks: 6, automargin: true };
  if (chart.log) Object.assign(y, logTicks(chart.curves.flatMap((curve) => curve.y)));
  if (chart.percent) y.tickformat = ".2~%";
  if (chart.kind === "pass") Object.assign(x, { type: "log", tickvals: chart.curves[0].k, ticktext: chart.curves[0].k.map(String) });
  if (chart.kind === "histogram") Object.assign(x, logTicks(chart.curves[0].edges));
  if (chart.kind === "histogram") y.rangemode = "tozero";
  if (chart.section === "quadrants") y.range = [0, 1.05 * quadrantTop()];
  return {
    margin: { l: 44, r: 8, t: 6, b: 36 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: ink, family: getComputedStyle(document.body).fontFamily, size: 12 }, showlegend: false,
    hovermode: chart.kind === "kl" ? "closest" : "x unified", xaxis: x, yaxis: y,
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--line"), activecolor: colour("--accent") },
    hoverlabel: { bgcolor: colour("--raised"), bordercolor: colour("--line"), font: { size: 12, color: colour("--ink") } },
  };
}

const BUILDERS = { line: lineTraces, pass: passTraces, histogram: histogramTraces, kl: klTraces };

function draw(chart, size = {}) {
  const options = { responsive: true, displaylogo: false, doubleClick: "reset",
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
    toImageButtonOptions: { format: "svg", filename: chart.key } };
  return Plotly.react(chart.node, BUILDERS[chart.kind](chart), { ...layoutOf(chart), ...size }, options);
}

// One chart after another, with a breath between them so that the page stays alive; a newer pass
// ends an older one.
async function drawAll() {
  const pass = ++charts.pass;
  document.documentElement.dataset.ready = "no";
  for (const chart of charts.plots) {
    await draw(chart);
    await new Promise((done) => setTimeout(done));
    if (pass !== charts.pass) return;
  }
  document.documentElement.dataset.ready = "yes";
}

function figureOf(chart) {
  const plot = element("div", { class: "plot", "data-chart": chart.key });
  chart.node = plot;
  const parts = [...new Set(chart.curves.map((curve) => curve.name).filter(Boolean))];
  const key = parts.length > 1 ? element("div", { class: "key" }, ...parts.map((part, place) =>
    element("span", {}, element("i", { class: place ? "dashed" : "" }), part))) : null;
  return element("figure", { role: "group", "aria-label": chart.title },
    element("h4", {}, chart.title), element("figcaption", {}, chart.hint), key, plot);
}

function startLegend() {
  for (const holder of document.querySelectorAll(".chips")) {
    charts.data.labels.forEach((label, place) => {
      const chip = element("button", { class: "chip", type: "button", "aria-pressed": "true" },
        element("span", { class: `swatch s${place % 8}` }), label);
      chip.dataset.label = label;
      chip.addEventListener("click", () => toggle(label));
      holder.append(chip);
    });
  }
}

function toggle(label) {
  if (!charts.hidden.delete(label)) charts.hidden.add(label);
  for (const chip of document.querySelectorAll(".chip")) {
    chip.setAttribute("aria-pressed", String(!charts.hidden.has(chip.dataset.label)));
  }
  drawAll();
}

function startPrinting() {
  let theme;
  addEventListener("beforeprint", () => {
    theme = document.documentElement.dataset.theme;
    document.documentElement.dataset.theme = "light";
    for (const chart of charts.plots) draw(chart, { width: 310, height: 200, autosize: false });
  });
  addEventListener("afterprint", () => {
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
    for (const chart of charts.plots) draw(chart, { autosize: true });
  });
}

function startCharts(data) {
  charts.data = data;
  for (const chart of data.charts) {
    const place = document.getElementById(`charts-${chart.section}`);
    place.append(figureOf(chart));
    charts.plots.push(chart);
  }
  startLegend();
  const smoothing = document.getElementById("smoothing"), runs = document.getElementById("runs");
  smoothing?.addEventListener("change", () => { charts.smoothing = Number(smoothing.value); drawAll(); });
  runs?.addEventListener("change", () => { charts.runs = runs.checked; drawAll(); });
  themeListeners.push(drawAll);
  startPrinting();
  return drawAll();
}
