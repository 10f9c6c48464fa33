// The state of the page, its controls and its keys.
const S = { step: null, key: "", t: 0, from: 0, to: 1, isPlaying: false, tab: "time", chosen: null, rows: [], height: 0, frames: 0, stills: 0, rects: 0 };
const steps = new Map();
let asked = false;

function draw() {
  if (asked) return;
  asked = true;
  requestAnimationFrame(() => { asked = false; drawNow(); });
}
function drawNow() {
  if (!S.step) return;
  if (S.tab === "time") drawTimeline(), drawMemory(); else drawWhere();
  S.frames++;
  const step = S.step.first.step_ns, scrub = at("scrub");
  scrub.value = Math.round((S.t / step) * 10000);
  scrub.setAttribute("aria-valuetext", timeText(S.t));
  at("clock").textContent = `${timeText(S.t, 3)} of ${timeText(step, 3)}`;
}

const keyOf = (option) => `${option.schedule}/${option.zero}`;
async function choose(number) {
  const option = DATA.options[number];
  if (!option || !option.program) return;
  if (!steps.has(number)) steps.set(number, readStep(await unpack(option.program)));
  const before = S.step, share = before ? S.t / before.first.step_ns : 1;
  S.step = steps.get(number); S.number = number; S.key = keyOf(option); S.chosen = null;
  if (!S.step.courses) prepareMemory(S.step);
  Object.assign(S, layOut(S.step));
  S.t = share * S.step.first.step_ns; S.from = 0; S.to = S.step.first.step_ns;
  showOptions(); showCards(); showNumbers(); showLegend(); describe();
  if (S.tab === "where") openWhere();
  drawNow();
  performance.mark("ready");
  document.documentElement.dataset.ready = S.key;
}

function describe() {
  const { mesh, microbatches, chunks } = S.step, alike = mesh.dp * mesh.cp * mesh.tp;
  const axes = ["pp", "dp", "cp", "tp", "ep"].filter((axis) => mesh[axis] > 1).map((axis) => `${axis} = ${mesh[axis]}`).join(", ") || "one rank";
  const each = alike > 1 ? ` Each pipeline rank stands for ${alike} that run the same list.` : "";
  at("layout").textContent = `${axes}; ${microbatches} microbatch${microbatches === 1 ? "" : "es"}${chunks > 1 ? `; ${chunks} stages a rank` : ""}.${each}`;
  const name = `${S.step.schedule}, ZeRO ${S.step.zero}: ${S.step.ranks.length} pipeline ranks, ${timeText(S.step.first.step_ns, 3)}, bubble ${percent(S.step.first.bubble)} of compute`;
  at("time").setAttribute("aria-label", "Timeline of a step. " + name);
  at("memory").setAttribute("aria-label", "Memory of each rank over the step; the table below has the step in numbers.");
  at("where").setAttribute("aria-label", "Devices, and what each holds of every unit as the step plays.");
  at("chosen").textContent = "Point at an instruction, or choose one with the arrow keys, to see what it is and what waits for it.";
}

function showOptions() {
  const now = DATA.options[S.number];
  const pills = (name, field, values, label) => values.map((value) => {
    const other = field === "schedule" ? "zero" : "schedule";
    const same = DATA.options.findIndex((option) => option[field] === value && option[other] === now[other]);
    const option = DATA.options[same], input = el("input", { type: "radio", name, value, checked: value === now[field], disabled: !option || !option.program });
    input.addEventListener("change", () => choose(same).then(() => document.querySelector(`input[name=${name}]:checked`).focus()));
    return el("label", { className: "pill", title: (option && option.why) || "" }, input, el("span", { textContent: label(value) }));
  });
  const unique = (field) => [...new Set(DATA.options.map((option) => option[field]))];
  const set = (id, made) => { const box = at(id); box.hidden = made.length < 2; box.replaceChildren(box.querySelector("legend"), ...made); };
  set("schedules", pills("schedule", "schedule", unique("schedule"), (value) => value));
  set("zeros", pills("zero", "zero", unique("zero"), (value) => String(value)));
}

function nextOption(field) {
  const now = DATA.options[S.number], other = field === "schedule" ? "zero" : "schedule";
  const same = DATA.options.map((option, at) => at).filter((at) => DATA.options[at].program && DATA.options[at][other] === now[other]);
  return choose(same[(same.indexOf(S.number) + 1) % same.length]);
}

