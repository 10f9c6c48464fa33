// Where the data is: each device as a box, and in it what it holds of each unit as the step plays.
const W = { boxes: [], cell: 0 };
const BLOCK = { params: "#0072b2", gathered: "#7fc4ee", local: "#e3b3cd", summed: "#a04b7b", optimizer: "#8a8f96", kept: "#009e73" };
const ROW = 17, GAP = 4, HEAD = 52;
const PARTS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#8a8f96"];

function openWhere() {
  const step = S.step, { places, shards } = placesOf(step), ranks = step.ranks.length;
  const many = ranks > 1 ? 8 : 16, rows = Math.min(ranks, 8), shown = places.slice(0, Math.max(1, Math.floor(many * (rows > 4 ? 0.5 : 1))));
  W.places = shown; W.shards = shards; W.rows = rows;
  const least = Math.max(132, Math.min(12, Math.max(...step.held.map((one) => one.length))) * 20 + 70);
  const wide = (at("where").parentElement.clientWidth || innerWidth - 40) - 18;
  // Without a pipeline boxes go on in the next line; with one a line is a stage.
  W.perLine = ranks > 1 ? shown.length : Math.max(1, Math.min(shown.length, Math.floor((wide - 10) / (least + 16))));
  W.width = Math.max(least, Math.min(440, (wide - 10) / W.perLine - 16));
  const lines = ["parameters", "gradients", ...(step.frozen.length === step.units.length ? [] : ["optimizer"]), "activations"];
  if (step.mesh.cp > 1) lines.push("keys");
  if (step.mesh.ep > 1) lines.push("experts");
  W.lines = lines;
  W.height = HEAD + lines.length * (ROW + GAP) + 8;
  W.total = { w: Math.max(wide, W.perLine * (W.width + 16) + 10), h: Math.ceil((rows * shown.length) / W.perLine) * (W.height + 26) + 14 };
  W.boxes = [];
  for (let rank = 0; rank < rows; rank++) shown.forEach((place, n) => {
    const line = rank * Math.ceil(shown.length / W.perLine) + Math.floor(n / W.perLine);
    W.boxes.push({ rank, place, x: 10 + (n % W.perLine) * (W.width + 16), y: 14 + line * (W.height + 26) });
  });
  const hidden = ranks * places.length - W.boxes.length;
  W.note = hidden > 0 ? ` Shown are ${W.boxes.length} of ${ranks * places.length} ranks.` : "";
  at("where").setAttribute("aria-label", `Devices of a step with ${step.schedule}, ZeRO ${step.zero}: what each holds of every unit.`);
  showBlocks();
}

function showBlocks() {
  const step = S.step, item = (hue, text) => el("li", {}, filled(hue), text), made = [];
  made.push(item(BLOCK.params, step.zero ? "parameters, its own share" : "parameters"));
  if (step.zero) made.push(item(BLOCK.gathered, "gathered from other ranks"));
  made.push(item(BLOCK.local, "gradient of its own microbatches"), item(BLOCK.summed, "gradient, summed"), item(BLOCK.optimizer, "optimizer's moments"), item(BLOCK.kept, "kept for the backward pass"));
  if (step.mesh.cp > 1) made.push(el("li", {}, "keys: a colour for the part of the sequence that they are of"));
  if (step.mesh.tp > 1) made.push(el("li", {}, "a band of a block: this rank's part of matrices cut over tp"));
  at("blocks").replaceChildren(...made);
}

const unitsOf = (rank) => { const held = S.step.held[rank]; return held.length <= 12 ? held : [...held.slice(0, 6), ...held.slice(-6)]; };
const gutterOf = () => 70;
function cellOf(box, u, line) {
  const units = unitsOf(box.rank), n = units.indexOf(u), wide = (W.width - gutterOf() - 8) / units.length;
  return { x: box.x + gutterOf() + n * wide, y: box.y + HEAD + line * (ROW + GAP), w: wide - 3, h: ROW };
}
const roundTo = (x) => Math.round(x * 2) / 2;

