// The report's page: cards, curves, where time went, what happened.
const DATA = JSON.parse(document.getElementById("data").textContent);
const R = { runs: [], plots: [] };
// Four digits: parts are to add up to their sum as a reader adds them.
const seconds = (s) => (s >= 7200 ? round(s / 3600, 3) + "\u00a0h" : s >= 120 ? round(s / 60, 3) + "\u00a0min" : timeText(s * 1e9, 4));
const last = (values) => { for (let k = values.length - 1; k >= 0; k--) if (values[k] !== null && values[k] !== undefined) return values[k]; return null; };

function showCards() {
  const made = [];
  for (const run of R.runs) {
    const many = R.runs.length > 1, add = (number, text) => made.push(el("div", { className: "card" }, el("b", { textContent: number }), el("span", { textContent: many ? `${run.name}: ${text}` : text })));
    const loss = last(run.columns.loss), validation = last(run.evaluated.loss), memory = last(run.columns.memory_bytes);
    add(`${run.step.length ? run.step.at(-1) : 0}` + (run.started.steps ? ` of ${run.started.steps}` : ""), "steps");
    if (loss !== null) add(round(loss, 4), "training loss");
    if (validation !== null) add(round(validation, 4), "validation loss");
    if (many) continue;
    const rates = run.columns.tokens_per_s.filter((v) => v !== null).sort((a, b) => a - b);
    if (rates.length) add(countText(rates[rates.length >> 1]), (run.started.counts || "tokens") + "/s, median");
    if (last(run.columns.tokens_seen)) add(countText(last(run.columns.tokens_seen)), (run.started.counts || "tokens") + " seen");
    if (memory) add(bytesText(memory), run.started.memory === "resident" ? "process, fullest rank" : "tensors, fullest rank");
    if (run.started.parameters) add(countText(run.started.parameters), "parameters");
  }
  at("cards").replaceChildren(...made);
  const [run] = R.runs;
  at("about").textContent = R.runs.length > 1 ? `${R.runs.length} runs over one another; each is compared with the first` : run.started.plan ? `${run.started.plan}, ${run.started.world} ranks${run.started.transport ? " over " + run.started.transport : ""}` : "";
}

function showCurves() {
  readTheme();
  for (const plot of R.plots) plot.destroy();
  const curves = curvesOf(R.runs, at("over").value, Number(at("smooth").value)), isLog = at("log").checked;
  at("curves").replaceChildren(...curves.map((curve) => {
    const box = el("figure", { className: "curve" });
    const main = curve.series.filter((one) => one.label && !one.dash);
    const ends = main.map((one) => `${one.label} ${last(one.y) === null ? "none" : round(last(one.y), 4)}`);
    box.dataset.last = ends.slice(0, 3).join(", ");
    box.append(el("figcaption", {}, curve.title, el("span", { textContent: box.dataset.last })));
    box.setAttribute("role", "img");
    box.setAttribute("aria-label", `${curve.title}: ${ends.join(", ")} at the end.`);
    return box;
  }));
  R.plots = curves.map((curve, k) => drawCurve(at("curves").children[k], curve, isLog));
  const words = R.runs.length > 1 ? R.runs.map((run, r) => [run.name, hueOf(r)]) : [["training", hueOf(0)], ["validation, data", "#d55e00"], ["predicted, or best without context", "#8a8f96"]];
  at("keys").replaceChildren(...words.map(([text, hue]) => { const mark = el("i", { className: "swatch" }); mark.style.background = hue; return el("span", {}, mark, text); }));
  document.documentElement.dataset.ready = "report";
}

const PARTS = { compute: "#0072b2", bubble: "#c3cad2", "waits for fetch": "#c9b800", "waits for reduce": "#cc79a7", "waits for act": "#56b4e9", "waits for grad": "#d55e00", "waits for snapshot": "#8a8f96", "waits for out": "#7b5ea7", "waits for in": "#b39ddb", "log-probabilities": "#009e73",
  steps: "#0072b2", data: "#d55e00", sampling: "#d55e00", validation: "#009e73", checkpoints: "#8a8f96" };
const inkOn = (hex) => { const [r, g, b] = [1, 3, 5].map((k) => parseInt(hex.slice(k, k + 2), 16)); return 0.299 * r + 0.587 * g + 0.114 * b > 100 ? "#10161b" : "#ffffff"; };
function bar(parts, most) {
  const total = Object.values(parts).reduce((a, b) => a + b, 0), made = el("div", { className: "bar" });
  for (const [name, s] of Object.entries(parts)) {
    if (!s) continue;
    const hue = PARTS[name] || "#8a8f96", part = el("div", { textContent: s / most > 0.09 ? `${name} ${seconds(s)}` : "", title: `${name} ${seconds(s)}, ${percent(s / total)}` });
    part.style.cssText = `width: ${(100 * s) / most}%; background: ${hue}; color: ${inkOn(hue)}`;
    made.append(part);
  }
  made.setAttribute("role", "img");
  made.setAttribute("aria-label", Object.entries(parts).map(([name, s]) => `${name} ${seconds(s)}`).join(", "));
  return made;
}
function showTimes() {
  const falls = [];
  const all = R.runs.flatMap((run) => Object.values(run.spent).map((parts) => Object.values(parts).reduce((a, b) => a + b, 0)));
  for (const run of R.runs) for (const [which, parts] of Object.entries(run.spent)) {
    const total = Object.values(parts).reduce((a, b) => a + b, 0);
    falls.push(el("div", { className: "soft", textContent: `${R.runs.length > 1 ? run.name + ", " : ""}${which === "ran" ? "as it ran" : "predicted"}: ${seconds(total)} = ` + Object.entries(parts).map(([name, s]) => `${name} ${seconds(s)}`).join(" + ") }), bar(parts, Math.max(...all)));
  }
  at("waterfall").hidden = !falls.length;
  at("falls").replaceChildren(...falls);
  const most = Math.max(...R.runs.map((run) => Object.values(run.totals).reduce((a, b) => a + b, 0))) || 1;
  at("totals").replaceChildren(...R.runs.flatMap((run) => [el("div", { className: "soft", textContent: (R.runs.length > 1 ? run.name + ": " : "") + Object.entries(run.totals).map(([name, s]) => `${name} ${seconds(s)}`).join(" + ") }), bar(run.totals, most)]));
}

