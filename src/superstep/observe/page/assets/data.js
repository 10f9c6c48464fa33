// The data of the page, and a step's columns as typed arrays.
const DATA = JSON.parse(document.getElementById("data").textContent);
const KINDS = DATA.kinds, LANES = DATA.lanes;
const KIND = Object.fromEntries(KINDS.map((kind, at) => [kind.name, at]));

function summed(differences) {
  const out = new Float64Array(differences.length);
  let sum = 0;
  for (let i = 0; i < out.length; i++) out[i] = sum += differences[i];
  return out;
}

// One set of times of a step: when each instruction ran, in the order of each lane, and what waited.
function readTimes(step, told) {
  const ranks = told.ranks.map((raw, r) => {
    const columns = step.ranks[r], n = columns.kind.length;
    const start = summed(raw.start), took = Float64Array.from(raw.took), end = new Float64Array(n);
    const issued = new Float64Array(n), lanes = LANES.map(() => []);
    let clock = 0;
    for (let i = 0; i < n; i++) {
      end[i] = start[i] + took[i];
      const lane = columns.lane[i];
      // What runs beside the compute is issued when the compute before it is done.
      if (lane === 0) issued[i] = Math.max(clock, start[i]), clock = Math.max(clock, end[i]);
      else issued[i] = clock;
      if (columns.kind[i] !== KIND.recv && (columns.kind[i] !== KIND.free)) lanes[lane].push(i);
    }
    const longest = lanes.map((list) => list.reduce((most, i) => Math.max(most, took[i]), 0));
    for (const list of lanes) list.sort((a, b) => start[a] - start[b]);
    const wait = summed(raw.wait), waited = Float64Array.from(raw.waited);
    return { start, end, took, issued, longest, lanes: lanes.map((list) => Int32Array.from(list)), wait, waited, reason: raw.for };
  });
  return { ...told, ranks };
}

function readStep(step) {
  step.ranks = step.ranks.map((columns) => ({
    kind: Uint8Array.from(columns.kind), unit: Int16Array.from(columns.unit), microbatch: Int32Array.from(columns.microbatch),
    peer: Int16Array.from(columns.peer), level: columns.level, wire: columns.wire,
    lane: Uint8Array.from(columns.kind, (kind, i) => (KINDS[kind].lane === "wire" ? 3 + columns.wire[i] : LANES.indexOf(KINDS[kind].lane))),
  }));
  step.stageOf = new Int16Array(step.units.length);
  step.stages.forEach((units, s) => units.forEach((u) => { step.stageOf[u] = s; }));
  const own = step.placement.map((rank, s) => step.placement.slice(0, s).filter((other) => other === rank).length);
  step.chunkOf = own;
  for (const columns of step.ranks) columns.shade = shadesOf(step, columns);
  step.predicted = readTimes(step, step.predicted);
  if (step.measured) step.measured = readTimes(step, step.measured);
  step.first = step.measured || step.predicted;
  step.usedLanes = LANES.map((_, lane) => lane).filter((lane) => lane === 0 || step.ranks.some((columns) => columns.lane.includes(lane)));
  return step;
}

// The first place of a sorted list from which on `is` holds.
function firstWhere(length, is) {
  let low = 0, high = length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (is(middle)) high = middle; else low = middle + 1;
  }
  return low;
}

function find(columns, kinds, unit, microbatch, wire = null) {
  for (let i = 0; i < columns.kind.length; i++) {
    if (kinds.includes(columns.kind[i]) && columns.unit[i] === unit && columns.microbatch[i] === microbatch
      && (wire === null || columns.wire[i] === wire)) return i;
  }
  return -1;
}