// A block, cut along its length into shards and across into tp bands; each shard has a hue of its own, or none.
function drawBlock(c, cell, place, hues, isOpen) {
  const { tp } = S.step.mesh, band = cell.h / tp, wide = cell.w / W.shards;
  c.fillStyle = theme.isDark ? "#262d34" : "#eef1f3"; c.fillRect(cell.x, cell.y, cell.w, cell.h);
  hues.forEach((one, k) => {
    if (!one) return;
    c.globalAlpha = one.alpha ?? 1; c.fillStyle = one.hue;
    c.fillRect(cell.x + k * wide, cell.y + place.p * band, Math.max(1, wide * (one.part ?? 1) - (W.shards > 1 ? 0.6 : 0)), band);
  });
  c.globalAlpha = 1;
  c.strokeStyle = isOpen ? theme.ink : theme.line; c.lineWidth = isOpen ? 1.4 : 1;
  c.strokeRect(roundTo(cell.x), roundTo(cell.y), cell.w, cell.h);
}

function drawUnits(c, box, state) {
  const step = S.step, mine = box.place.shard, busy = state.busy >= 0 ? step.ranks[box.rank].unit[state.busy] : -1;
  for (const u of unitsOf(box.rank)) {
    const one = state.units.get(u), all = [...Array(W.shards).keys()];
    const params = all.map((k) => (k === mine || !step.zero ? { hue: BLOCK.params } : one.gathered > 0 ? { hue: BLOCK.gathered, part: one.gathered } : null));
    drawBlock(c, cellOf(box, u, 0), box.place, params, u === busy);
    if (!one.isFrozen) {
      const sums = step.zero ? (k) => k === mine : () => true, reduced = Math.max(0, one.reducing);
      const gradients = all.map((k) => {
        if (one.isSummed && sums(k) && !(one.buffer && one.isLocal && step.zero >= 2)) return { hue: BLOCK.summed };
        if (!one.buffer || !one.isLocal) return null;
        return one.reducing >= 0 && sums(k) ? { hue: mixed(BLOCK.local, BLOCK.summed, reduced) } : { hue: BLOCK.local, alpha: one.reducing >= 0 ? 1 - 0.7 * reduced : 1 };
      });
      drawBlock(c, cellOf(box, u, 1), box.place, gradients, one.reducing >= 0);
      const flash = state.updating >= 0 ? mixed(BLOCK.optimizer, theme.isDark ? "#ffffff" : "#111111", 0.5 - Math.abs(0.5 - state.updating)) : BLOCK.optimizer;
      const line = W.lines.indexOf("optimizer");
      if (line >= 0) drawBlock(c, cellOf(box, u, line), box.place, all.map((k) => (k === mine || !step.zero ? { hue: flash } : null)), state.updating >= 0);
    }
    const cell = cellOf(box, u, W.lines.indexOf("activations")), most = Math.max(4, Math.floor(cell.w / 4)), each = cell.w / most;
    c.fillStyle = BLOCK.kept;
    one.kept.slice(-most).forEach((_, k) => c.fillRect(cell.x + k * each, cell.y + 2, each - 1, cell.h - 4));
  }
}

function drawBox(c, box, state) {
  const step = S.step, { place } = box, { mesh } = step, number = box.rank * (mesh.dp * mesh.cp * mesh.tp) + place.place;
  c.fillStyle = theme.panel; c.strokeStyle = state.busy >= 0 ? theme.accent : theme.line; c.lineWidth = state.busy >= 0 ? 2 : 1.2;
  c.beginPath(); c.roundRect(box.x, box.y, W.width, W.height, 8); c.fill(); c.stroke();
  c.textBaseline = "middle"; c.textAlign = "left"; c.fillStyle = theme.ink; c.font = "600 12px system-ui, sans-serif";
  const title = `rank ${number}`;
  c.fillText(title, box.x + 9, box.y + 13);
  const axes = [["pp", box.rank], ["dp", place.d], ["cp", place.c], ["tp", place.p]].filter(([axis]) => mesh[axis] > 1).map(([axis, n]) => `${axis} ${n}`).join(" ");
  const after = c.measureText(title).width + 16;
  c.font = "11px system-ui, sans-serif"; c.fillStyle = theme.soft;
  c.fillText(axes, box.x + after, box.y + 13);
  c.save(); c.beginPath(); c.rect(box.x, box.y, W.width - 6, W.height); c.clip();
  const busy = state.busy;
  c.fillText(busy >= 0 ? shortName(box.rank, busy) : state.isUpdated ? "updated" : "waits", box.x + 9, box.y + 28);
  c.restore();
  if (busy >= 0) {
    c.fillStyle = hueOf(step.ranks[box.rank], busy);
    c.fillRect(box.x + 9, box.y + 34.5, (W.width - 18) * state.progress, 2);
  }
  c.fillStyle = theme.soft; c.font = "10px system-ui, sans-serif";
  W.lines.forEach((name, line) => c.fillText(name, box.x + 6, box.y + HEAD + line * (ROW + GAP) + ROW / 2));
  c.textAlign = "center";
  for (const u of unitsOf(box.rank)) {
    const cell = cellOf(box, u, 0);
    if (cell.w > 15) c.fillText("u" + u, cell.x + cell.w / 2, cell.y - 7);
  }
  c.textAlign = "left";
  drawUnits(c, box, state);
  if (mesh.cp > 1) drawKeys(c, box, state);
  if (mesh.ep > 1) drawExperts(c, box, state);
}
function shortName(rank, i) {
  const columns = S.step.ranks[rank], kind = KINDS[columns.kind[i]].says, u = columns.unit[i], m = columns.microbatch[i];
  return kind + (u >= 0 ? ` u${u}` : "") + (m >= 0 ? ` m${m}` : "");
}