function rowsInto(id, head, rows) {
  at(id).replaceChildren(el("thead", {}, el("tr", {}, ...head.map((text) => el("th", { textContent: text, scope: "col" })))), el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map((text) => el("td", { textContent: text }))))));
}
function showRest() {
  const many = R.runs.length > 1;
  rowsInto("events", ["step", ...(many ? ["run"] : []), "what", ""], R.runs.flatMap((run) => run.events.map(([step, kind, text]) => [step, ...(many ? [run.name] : []), kind, text])));
  at("written").hidden = R.runs.every((run) => !run.samples.length);
  rowsInto("samples", ["after step", ...(many ? ["run"] : []), "text"], R.runs.flatMap((run) => run.samples.map(([step, text, isWhy]) => [step, ...(many ? [run.name] : []), isWhy ? `none: ${text}` : text])));
  const facts = R.runs.flatMap((run) => Object.entries(run.facts).map(([name, value]) => [...(many ? [run.name] : []), name, value]));
  at("told").hidden = !facts.length && R.runs.every((run) => !run.settings);
  rowsInto("facts", [...(many ? ["run"] : []), "what", "value"], facts);
  at("settings").replaceChildren(...R.runs.filter((run) => run.settings).map((run) => el("details", {}, el("summary", { textContent: many ? `${run.name}: run.toml` : "run.toml" }), el("pre", { textContent: run.settings, tabIndex: 0 }))));
  at("compared").hidden = !DATA.comparisons.length;
  const [first] = R.runs;
  rowsInto("differences", ["", first ? first.name : "", "the other"], DATA.comparisons.flatMap((one) => [
    [`loss of ${one.names[1]} less that of ${one.names[0]}`, "", one.verdict], ...one.settings.map(([name, a, b]) => [name, a, b])]));
}

function show(told) {
  const isOpen = [...document.querySelectorAll("#settings details")].map((one) => one.open);
  R.runs = told.runs;
  showCards(); showTimes(); showLedger(); showRest(); showCurves();
  document.querySelectorAll("#settings details").forEach((one, k) => { one.open = Boolean(isOpen[k]); });
}
// While the run trains its server sends all that is shown whenever there is more; a stretch that was chosen stays.
function listen() {
  const say = (text, isOver) => { at("live").hidden = false; at("live").textContent = text; at("live").classList.toggle("over", isOver); };
  const from = new EventSource("events" + location.search);
  let updates = 0;
  from.onmessage = (event) => unpack(event.data).then((told) => {
    const [plot] = R.plots, whole = plot && plot.data[0], x = plot && plot.scales.x;
    const chosen = plot && (x.min > whole[0] || x.max < whole.at(-1)) ? { min: x.min, max: x.max } : null;
    show(told);
    if (chosen) for (const each of R.plots) each.setScale("x", chosen);
    R.updates = ++updates;
    say("live", false);
  });
  from.addEventListener("over", () => { from.close(); say("the run has ended; report.html in its folder has all of it", true); });
  from.onerror = () => say(from.readyState === 2 ? "the run cannot be asked any more" : "the run does not answer now", true);
}

const inUnit = { s: seconds, bytes: bytesText, share: percent };
function showLedger() {
  const many = R.runs.length > 1, told = (unit, value) => (value === null || value === undefined ? "" : inUnit[unit](value));
  const rows = R.runs.flatMap((run) => run.ledger.map(([what, predicted, measured, unit]) => [...(many ? [run.name] : []), what, told(unit, predicted), told(unit, measured),
    predicted && measured !== null ? round(measured / predicted, 3) + "×" : ""]));
  at("foretold").hidden = !rows.length;
  rowsInto("ledger", [...(many ? ["run"] : []), "", "predicted", "measured", "measured / predicted"], rows);
  for (const row of at("ledger").querySelectorAll("tbody tr")) row.classList.toggle("part", row.children[many ? 1 : 0].textContent.startsWith(" "));
  const most = Math.max(1, ...R.runs.flatMap((run) => run.traffic.map(([, , bytes]) => bytes)));
  at("carried").hidden = R.runs.every((run) => !run.traffic.length);
  at("axes").replaceChildren(...R.runs.flatMap((run) => run.traffic.flatMap(([axis, about, bytes]) => {
    const whole = el("div", { className: "bar" }), part = el("div");
    part.style.cssText = `width: ${(100 * bytes) / most}%; background: ${PARTS["waits for reduce"]}`;
    whole.append(part);
    whole.setAttribute("role", "img");
    whole.setAttribute("aria-label", `${axis} ${bytesText(bytes)}`);
    return [el("div", { className: "soft" }, el("b", { textContent: axis }), ` ${many ? run.name + ": " : ""}${bytesText(bytes)} on the rank that has most: ${about}`), whole];
  })));
}

let width = 0;
unpack(DATA.runs).then((told) => {
  show(told);
  if (DATA.is_live) listen();
  for (const id of ["over", "smooth", "log"]) at(id).oninput = showCurves;
  at("whole").onclick = showCurves;
  width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) width = innerWidth, showCurves(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showCurves);
});
window.superstep = { R, curvesOf, smoothed, tableOf };
