// The timeline: a row for each rank and lane. What does not change while it plays is drawn once and kept.
const still = document.createElement("canvas");
const AXIS = 20;
let stillKey = "";

function gutter() { return innerWidth < 520 ? 44 : 88; }
function span(width) { return { left: gutter(), right: width - 6, width: width - 6 - gutter() }; }
const toX = (t, s) => s.left + ((t - S.from) / (S.to - S.from)) * s.width;
const toT = (x, s) => S.from + ((x - s.left) / s.width) * (S.to - S.from);

function layOut(step) {
  const pp = step.ranks.length, sets = step.measured ? ["measured", "predicted"] : ["predicted"];
  const main = pp <= 4 ? 32 : pp <= 16 ? 22 : 11, beside = pp <= 4 ? 10 : pp <= 16 ? 7 : 3, gap = pp <= 16 ? 9 : 4;
  const rows = [];
  let y = AXIS + 4;
  for (let rank = 0; rank < pp; rank++) {
    const top = y;
    sets.forEach((set, at) => {
      if (at) rows.push({ rank, set: "difference", lane: -1, y, h: 11 }), y += 13;
      for (const lane of step.usedLanes) {
        const h = lane === 0 ? main : beside;
        rows.push({ rank, set, lane, y, h });
        y += h + (lane === 0 ? 2 : 1);
      }
    });
    rows.push({ rank, set: "name", lane: -1, y: top, h: main, to: y });
    y += gap;
  }
  return { rows, height: y + 4 };
}

// The events of a lane that reach into the window.
function visible(times, lane, from, to) {
  const list = times.lanes[lane];
  const first = firstWhere(list.length, (k) => times.start[list[k]] >= from - times.longest[lane]);
  const last = firstWhere(list.length, (k) => times.start[list[k]] > to);
  return [list, first, last];
}

function drawAxis(c, s, height) {
  const spanNs = S.to - S.from, least = (spanNs * 90) / s.width, power = 10 ** Math.floor(Math.log10(least));
  const tick = [1, 2, 5, 10].map((k) => k * power).find((x) => x >= least);
  c.font = "11px system-ui, sans-serif";
  c.fillStyle = theme.soft; c.strokeStyle = theme.line; c.lineWidth = 1; c.textBaseline = "middle";
  for (let t = Math.ceil(S.from / tick) * tick; t <= S.to; t += tick) {
    const x = Math.round(toX(t, s)) + 0.5;
    c.beginPath(); c.moveTo(x, AXIS - 4); c.lineTo(x, height); c.stroke();
    const text = t === 0 ? "0" : timeText(t);
    if (x + c.measureText(text).width < s.right + 4) c.fillText(text, x + 3, AXIS / 2);
  }
}

function drawWaits(c, times, row, s) {
  const styles = patterns(c);
  const last = firstWhere(times.wait.length, (k) => times.wait[k] > S.to);
  const first = firstWhere(times.wait.length, (k) => times.wait[k] + times.waited[k] >= S.from);
  for (let k = first; k < last; k++) {
    const x = Math.max(s.left, toX(times.wait[k], s)), end = Math.min(s.right, toX(times.wait[k] + times.waited[k], s));
    if (end - x < 0.3) continue;
    c.fillStyle = times.reason[k] < 0 ? styles.bubble : styles.exposed;
    c.fillRect(x, row.y, end - x, row.h);
  }
}

const LEAST_LABEL = 8;
const LETTERS = { forward: "", recompute: "r", backward: "", "backward-input": "", "backward-weight": "w" };