// What the unit's pass sends over one axis of its own stage, where it is at it.
function sendsOver(rank, state, axis) {
  if (state.busy < 0) return null;
  const columns = S.step.ranks[rank], way = { forward: "forward", recompute: "forward", backward: "backward", "backward-input": "backward" }[KINDS[columns.kind[state.busy]].name];
  return way && ((S.step.messages[columns.unit[state.busy]] || {})[way] || []).find((one) => one[1] === axis) || null;
}

// Ring attention: at hop h a rank has the keys of the rank h places before it, and passes them on.
function ringAt(rank, state) {
  const { cp } = S.step.mesh, message = S.step.context === "ring" && sendsOver(rank, state, "cp");
  if (!message) return { hop: 0, way: 0, isOn: false };
  const at = Math.min(cp - 1e-6, state.progress * cp);
  return { hop: Math.floor(at), way: Math.floor(at) < cp - 1 ? at % 1 : 0, isOn: true };
}
function keysCell(box) {
  const line = W.lines.indexOf("keys");
  return { x: box.x + gutterOf(), y: box.y + HEAD + line * (ROW + GAP), w: W.width - gutterOf() - 11, h: ROW };
}
function drawKeys(c, box, state) {
  const { cp } = S.step.mesh, ring = ringAt(box.rank, state), cell = keysCell(box), wide = cell.w / cp;
  const origin = (box.place.c - ring.hop + cp) % cp;
  for (let k = 0; k < cp; k++) {
    c.strokeStyle = theme.line; c.strokeRect(roundTo(cell.x + k * wide), roundTo(cell.y), wide - 3, cell.h);
    const met = ring.isOn && (box.place.c - k + cp) % cp < ring.hop;
    if (k !== origin && !met) continue;
    c.globalAlpha = k === origin ? 1 : 0.28;
    c.fillStyle = PARTS[k % PARTS.length]; c.fillRect(cell.x + k * wide, cell.y, wide - 3, cell.h);
    c.globalAlpha = 1;
    if (k === origin && wide > 14) c.fillStyle = inkOn(PARTS[k % PARTS.length]), c.textAlign = "center", c.fillText(String(k), cell.x + (k + 0.5) * wide - 1.5, cell.y + cell.h / 2), c.textAlign = "left";
  }
}
function drawExperts(c, box, state) {
  const { ep } = S.step.mesh, line = W.lines.indexOf("experts"), cell = { ...keysCell(box), y: box.y + HEAD + line * (ROW + GAP) }, wide = cell.w / ep;
  for (let k = 0; k < ep; k++) {
    c.strokeStyle = theme.line; c.strokeRect(roundTo(cell.x + k * wide), roundTo(cell.y), wide - 3, cell.h);
    if (k !== box.place.expert) continue;
    c.fillStyle = PARTS[k % PARTS.length]; c.fillRect(cell.x + k * wide, cell.y, wide - 3, cell.h);
  }
}

// What is under way between boxes.
const middleOf = (cell) => [cell.x + cell.w / 2, cell.y + cell.h / 2];
function dot(c, [x0, y0], [x1, y1], way, hue, size = 6, label = "") {
  const x = x0 + (x1 - x0) * way, y = y0 + (y1 - y0) * way - Math.sin(Math.PI * way) * Math.min(12, Math.abs(x1 - x0) / 8);
  c.fillStyle = hue; c.strokeStyle = theme.panel; c.lineWidth = 1.2;
  c.beginPath(); c.roundRect(x - size / 2, y - size / 2, size, size, 1.5); c.fill(); c.stroke();
  if (label) c.fillStyle = theme.ink, c.font = "600 11px system-ui, sans-serif", c.textAlign = "center", c.fillText(label, x, y - size - 2), c.textAlign = "left";
}
const pulse = (progress, times) => (progress * times) % 1;

