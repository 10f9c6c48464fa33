// Curves over training: uPlot draws them, this says what.
const HUES = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#56b4e9"];
const theme = {};
function readTheme() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["panel", "ink", "soft", "line"]) theme[name] = style.getPropertyValue("--" + name).trim();
  theme.isDark = matchMedia("(prefers-color-scheme: dark)").matches;
}
const hueOf = (run) => { const hue = HUES[run % HUES.length]; return theme.isDark && hue === "#0072b2" ? "#56a8e0" : hue; };
const pale = (hue) => hue + "55";

// An exponential mean, without the pull of its first value; where nothing was told nothing is drawn.
function smoothed(values, weight) {
  if (!weight) return values;
  let sum = 0, mass = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value; mass = weight * mass + (1 - weight);
    return sum / mass;
  });
}

// One curve: [title, unit, series of (runs) -> [{label, hue, x, y, is pale, dash}], is log allowed].
function curvesOf(runs, over, weight) {
  const column = (run, name) => run.columns[name];
  const xOf = (run) => (over === "step" ? run.step : column(run, "tokens_seen"));
  const tokensAt = (run, step) => { const k = run.step.findIndex((one) => one >= step); return k < 0 ? null : column(run, "tokens_seen")[k]; };
  const counted = runs[0].started.counts || "tokens";
  const many = runs.length > 1, named = (run, what) => (many ? run.name + (what ? ", " + what : "") : what);
  const plain = (name, what, scale = 1, heavy = weight) => runs.flatMap((run, r) => {
    const y = column(run, name).map((v) => (v === null ? null : v * scale));
    if (!y.some((v) => v !== null)) return [];
    const main = { label: many && name !== "loss" ? run.name : named(run, what), hue: hueOf(r), x: xOf(run), y: smoothed(y, heavy) };
    return heavy ? [{ label: "", hue: pale(hueOf(r)), x: xOf(run), y, isPale: true }, main] : [main];
  });
  const level = (run, r, value, label) => ({ label: named(run, label), hue: many ? hueOf(r) : "#8a8f96", x: [xOf(run)[0], xOf(run).at(-1)], y: [value, value], dash: [6, 4] });
  const loss = [...plain("loss", "training"), ...runs.flatMap((run, r) => {
    const x = over === "step" ? run.evaluated.step : run.evaluated.step.map((step) => tokensAt(run, step));
    const found = x.length ? [{ label: named(run, "validation"), hue: many ? hueOf(r) : "#d55e00", x, y: run.evaluated.loss, points: true, dash: many ? [2, 3] : undefined }] : [];
    return run.started.unigram_entropy ? [...found, level(run, r, run.started.unigram_entropy, "tokens' frequencies alone")] : found;
  })];
  const told = [["Loss, nats a " + counted.slice(0, -1), loss, true], ["Norm of the gradient", plain("grad_norm", "before clipping"), true], ["Learning rate", plain("lr", "learning rate", 1, 0), true],
    [counted[0].toUpperCase() + counted.slice(1) + " a second", plain("tokens_per_s", counted + "/s"), true],
    ["Accuracy on held-out samples, %", runs.flatMap((run, r) => ((run.evaluated.accuracy || []).some((v) => v !== null) ? [{ label: named(run, "validation"), hue: hueOf(r), x: over === "step" ? run.evaluated.step : run.evaluated.step.map((step) => tokensAt(run, step)), y: run.evaluated.accuracy.map((v) => (v === null ? null : 100 * v)), points: true }] : [])), false],
    ["Seconds of a step", [...plain("step_s", "the whole step"), ...(many ? [] : plain("data_s", runs[0].waited).map((one) => ({ ...one, hue: one.isPale ? pale("#d55e00") : "#d55e00" }))),
      ...runs.flatMap((run, r) => (run.started.predicted_step_s ? [level(run, r, run.started.predicted_step_s, "predicted")] : []))], true],
    ["Memory of the fullest rank, MiB", [...plain("memory_bytes", runs[0].started.memory === "resident" ? "whole process" : "tensors", 1 / 2 ** 20),
      ...runs.flatMap((run, r) => (run.started.predicted_memory_bytes && run.started.memory !== "resident" ? [level(run, r, run.started.predicted_memory_bytes / 2 ** 20, "predicted, tensors")] : []))], false],
    ["Model FLOPs used, %", plain("mfu", "MFU", 100), false],
    ["Busiest expert over the even load", runs.flatMap((run) => (run.router.busiest || []).map((y, layer) => ({ label: named(run, "layer " + layer), hue: HUES[layer % HUES.length],
      x: over === "step" ? run.router.step : run.router.step.map((step) => tokensAt(run, step)), y }))), false]];
  // What a loss or a reward tells: one chart for each title that any run has.
  const titles = [...new Set(runs.flatMap((run) => run.measures.map(([title]) => title)))];
  const measures = titles.map((title) => [title, runs.flatMap((run, r) => (run.measures.find(([name]) => name === title) || [title, []])[1].map(([label, steps, y], k) => ({
    label: named(run, label), hue: hueOf(many ? r : k), x: over === "step" ? steps : steps.map((step) => tokensAt(run, step)), y: smoothed(y, weight) }))), true]);
  told.splice(1, 0, ...measures.filter(([title]) => title === "Reward"));
  told.push(...measures.filter(([title]) => title !== "Reward"));
  const layouts = runs.flatMap((run) => run.layouts.map(([step, text]) => ({ x: over === "step" ? step : tokensAt(run, step), text })));
  return told.filter(([, series]) => series.length).map(([title, series, canLog]) => ({ title, series, canLog, layouts }));
}