function drawEvents(c, step, times, row, s) {
  const [list, first, last] = visible(times, row.lane, S.from, S.to);
  const columns = step.ranks[row.rank];
  c.textBaseline = "middle"; c.textAlign = "center";
  c.font = `${row.h > 24 ? 12 : 11}px system-ui, sans-serif`;
  let labelled = -1;
  for (let k = first; k < last; k++) {
    const i = list[k], hue = hueOf(columns, i);
    const x = Math.max(s.left, toX(times.start[i], s)), end = Math.min(s.right, toX(times.end[i], s));
    const w = Math.max(row.lane ? 1.5 : 0, end - x);
    if (w <= 0) continue;
    c.fillStyle = hue;
    c.fillRect(x, row.y, w, row.h);
    S.rects++;
    if (w > 3) { c.fillStyle = theme.panel; c.fillRect(x + w - 0.6, row.y, 0.6, row.h); }
    const name = KINDS[columns.kind[i]].name;
    if (w < LEAST_LABEL || row.h < 11 || !(name in LETTERS || name === "step")) continue;
    const text = name === "step" ? "step" : LETTERS[name] + columns.microbatch[i];
    const task = name + columns.microbatch[i] + "/" + step.stageOf[columns.unit[i]];
    // The units of a stage are one thing to look at: the first with room has the number.
    if (w > c.measureText(text).width + 3 && (task !== labelled || w > 26)) {
      c.fillStyle = inkOn(hue);
      c.fillText(text, x + w / 2, row.y + row.h / 2 + 0.5);
      labelled = task;
    }
  }
  c.textAlign = "left";
}

// Between the two: longer than predicted in one colour above the middle, shorter in another below it.
function drawDifference(c, step, row, s) {
  const ran = step.measured.ranks[row.rank], said = step.predicted.ranks[row.rank];
  const [list, first, last] = visible(ran, 0, S.from, S.to), middle = row.y + row.h / 2;
  c.fillStyle = theme.line;
  c.fillRect(s.left, middle - 0.5, s.width, 1);
  for (let k = first; k < last; k++) {
    const i = list[k], much = differs(ran.took[i], said.took[i], step);
    if (!much) continue;
    const x = Math.max(s.left, toX(ran.start[i], s)), w = Math.max(1.5, Math.min(s.right, toX(ran.end[i], s)) - x);
    c.fillStyle = much > 0 ? theme.warm : theme.cool;
    const h = Math.max(2, Math.min(1, 2 * Math.abs(much)) * (row.h / 2));
    c.fillRect(x, much > 0 ? middle - h : middle, w, h);
  }
}
// By which share of the prediction; 0 where it is within a tenth, or too short to matter.
function differs(ran, said, step) {
  const off = ran - said;
  return Math.abs(off) < 0.1 * said || Math.abs(off) < step.first.step_ns / 5000 ? 0 : off / Math.max(said, step.first.step_ns / 1000);
}

function drawNames(c, step, row, s) {
  const isNarrow = gutter() < 60, y = row.y + row.h / 2;
  c.fillStyle = theme.ink; c.textBaseline = "middle"; c.textAlign = "left";
  c.font = `600 ${row.h > 12 ? 12 : 10}px system-ui, sans-serif`;
  c.fillText((isNarrow ? "" : "rank ") + row.rank, 6, y);
  c.font = "10px system-ui, sans-serif"; c.fillStyle = theme.soft; c.textAlign = "right";
  for (const other of S.rows) {
    if (other.rank !== row.rank || isNarrow) continue;
    if (other.set === "difference") c.fillText("differs", s.left - 5, other.y + 4);
    else if (other.lane > 0 && other.h > 6) c.fillText(LANES[other.lane], s.left - 5, other.y + other.h / 2);
    else if (other.lane === 0 && step.measured) c.fillText(other.set === "measured" ? "ran" : "predicted", s.left - 5, other.y + other.h / 2 + 8);
  }
  c.textAlign = "left";
}

function drawStill(width, height, top) {
  const key = [S.key, S.from, S.to, width, height, top, theme.isDark].join();
  if (key === stillKey) return;
  stillKey = key;
  S.stills++;
  const c = fitCanvas(still, width, height), step = S.step, s = span(width);
  c.fillStyle = theme.panel; c.fillRect(0, 0, width, height);
  drawAxis(c, s, height);
  const dense = [];
  for (const row of S.rows) {
    if (row.y + (row.to ? row.to - row.y : row.h) < top + AXIS || row.y > top + height) continue;
    const moved = { ...row, y: row.y - top };
    if (row.set === "name") { drawNames(c, step, moved, s); continue; }
    if (row.set === "difference") { drawDifference(c, step, moved, s); continue; }
    const times = step[row.set].ranks[row.rank];
    if (isDense(times, row.lane, s)) { dense.push(moved); continue; }
    if (row.lane === 0) drawWaits(c, times, moved, s);
    else c.fillStyle = theme.lane, c.fillRect(s.left, moved.y, s.width, moved.h);
    drawEvents(c, step, times, moved, s);
  }
  drawDense(c, step, dense, s);
  if (top > 0) {
    c.fillStyle = theme.panel; c.fillRect(0, 0, width, AXIS);
    drawAxis(c, s, AXIS + 3);
  }
}