function drawMoves(c, states) {
  const boxOf = (rank, place) => W.boxes.find((box) => box.rank === rank && box.place.place === place);
  for (const box of W.boxes) {
    const state = states[box.rank], group = W.boxes.filter((other) => other.rank === box.rank && other.place.p === box.place.p && other.place.replica === box.place.replica && other !== box);
    for (const u of unitsOf(box.rank)) {
      const one = state.units.get(u);
      if (one.isFetching) for (const other of group) dot(c, middleOf(cellOf(other, u, 0)), middleOf(cellOf(box, u, 0)), one.gathered, BLOCK.params);
      if (one.reducing >= 0) for (const other of group) dot(c, middleOf(cellOf(other, u, 1)), middleOf(cellOf(box, u, 1)), one.reducing, BLOCK.summed);
    }
    for (const { i, done } of state.sends) {
      const columns = S.step.ranks[box.rank], to = boxOf(columns.peer[i], box.place.place), hue = columns.wire[i] ? "#d55e00" : "#0072b2";
      if (to) dot(c, [box.x + W.width / 2, box.y + (to.y > box.y ? W.height : 0)], [to.x + W.width / 2, to.y + (to.y > box.y ? 0 : W.height)], done, hue, 12, "m" + columns.microbatch[i]);
    }
    drawInside(c, box, state, boxOf);
  }
}

// Communication in the midst of a unit: over tp, round a ring, between experts.
function drawInside(c, box, state, boxOf) {
  const { tp, cp, ep } = S.step.mesh, { place } = box, centre = (one) => [one.x + W.width / 2, one.y + HEAD - 22];
  if (tp > 1 && sendsOver(box.rank, state, "tp")) {
    const next = boxOf(box.rank, place.place - place.p + ((place.p + 1) % tp));
    if (next) dot(c, centre(box), centre(next), pulse(state.progress, 4), theme.warm, 7);
  }
  if (cp > 1) {
    const ring = ringAt(box.rank, state), origin = (place.c - ring.hop + cp) % cp, next = boxOf(box.rank, (place.d * cp + ((place.c + 1) % cp)) * tp + place.p);
    if (ring.isOn && ring.way > 0 && next) dot(c, middleOf(keysCell(box)), middleOf(keysCell(next)), ring.way, PARTS[origin % PARTS.length], 11);
  }
  const exchange = ep > 1 && sendsOver(box.rank, state, "ep");
  if (exchange && (state.progress < 0.35 || state.progress > 0.65)) {
    const way = state.progress < 0.35 ? state.progress / 0.35 : (state.progress - 0.65) / 0.35;
    for (const other of W.boxes) {
      if (other === box || other.rank !== box.rank || other.place.ep !== place.ep) continue;
      // There: to the rank whose experts were chosen, in their colour. Back: from it.
      const hue = PARTS[(state.progress < 0.35 ? other : box).place.expert % PARTS.length], line = W.lines.indexOf("experts");
      const spot = (one) => middleOf({ ...keysCell(one), y: one.y + HEAD + line * (ROW + GAP) });
      dot(c, spot(box), spot(other), way, hue, 6);
    }
  }
}

function drawWhere() {
  if (!W.boxes.length) openWhere();
  const c = fitCanvas(at("where"), W.total.w, W.total.h), step = S.step;
  c.fillStyle = theme.ground; c.fillRect(0, 0, W.total.w, W.total.h);
  const states = [...Array(W.rows).keys()].map((rank) => stateAt(step, rank, S.t));
  for (const box of W.boxes) drawBox(c, box, states[box.rank]);
  drawMoves(c, states);
  const said = states.slice(0, 4).map((state, rank) => `${step.ranks.length > 1 ? `pipeline rank ${rank}` : "each rank"}: ${state.busy >= 0 ? shortName(rank, state.busy) : state.isUpdated ? "updated" : "waits"}`);
  at("story").textContent = `At ${timeText(S.t, 3)}, ${said.join("; ")}.${W.note}`;
}