// Playing.
let last = 0;
function play(is = !S.isPlaying) {
  S.isPlaying = is;
  if (is && S.t >= S.step.first.step_ns) S.t = 0;
  at("play").textContent = is ? "❚❚ Pause" : "▶ Play";
  if (is) last = performance.now(), requestAnimationFrame(tick);
  draw();
}
function tick(now) {
  if (!S.isPlaying) return;
  const step = S.step.first.step_ns;
  S.t = Math.min(step, S.t + ((now - last) / 1000 / Number(at("speed").value)) * step);
  last = now;
  if (S.to - S.from < step && (S.t > S.to || S.t < S.from)) moveTo(S.t - (S.to - S.from) * 0.1);
  drawNow();
  if (S.t >= step) play(false); else requestAnimationFrame(tick);
}
function seek(t) {
  S.t = Math.max(0, Math.min(S.step.first.step_ns, t));
  draw();
}

// The window of time.
function moveTo(from) {
  const wide = S.to - S.from, step = S.step.first.step_ns;
  S.from = Math.max(0, Math.min(step - wide, from));
  S.to = S.from + wide;
  draw();
}
function zoom(factor, around = (S.from + S.to) / 2) {
  const step = S.step.first.step_ns, wide = Math.max(Math.min(step, 50), Math.min(step, (S.to - S.from) * factor));
  const share = (around - S.from) / (S.to - S.from);
  S.from = around - share * wide; S.to = S.from + wide;
  moveTo(S.from);
}
const middle = () => (S.t > S.from && S.t < S.to ? S.t : (S.from + S.to) / 2);
function fit() { S.from = 0; S.to = S.step.first.step_ns; draw(); }

function show(tab) {
  S.tab = tab; hideTip();
  for (const name of ["time", "where"]) {
    const is = name === tab;
    at("panel-" + name).hidden = !is;
    at("tab-" + name).setAttribute("aria-selected", is);
    at("tab-" + name).tabIndex = is ? 0 : -1;
  }
  if (tab === "where") openWhere();
  draw();
}

// The timeline as it is seen, with its memory below, as a file.
function save() {
  const parts = S.tab === "time" ? [at("time"), at("memory")] : [at("where")], whole = document.createElement("canvas"), c = whole.getContext("2d");
  whole.width = Math.max(...parts.map((one) => one.width));
  whole.height = parts.reduce((sum, one) => sum + one.height, 0);
  c.fillStyle = theme.panel; c.fillRect(0, 0, whole.width, whole.height);
  let y = 0;
  for (const one of parts) c.drawImage(one, 0, y), y += one.height;
  const link = el("a", { href: whole.toDataURL("image/png"), download: `step-${S.key.replace("/", "-zero")}.png` });
  link.click();
  return link.href;
}

// Choosing an instruction.
function pick(chosen, x, y) {
  S.chosen = chosen && chosen.i >= 0 ? chosen : null;
  if (!chosen) { hideTip(); draw(); return; }
  const lines = linesOf(chosen);
  showTip(lines, x, y);
  at("chosen").textContent = lines.join(". ");
  draw();
}
function pickByKey(key) {
  const set = S.step.measured ? "measured" : "predicted", now = S.chosen || { rank: 0, lane: 0, set, i: -1 };
  let rank = now.rank, list = S.step[now.set].ranks[rank].lanes[0], place = list.indexOf(now.i);
  if (key === "ArrowUp" || key === "ArrowDown") {
    const t = place < 0 ? S.from : S.step[now.set].ranks[rank].start[now.i];
    rank = Math.max(0, Math.min(S.step.ranks.length - 1, rank + (key === "ArrowUp" ? -1 : 1)));
    const times = S.step[now.set].ranks[rank];
    list = times.lanes[0];
    place = Math.min(list.length - 1, firstWhere(list.length, (k) => times.end[list[k]] > t));
  } else place = Math.max(0, Math.min(list.length - 1, place + (key === "ArrowRight" ? 1 : -1)));
  const i = list[place], times = S.step[now.set].ranks[rank], box = at("rows");
  if (times.start[i] < S.from || times.end[i] > S.to) moveTo((times.start[i] + times.end[i] - (S.to - S.from)) / 2);
  const row = rowOf(now.set, rank, 0);
  if (row.y < box.scrollTop + AXIS || row.y + row.h > box.scrollTop + box.clientHeight) box.scrollTop = row.y - box.clientHeight / 2;
  const place2 = at("time").getBoundingClientRect(), s = span(box.clientWidth);
  pick({ rank, i, set: now.set, lane: 0 }, place2.left + Math.max(s.left, toX((times.start[i] + times.end[i]) / 2, s)), place2.top + row.y - box.scrollTop + row.h);
}