// Names of rows below the first are drawn where they are: their own rows count from the top of the window.
function drawTimeline() {
  const canvas = at("time"), box = at("rows"), width = box.clientWidth, top = box.scrollTop;
  const height = Math.min(S.height, Math.round(innerHeight * (innerWidth < 520 ? 0.6 : 0.68)) - 2);
  let spacer = box.querySelector(".spacer");
  if (!spacer) box.append(spacer = el("div", { className: "spacer" }));
  spacer.style.height = Math.max(0, S.height - height) + "px";
  drawStill(width, height, top);
  const c = fitCanvas(canvas, width, height), s = span(width);
  c.save(); c.setTransform(1, 0, 0, 1, 0, 0); c.drawImage(still, 0, 0); c.restore();
  const x = toX(S.t, s);
  if (S.t < S.step.first.step_ns) {
    c.globalAlpha = 0.62; c.fillStyle = theme.panel;
    const from = Math.max(s.left, x);
    if (from < s.right) c.fillRect(from, AXIS, s.right + 6 - from, height - AXIS);
    c.globalAlpha = 1;
    drawActive(c, s, top);
  }
  if (x >= s.left - 1 && x <= s.right + 1) {
    c.strokeStyle = theme.ink; c.lineWidth = 1.5;
    c.beginPath(); c.moveTo(x, AXIS - 6); c.lineTo(x, height); c.stroke();
    c.fillStyle = theme.ink; c.beginPath(); c.moveTo(x - 5, AXIS - 10); c.lineTo(x + 5, AXIS - 10); c.lineTo(x, AXIS - 3); c.fill();
  }
  if (S.chosen) drawChosen(c, s, top);
}

function running(times, lane, t) {
  const list = times.lanes[lane], last = firstWhere(list.length, (k) => times.start[list[k]] > t);
  const found = [];
  for (let k = last - 1; k >= 0 && times.start[list[k]] >= t - times.longest[lane]; k--) if (times.end[list[k]] > t) found.push(list[k]);
  return found;
}

function drawActive(c, s, top) {
  c.lineWidth = 2; c.strokeStyle = theme.ink;
  for (const row of S.rows) {
    if (row.lane < 0 || row.y - top > c.canvas.height || row.y + row.h < top + AXIS) continue;
    const times = S.step[row.set].ranks[row.rank];
    for (const i of running(times, row.lane, S.t)) {
      const x = Math.max(s.left, toX(times.start[i], s)), end = Math.min(s.right, toX(times.end[i], s));
      if (end <= x) continue;
      c.fillStyle = hueOf(S.step.ranks[row.rank], i);
      c.fillRect(x, row.y - top, end - x, row.h);
      const m = S.step.ranks[row.rank].microbatch[i];
      if (row.h >= 11 && row.lane === 0 && m >= 0 && end - x > 14) {
        c.fillStyle = inkOn(c.fillStyle); c.font = "600 12px system-ui, sans-serif"; c.textAlign = "center"; c.textBaseline = "middle";
        c.fillText(m, (x + end) / 2, row.y - top + row.h / 2 + 0.5);
        c.textAlign = "left";
      }
      if (row.h > 8) c.strokeRect(x + 1, row.y - top + 1, Math.max(1, end - x - 2), row.h - 2);
    }
  }
}

const rowOf = (set, rank, lane) => S.rows.find((row) => row.set === set && row.rank === rank && row.lane === lane);