// Series of several x become one table, as uPlot wants it.
function tableOf(series) {
  const xs = [...new Set(series.flatMap((one) => one.x.filter((x) => x !== null)))].sort((a, b) => a - b), place = new Map(xs.map((x, k) => [x, k]));
  return [xs, ...series.map((one) => {
    const y = Array(xs.length).fill(undefined);
    one.x.forEach((x, k) => { if (x !== null) y[place.get(x)] = one.y[k]; });
    return y;
  })];
}

const sync = () => uPlot.sync("curves");
function drawCurve(box, curve, isLog) {
  const log = isLog && curve.canLog && curve.series.every((one) => one.y.every((y) => y === null || y > 0));
  const axis = { stroke: theme.soft, grid: { stroke: theme.line, width: 1 }, ticks: { stroke: theme.line, width: 1 }, font: "11px system-ui, sans-serif" };
  const numbers = (_, ticks) => ticks.map((v) => (v === null ? "" : Math.abs(v) >= 1e4 ? countText(v) : Math.abs(v) < 1e-3 && v ? v.toExponential(0) : round(v, 4)));
  const options = {
    width: Math.max(200, box.clientWidth - 18), height: 210, legend: { show: false }, padding: [6, 10, 0, 0],
    cursor: { sync: { key: "curves", scales: ["x", null] }, drag: { x: true, y: false }, points: { size: 6 } },
    scales: { x: { time: false }, y: { distr: log ? 3 : 1 } },
    axes: [{ ...axis, values: numbers, size: 28 }, { ...axis, values: numbers, size: 64 }],
    series: [{}, ...curve.series.map((one) => ({
      label: one.label, stroke: one.hue, width: one.isPale ? 1 : 1.7, dash: one.dash, spanGaps: true, points: { show: Boolean(one.points), size: 5, fill: one.hue },
    }))],
    hooks: { setCursor: [(plot) => showValues(plot, box, curve)], draw: [(plot) => markLayouts(plot, curve.layouts)] },
  };
  return new uPlot(options, tableOf(curve.series), box);
}

// A dashed line where a resumed run went on with another layout.
function markLayouts(plot, layouts) {
  const { ctx, bbox } = plot;
  for (const { x, text } of layouts) {
    if (x === null || x < plot.scales.x.min || x > plot.scales.x.max) continue;
    const at = Math.round(plot.valToPos(x, "x", true));
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = theme.soft;
    ctx.setLineDash([2 * devicePixelRatio, 3 * devicePixelRatio]);
    ctx.beginPath(), ctx.moveTo(at, bbox.top), ctx.lineTo(at, bbox.top + bbox.height), ctx.stroke();
    ctx.font = `${10 * devicePixelRatio}px system-ui, sans-serif`;
    ctx.textAlign = at > bbox.left + bbox.width / 2 ? "right" : "left";
    ctx.fillText(text, at + (ctx.textAlign === "left" ? 4 : -4) * devicePixelRatio, bbox.top + 12 * devicePixelRatio);
    ctx.restore();
  }
}

function showValues(plot, box, curve) {
  const k = plot.cursor.idx, place = box.querySelector("figcaption span");
  if (k === null || k === undefined) { place.textContent = box.dataset.last; return; }
  const near = (values) => { for (let i = k; i >= 0; i--) if (values[i] !== undefined && values[i] !== null) return values[i]; return null; };
  place.textContent = `${countText(plot.data[0][k])}: ` + curve.series.map((one, n) => [one, near(plot.data[n + 1])]).filter(([one, v]) => v !== null && one.label && !one.dash)
    .slice(0, 4).map(([one, v]) => (curve.series.length > 1 ? one.label + " " : "") + round(v, 4)).join(", ");
}