function listen() {
  at("play").onclick = () => play();
  at("scrub").oninput = (event) => { play(false); seek((event.target.value / 10000) * S.step.first.step_ns); };
  at("closer").onclick = () => zoom(0.5, middle());
  at("farther").onclick = () => zoom(2, middle());
  at("fit").onclick = fit;
  at("save").onclick = save;
  at("lasting").onchange = draw;
  for (const name of ["time", "where"]) {
    at("tab-" + name).onclick = () => show(name);
    at("tab-" + name).onkeydown = (event) => {
      if (!["ArrowLeft", "ArrowRight"].includes(event.key)) return;
      const other = name === "time" ? "where" : "time";
      show(other); at("tab-" + other).focus();
    };
  }
  at("rows").onscroll = at("levels").onscroll = () => { hideTip(); draw(); };
  addEventListener("resize", () => { if (S.tab === "where") openWhere(); draw(); });
  dark.addEventListener("change", () => { readTheme(); showLegend(); if (S.tab === "where") openWhere(); draw(); });
  listenToPointer();
  addEventListener("keydown", onKey);
}

function listenToPointer() {
  const canvas = at("time"), pointers = new Map();
  let moved = 0, startFrom = 0, startX = 0, apart = 0;
  const place = (event) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
  const width = () => span(at("rows").clientWidth).width;
  canvas.onpointerdown = (event) => {
    pointers.set(event.pointerId, event.clientX);
    canvas.setPointerCapture(event.pointerId);
    moved = 0; startFrom = S.from; startX = event.clientX;
    if (pointers.size === 2) apart = Math.abs([...pointers.values()][0] - [...pointers.values()][1]);
  };
  canvas.onpointermove = (event) => {
    const [x, y] = place(event);
    if (pointers.has(event.pointerId)) {
      pointers.set(event.pointerId, event.clientX);
      const [one, other] = [...pointers.values()];
      if (pointers.size === 2) {
        const now = Math.max(8, Math.abs(one - other));
        zoom(apart / now, toT((one + other) / 2 - canvas.getBoundingClientRect().left, span(at("rows").clientWidth)));
        apart = now;
      } else if ((moved = Math.max(moved, Math.abs(event.clientX - startX))) > 4) {
        hideTip(); moveTo(startFrom - ((event.clientX - startX) / width()) * (S.to - S.from));
      }
      return;
    }
    pick(hit(x, y), event.clientX, event.clientY);
  };
  canvas.onpointerup = (event) => {
    const [x, y] = place(event), found = hit(x, y);
    if (moved <= 4 && pointers.size === 1) {
      if (y < AXIS) seek(toT(x, span(at("rows").clientWidth)));
      pick(found, event.clientX, event.clientY);
    }
    pointers.delete(event.pointerId);
  };
  canvas.onpointercancel = (event) => pointers.delete(event.pointerId);
  canvas.onpointerleave = (event) => { if (event.pointerType === "mouse") hideTip(); };
  canvas.ondblclick = (event) => { const [x] = place(event); seek(toT(x, span(at("rows").clientWidth))); };
  canvas.addEventListener("wheel", (event) => {
    if (!(event.ctrlKey || event.metaKey || event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY))) return;
    event.preventDefault();
    const [x] = place(event);
    if (event.ctrlKey || event.metaKey) zoom(Math.exp(event.deltaY / 300), toT(x, span(at("rows").clientWidth)));
    else moveTo(S.from + (((event.deltaX || event.deltaY) / width()) * (S.to - S.from)));
  }, { passive: false });
  const memory = at("memory");
  memory.onpointermove = (event) => {
    const box = memory.getBoundingClientRect(), found = hitMemory(event.clientX - box.left, event.clientY - box.top);
    if (found) showTip(memoryLines(found), event.clientX, event.clientY); else hideTip();
  };
  memory.onpointerleave = hideTip;
}

function onKey(event) {
  const target = event.target, isField = target.matches("input, select, button, [role=tab]");
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const step = S.step && S.step.first.step_ns, by = (S.to - S.from) / 100;
  const keys = {
    " ": () => play(), ",": () => (play(false), seek(S.t - by)), ".": () => (play(false), seek(S.t + by)), Home: () => seek(0), End: () => seek(step),
    "+": () => zoom(0.5, middle()), "=": () => zoom(0.5, middle()), "-": () => zoom(2, middle()), 0: fit,
    s: () => nextOption("schedule"), z: () => nextOption("zero"), d: () => show(S.tab === "time" ? "where" : "time"), Escape: () => pick(null),
  };
  if (target === at("time") && event.key.startsWith("Arrow")) { event.preventDefault(); pickByKey(event.key); return; }
  // What a control does with a key itself stays its own.
  if (!(event.key in keys) || (isField && [" ", "Home", "End"].includes(event.key))) return;
  event.preventDefault();
  keys[event.key]();
}

readTheme();
at("about").textContent = DATA.about;
listen();
choose(DATA.chosen);
// For tests and the curious: the state, and what draws.
window.superstep = { S, drawNow, save, seek, zoom, play, choose, arrowsOf, stateAt, ringAt, sendsOver, covered, perPixel, x: (t) => toX(t, span(at("rows").clientWidth)) };
