// What is said of one instruction, one wait, one moment of memory.
const SAYS = {
  forward: "forward", recompute: "computed again", backward: "backward", "backward-input": "backward, gradient of the input",
  "backward-weight": "backward, gradients of the weights", settle: "waits for its gradient's sum", tie: "sum of a tied gradient",
  "reduce-partial": "sum of partial gradients over tp", step: "optimizer's step", free: "frees parameters", fetch: "gathers parameters",
  reduce: "sums gradients over ranks", "reduce-replicas": "sums gradients over replicas", send: "sends", recv: "receives", snapshot: "copies its state", offload: "moves what it keeps away", reload: "brings it back",
};

function nameOf(step, rank, i) {
  const columns = step.ranks[rank], kind = KINDS[columns.kind[i]].name, unit = columns.unit[i], m = columns.microbatch[i];
  const what = kind === "send" ? `sends ${columns.wire[i] ? "gradient" : "activation"} to rank ${columns.peer[i]}` : SAYS[kind];
  return what + (unit >= 0 ? ` · u${unit} ${step.units[unit]}` : "") + (m >= 0 ? ` · microbatch ${m}` : "");
}

function linesOf(chosen) {
  const step = S.step, { rank, i, set } = chosen, times = step[set].ranks[rank];
  if (chosen.wait !== undefined) {
    const why = times.reason[chosen.wait], took = times.waited[chosen.wait];
    return [`rank ${rank} waits`, why < 0 ? "bubble: for another rank to deliver or to come" : `for its ${LANES[why]} lane, which is at work`,
      `${timeText(took)}, ${percent(took / step[set].step_ns)} of the step`];
  }
  const lines = [nameOf(step, rank, i), `rank ${rank}, instruction ${i} · from ${timeText(times.start[i])}, takes ${timeText(times.took[i])}`];
  if (step.measured) {
    const ran = step.measured.ranks[rank].took[i], said = step.predicted.ranks[rank].took[i];
    lines.push(`ran ${timeText(ran)}, predicted ${timeText(said)}` + (said ? ` (${ran >= said ? "+" : "−"}${percent(Math.abs(ran - said) / said)})` : ""));
  }
  const sent = (step.messages[step.ranks[rank].unit[i]] || {})[KINDS[step.ranks[rank].kind[i]].name.split("-")[0]] || [];
  for (const [collective, axis, bytes, count] of sent.slice(0, 3)) lines.push(`${count > 1 ? count + " × " : ""}${collective} over ${axis}, ${bytesText(bytes)}`);
  return lines;
}

function showTip(lines, x, y) {
  const tip = at("tip");
  tip.replaceChildren(el("b", { textContent: lines[0] }), ...lines.slice(1).map((text) => el("div", { textContent: text })));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(6, Math.min(x + 14, innerWidth - box.width - 6)) + "px";
  tip.style.top = (y + 18 + box.height > innerHeight ? Math.max(6, y - box.height - 12) : y + 18) + "px";
}
const hideTip = () => { at("tip").hidden = true; };

function memoryLines({ rank, t }) {
  const set = S.step.measured ? "measured" : "predicted", parts = memoryAt(S.step, rank, set, t);
  const total = parts.reduce((a, b) => a + b, 0);
  return [`rank ${rank} at ${timeText(t)}: ${bytesText(total)}`, ...CATEGORIES.map((one, at) => [one.name, parts[at]]).filter(([, size]) => size > 0).map(([name, size]) => `${name} ${bytesText(size)}`)];
}

// The cards and the table: what the picture says, as numbers.
function mean(numbers) { return numbers.reduce((a, b) => a + b, 0) / numbers.length; }
function sumsOf(times) {
  const exposed = {};
  for (const rank of times.exposed_ns) for (const [lane, ns] of Object.entries(rank)) exposed[lane] = (exposed[lane] || 0) + ns / times.exposed_ns.length;
  return { step: times.step_ns, compute: mean(times.busy_ns), bubble: mean(times.bubble_ns), exposed };
}

