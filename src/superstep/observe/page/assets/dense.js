// More events than a row has room for: each pixel gets the mean of what its time saw. A lane's sums over equal cells of
// its time are made once, as sums from its start on, so that a frame costs two looks a pixel however much lies between.
const CELLS = 8192, SUMS = 5; // red, green, blue, time, how many begin
const strips = document.createElement("canvas");

const isDense = (times, lane, s) => {
  const [, first, last] = visible(times, lane, S.from, S.to);
  return last - first > s.width / 4;
};

// What of each of so many cells from a time on is covered by a list's events, from its first to its last, and in which
// colours. A lane has its events' starts, ends and places in a palette.
function covered(lane, list, first, last, from, per, cells) {
  const sums = new Float32Array(cells * SUMS), { start, end, shade, palette } = lane;
  for (let k = first; k < last; k++) {
    const i = list[k], hue = 3 * shade[i], x0 = (start[i] - from) / per, x1 = Math.min(cells, (end[i] - from) / per);
    if (x0 >= 0 && x0 < cells) sums[SUMS * Math.floor(x0) + 4]++;
    for (let x = Math.max(0, Math.floor(x0)); x < x1; x++) {
      const share = Math.min(x1, x + 1) - Math.max(x0, x), at = SUMS * x;
      sums[at] += palette[hue] * share; sums[at + 1] += palette[hue + 1] * share; sums[at + 2] += palette[hue + 2] * share; sums[at + 3] += share;
    }
  }
  return sums;
}

function fromTheStart(sums) {
  const out = new Float32Array(sums.length + SUMS), total = new Float64Array(SUMS);
  for (let at = 0; at < sums.length; at += SUMS) for (let part = 0; part < SUMS; part++) out[at + SUMS + part] = total[part] += sums[at + part];
  return out;
}

// Of a lane's events over each pixel of the window: from the cells, or where a pixel is less than one, from those in sight.
function perPixel(lane, list, [first, last], width) {
  const per = (S.to - S.from) / width, cell = lane.reach / CELLS;
  if (per < cell) return covered(lane, list, first, last, S.from, per, width);
  if (lane.made !== lane.palette) lane.made = lane.palette, lane.cells = fromTheStart(covered(lane, list, 0, list.length, 0, cell, CELLS));
  const cells = lane.cells, found = new Float32Array(width * SUMS), before = new Float64Array(SUMS);
  for (let x = 0; x <= width; x++) {
    const place = Math.max(0, Math.min(CELLS, (S.from + x * per) / cell)), at = SUMS * Math.min(CELLS - 1, Math.floor(place)), share = place - at / SUMS;
    for (let part = 0; part < SUMS; part++) {
      const value = cells[at + part] + share * (cells[at + SUMS + part] - cells[at + part]);
      if (x) found[SUMS * (x - 1) + part] = (value - before[part]) * (part < 4 ? cell / per : 1);
      before[part] = value;
    }
  }
  return found;
}

function eventsPerPixel(step, times, row, width) {
  times.reach ||= times.end.reduce((most, end) => Math.max(most, end), 1);
  const lanes = (times.dense ||= []), shade = step.ranks[row.rank].shade, [list, first, last] = visible(times, row.lane, S.from, S.to);
  const lane = (lanes[row.lane] ||= { start: times.start, end: times.end, shade, reach: times.reach });
  lane.palette = theme.rgbs;
  return perPixel(lane, list, [first, last], width);
}

// Red is the time in the bubble, green the time that communication was waited for.
const REASONS = Float32Array.of(1, 0, 0, 0, 1, 0);
function waitsPerPixel(times, width) {
  const start = times.wait, list = (times.waits ||= Int32Array.from(start.keys()));
  const lane = (times.denseWaits ||= {
    start, end: start.map((t, k) => t + times.waited[k]), shade: Uint8Array.from(times.reason, (reason) => (reason < 0 ? 0 : 1)), reach: times.reach, palette: REASONS,
  });
  return perPixel(lane, list, [firstWhere(list.length, (k) => lane.end[k] >= S.from), firstWhere(list.length, (k) => start[k] > S.to)], width);
}

// Rows that are dense, each a line of pixels that is drawn as high as the row.
function drawDense(c, step, rows, s) {
  const scale = Math.min(2, devicePixelRatio || 1), width = Math.floor(s.width * scale);
  if (!rows.length || width < 1) return;
  strips.width = width; strips.height = rows.length;
  const context = strips.getContext("2d"), image = context.createImageData(width, rows.length), pixels = image.data;
  const grounds = [theme.panel, theme.bubble, theme.exposed].map(rgb), lane = rgb(theme.lane);
  rows.forEach((row, n) => {
    const times = step[row.set].ranks[row.rank], sums = eventsPerPixel(step, times, row, width);
    const waits = row.lane === 0 ? waitsPerPixel(times, width) : null;
    for (let x = 0, at = 4 * width * n; x < width; x++, at += 4) {
      const from = SUMS * x, time = sums[from + 3];
      // What is short is seen all the same, beside the lane of products: half a pixel for each.
      const share = Math.min(1, row.lane ? Math.max(time, 0.5 * sums[from + 4]) : time);
      const isWait = waits && waits[from] + waits[from + 1] > 0.02, ground = waits ? grounds[isWait ? (waits[from + 1] > waits[from] ? 2 : 1) : 0] : lane;
      for (let part = 0; part < 3; part++) pixels[at + part] = ground[part] + (time > 0 ? (sums[from + part] / time - ground[part]) * share : 0);
      pixels[at + 3] = 255;
    }
  });
  context.putImageData(image, 0, 0);
  c.imageSmoothingEnabled = false;
  rows.forEach((row, n) => c.drawImage(strips, 0, n, width, 1, s.left, row.y, s.width, row.h));
  c.imageSmoothingEnabled = true;
}