// From where a value is made to where it is used.
function arrowsOf({ rank, i, set }) {
  const step = S.step, columns = step.ranks[rank], kind = columns.kind[i], unit = columns.unit[i], m = columns.microbatch[i];
  const found = [];
  const add = (from, send, to, recv) => { if (send >= 0 && recv >= 0) found.push({ set, from, send, to, recv }); };
  const end = (kind, own) => find(step.ranks[columns.peer[own]], [kind], columns.unit[own], m, columns.wire[own]);
  const out = (send) => send >= 0 && add(rank, send, columns.peer[send], end(KIND.recv, send));
  const into = (recv) => recv >= 0 && add(columns.peer[recv], end(KIND.send, recv), rank, recv);
  if (kind === KIND.send) out(i);
  // A stage is entered at its first unit and left at its last, and the other way round going back.
  const units = unit >= 0 ? step.stages[step.stageOf[unit]] : [], first = units[0], after = units[units.length - 1] + 1;
  if (kind === KIND.forward) {
    into(find(columns, [KIND.recv], first, m, 0));
    out(find(columns, [KIND.send], after, m, 0));
  } else if (kind === KIND.backward || kind === KIND["backward-input"]) {
    into(find(columns, [KIND.recv], after, m, 1));
    out(find(columns, [KIND.send], first, m, 1));
  }
  return found;
}

function drawChosen(c, s, top) {
  const { rank, i, set, lane } = S.chosen, row = rowOf(set, rank, lane);
  if (!row) return;
  const times = S.step[set].ranks[rank];
  const x = Math.max(s.left, toX(times.start[i], s)), end = Math.min(s.right, toX(times.end[i], s));
  c.strokeStyle = theme.ink; c.lineWidth = 2;
  if (end >= x) c.strokeRect(x - 0.5, row.y - top - 0.5, Math.max(3, end - x) + 1, row.h + 1);
  for (const arrow of arrowsOf(S.chosen)) {
    const a = rowOf(set, arrow.from, 0), b = rowOf(set, arrow.to, 0);
    const x0 = toX(S.step[set].ranks[arrow.from].start[arrow.send], s), x1 = toX(S.step[set].ranks[arrow.to].end[arrow.recv], s);
    const down = b.y > a.y, y0 = a.y - top + (down ? a.h : 0), y1 = b.y - top + (down ? 0 : b.h), bend = Math.max(14, Math.abs(y1 - y0) / 3) * (down ? 1 : -1);
    c.save(); c.beginPath(); c.rect(s.left, AXIS, s.width, 1e5); c.clip();
    for (const [w, hue] of [[5, theme.panel], [2.2, theme.warm]]) {
      c.lineWidth = w; c.strokeStyle = hue;
      c.beginPath(); c.moveTo(x0, y0); c.bezierCurveTo(x0, y0 + bend, x1, y1 - bend, x1, y1); c.stroke();
    }
    c.fillStyle = theme.warm; c.beginPath();
    c.moveTo(x1, y1); c.lineTo(x1 - 5, y1 - (down ? 9 : -9)); c.lineTo(x1 + 5, y1 - (down ? 9 : -9)); c.fill(); c.restore();
  }
}

function hit(x, y) {
  const box = at("rows"), s = span(box.clientWidth), inside = y + box.scrollTop;
  if (x < s.left || x > s.right || y < AXIS) return null;
  const row = S.rows.find((one) => one.lane >= 0 && inside >= one.y - 1 && inside <= one.y + one.h + 1);
  if (!row) return null;
  const times = S.step[row.set].ranks[row.rank], t = toT(x, s), slack = (3 * (S.to - S.from)) / s.width;
  const [list, first, last] = visible(times, row.lane, t - slack, t + slack);
  let best = null, nearest = Infinity;
  for (let k = first; k < last; k++) {
    const i = list[k], away = Math.max(times.start[i] - t, t - times.end[i], 0);
    if (away <= (row.lane ? slack : 0) && away < nearest) nearest = away, best = { rank: row.rank, i, set: row.set, lane: row.lane };
  }
  if (best) return best;
  for (let k = 0; row.lane === 0 && k < times.wait.length; k++) {
    if (times.wait[k] <= t && t < times.wait[k] + times.waited[k]) return { rank: row.rank, wait: k, set: row.set, lane: 0, i: -1 };
  }
  return null;
}