function showCards() {
  const step = S.step, times = step.first, sums = sumsOf(times), cards = [];
  const exposed = Object.values(sums.exposed).reduce((a, b) => a + b, 0);
  cards.push([timeText(sums.step, 3), step.measured ? "the step as it ran" : "the step, predicted"]);
  if (step.measured) cards.push([timeText(step.predicted.step_ns, 3), "predicted"]);
  cards.push([timeText(sums.compute, 3), "compute, mean of ranks"]);
  cards.push([percent(times.bubble), "bubble, of compute"]);
  if (step.ranks.length > 1) cards.push([percent(times.closed), `closed form ${times.formula}`]);
  cards.push([timeText(exposed, 3), "communication not hidden"]);
  cards.push([bytesText(Math.max(...step.peaks.map((peak) => peak.lasting + peak.within))), "fullest rank"]);
  at("cards").replaceChildren(...cards.map(([number, text]) => el("div", { className: "card" }, el("b", { textContent: number }), el("span", { textContent: text }))));
}

function totals(step, set) {
  const found = new Map();
  step.ranks.forEach((columns, rank) => {
    const took = step[set].ranks[rank].took;
    for (let i = 0; i < took.length; i++) {
      const kind = columns.kind[i];
      if (kind === KIND.recv || kind === KIND.free) continue;
      const one = found.get(kind) || { count: 0, ns: 0 };
      one.count++; one.ns += took[i] / step.ranks.length;
      found.set(kind, one);
    }
  });
  return found;
}

function showNumbers() {
  const step = S.step, said = totals(step, "predicted"), ran = step.measured && totals(step, "measured");
  const cell = (text, className = "") => el("td", { textContent: text, className });
  const line = (name, count, ns, other) => {
    const row = el("tr", {}, el("th", { textContent: name, scope: "row" }), cell(count), ...(ran ? [cell(timeText(other, 3))] : []), cell(timeText(ns, 3)));
    if (ran) {
      const off = ns ? (other - ns) / ns : 0, is = Math.abs(off) > 0.1;
      row.append(cell(ns ? (off >= 0 ? "+" : "−") + percent(Math.abs(off)) : "", is ? (off > 0 ? "more" : "less") : ""));
    }
    return row;
  };
  const head = el("tr", {}, ...["mean of ranks", "number", ...(ran ? ["ran"] : []), "predicted", ...(ran ? ["difference"] : [])].map((text) => el("th", { textContent: text, scope: "col" })));
  const a = sumsOf(step.predicted), b = ran && sumsOf(step.measured);
  const rows = [...said].sort(([one], [other]) => one - other).map(([kind, { count, ns }]) => line(KINDS[kind].says, count, ns, ran && ran.get(kind).ns));
  rows.push(line("bubble", "", a.bubble, b && b.bubble));
  for (const lane of new Set([...Object.keys(a.exposed), ...Object.keys((b && b.exposed) || {})])) rows.push(line(`waits for ${lane}`, "", a.exposed[lane] || 0, b && (b.exposed[lane] || 0)));
  rows.push(line("whole step", "", a.step, b && b.step));
  at("numbers").replaceChildren(el("thead", {}, head), el("tbody", {}, ...rows));
}

function showLegend() {
  const used = new Set(S.step.ranks.flatMap((columns) => [...new Set(columns.kind)]));
  const items = KINDS.map((kind, at) => [kind, at]).filter(([kind, at]) => used.has(at) && !["recv", "free"].includes(kind.name)).flatMap(([kind, at]) =>
    kind.name === "send" ? [["activation sent", theme.hues[at][0]], ["gradient sent", theme.hues[at][1]]] : [[kind.says, theme.hues[at][0]]]);
  const styles = (name) => sample((c) => { c.fillStyle = patterns(c)[name]; c.fillRect(0, 0, 22, 14); });
  const made = items.map(([text, hue]) => el("li", {}, filled(hue), text));
  made.push(el("li", {}, styles("bubble"), "bubble: waits for another rank"), el("li", {}, styles("exposed"), "waits for communication at work"));
  if (S.step.measured) made.push(el("li", {}, filled(theme.warm), "longer than predicted"), el("li", {}, filled(theme.cool), "shorter"));
  at("legend").replaceChildren(...made);
  const held = CATEGORIES.filter((_, part) => S.step.courses.some((course, rank) => part < LASTING ? Object.values(S.step.memory[rank])[part] > 0 : course.some((size, i) => i % PASSING === part - LASTING && size > 0)));
  at("categories").replaceChildren(...held.map((one) => el("li", {}, filled(one.hue), one.name)));
}
