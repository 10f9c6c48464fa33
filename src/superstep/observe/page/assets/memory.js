// Memory under the timeline, at the same times: what each rank holds, by category.
const memoryStill = document.createElement("canvas");
let memoryKey = "", memoryMost = 0;

// What a rank holds after so many of its instructions were issued, in bytes of each category.
function levelsOf(step, rank) {
  const told = step.ranks[rank].level, n = told.length, out = new Float64Array(PASSING * (n + 1));
  for (let i = 0; i < n; i++) for (let part = 0; part < PASSING; part++) out[PASSING * (i + 1) + part] = out[PASSING * i + part] + step.levels[told[i]][part];
  return out;
}
function heldAt(course, i) {
  let sum = 0;
  for (let part = 0; part < PASSING; part++) sum += course[PASSING * i + part];
  return sum;
}
function prepareMemory(step) {
  step.courses = step.ranks.map((_, rank) => levelsOf(step, rank));
  step.peaks = step.courses.map((course, rank) => {
    const lasting = Object.values(step.memory[rank]).reduce((a, b) => a + b, 0);
    let most = 0;
    for (let i = 0; i < course.length; i += PASSING) most = Math.max(most, heldAt(course, i / PASSING));
    return { lasting, within: most };
  });
}
function memoryAt(step, rank, set, t) {
  const times = step[set].ranks[rank], i = firstWhere(times.issued.length, (k) => times.issued[k] > t);
  const lasting = step.memory[rank], course = step.courses[rank];
  return [lasting.parameters, lasting.gradients, lasting.optimizer, ...course.slice(PASSING * i, PASSING * (i + 1))];
}

function memoryRows(step) {
  const pp = step.ranks.length, h = pp <= 4 ? 52 : pp <= 16 ? 30 : 16;
  return { h, gap: pp <= 16 ? 6 : 3, height: pp * (h + (pp <= 16 ? 6 : 3)) + 8 };
}

function drawRankMemory(c, step, rank, y, h, s, most, isLasting) {
  const set = step.measured ? "measured" : "predicted", times = step[set].ranks[rank], course = step.courses[rank];
  const width = Math.floor(s.width), n = times.issued.length, perPx = (S.to - S.from) / width;
  const lasting = isLasting ? Object.values(step.memory[rank]) : [0, 0, 0];
  let i = Math.max(0, firstWhere(n, (k) => times.issued[k] > S.from));
  const picked = new Int32Array(width);
  for (let x = 0; x < width; x++) {
    // The most that is held in this column's time.
    const end = S.from + (x + 1) * perPx;
    let best = i, high = -1;
    for (;;) {
      const sum = heldAt(course, i);
      if (sum > high) high = sum, best = i;
      if (i < n && times.issued[i] <= end) i++; else break;
    }
    picked[x] = best;
  }
  // Pixel by pixel, from the bottom up: paths of so many corners take longer.
  const scale = Math.min(2, devicePixelRatio || 1), wide = Math.round(width * scale), high = Math.round(h * scale);
  const image = c.createImageData(wide, high), pixels = new Uint32Array(image.data.buffer);
  pixels.fill(opaque(theme.lane));
  const hues = CATEGORIES.map(({ hue }) => opaque(hue)), perByte = (high - scale) / most;
  for (let x = 0; x < wide; x++) {
    const at = PASSING * picked[Math.min(width - 1, Math.floor(x / scale))];
    let bytes = 0, from = 0;
    for (let part = 0; part < CATEGORIES.length; part++) {
      bytes += part < LASTING ? lasting[part] : course[at + part - LASTING];
      const to = Math.min(high, Math.round(bytes * perByte));
      for (let level = from; level < to; level++) pixels[(high - 1 - level) * wide + x] = hues[part];
      from = Math.max(from, to);
    }
  }
  c.putImageData(image, Math.round(s.left * scale), Math.round(y * scale));
}
// A pixel of a colour, as the memory of an image has it: the machine's bytes, from the lowest.
function opaque(hex) { const [r, g, b] = rgb(hex); return ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0; }

function drawMemoryStill(width, height, top, rows) {
  const isLasting = at("lasting").checked, step = S.step;
  const key = [S.key, S.from, S.to, width, height, top, theme.isDark, isLasting].join();
  if (key === memoryKey) return;
  memoryKey = key;
  const c = fitCanvas(memoryStill, width, height), s = span(width);
  c.fillStyle = theme.panel; c.fillRect(0, 0, width, height);
  memoryMost = Math.max(1, ...step.peaks.map((peak) => peak.within + (isLasting ? peak.lasting : 0)));
  step.peaks.forEach((peak, rank) => {
    const y = 4 + rank * (rows.h + rows.gap) - top;
    if (y + rows.h < 0 || y > height) return;
    drawRankMemory(c, step, rank, y, rows.h, s, memoryMost, isLasting);
    c.fillStyle = theme.ink; c.font = `600 ${rows.h > 18 ? 12 : 10}px system-ui, sans-serif`; c.textBaseline = "middle"; c.textAlign = "left";
    c.fillText((gutter() < 60 ? "" : "rank ") + rank, 6, y + rows.h / 2 - (rows.h > 28 && gutter() > 60 ? 7 : 0));
    if (rows.h > 28 && gutter() > 60) {
      c.fillStyle = theme.soft; c.font = "10px system-ui, sans-serif";
      c.fillText(bytesText(peak.within + (isLasting ? peak.lasting : 0)), 6, y + rows.h / 2 + 8);
    }
  });
}

function drawMemory() {
  const canvas = at("memory"), box = at("levels"), width = box.clientWidth, rows = memoryRows(S.step);
  const height = Math.min(rows.height, Math.round(innerHeight * 0.38) - 2);
  let spacer = box.querySelector(".spacer");
  if (!spacer) box.append(spacer = el("div", { className: "spacer" }));
  spacer.style.height = Math.max(0, rows.height - height) + "px";
  drawMemoryStill(width, height, box.scrollTop, rows);
  const c = fitCanvas(canvas, width, height), s = span(width), x = toX(S.t, s);
  c.save(); c.setTransform(1, 0, 0, 1, 0, 0); c.drawImage(memoryStill, 0, 0); c.restore();
  if (x >= s.left - 1 && x <= s.right + 1) {
    c.strokeStyle = theme.ink; c.lineWidth = 1.5;
    c.beginPath(); c.moveTo(x, 0); c.lineTo(x, height); c.stroke();
  }
}

function hitMemory(x, y) {
  const box = at("levels"), s = span(box.clientWidth), rows = memoryRows(S.step);
  const rank = Math.floor((y + box.scrollTop - 4) / (rows.h + rows.gap));
  if (x < s.left || x > s.right || rank < 0 || rank >= S.step.ranks.length) return null;
  return { rank, t: toT(x, s) };
}
