// Colours: after Okabe and Ito (2008), told apart with any colour vision; brightness differs too, and letters say the rest.
const HUES = {
  forward: ["#0072b2", "#3391cb"], recompute: ["#7fc4ee", "#a2d5f4"], backward: ["#e69f00", "#f2bb45"],
  "backward-input": ["#e69f00", "#f2bb45"], "backward-weight": ["#009e73", "#3fb896"], settle: ["#6b737c", "#6b737c"],
  tie: ["#6b737c", "#6b737c"], "reduce-partial": ["#6b737c", "#6b737c"], step: ["#2f3942", "#2f3942"], fetch: ["#c9b800", "#ddd03a"],
  reduce: ["#cc79a7", "#cc79a7"], "reduce-replicas": ["#a04b7b", "#a04b7b"], send: ["#56b4e9", "#d55e00"], snapshot: ["#8c8c8c", "#8c8c8c"],
  offload: ["#7b5ea7", "#7b5ea7"], reload: ["#b39ddb", "#b39ddb"],
  free: ["#999999", "#999999"], recv: ["#56b4e9", "#d55e00"],
};
const DARK = { step: ["#cfd6dd", "#cfd6dd"], settle: ["#98a1ab", "#98a1ab"], tie: ["#98a1ab", "#98a1ab"], "reduce-partial": ["#98a1ab", "#98a1ab"] };
const CATEGORIES = [
  { name: "parameters", hue: "#0072b2" }, { name: "gradients", hue: "#cc79a7" }, { name: "optimizer", hue: "#8a8f96" },
  { name: "gathered parameters", hue: "#c9b800" }, { name: "whole gradients", hue: "#a04b7b" },
  { name: "kept activations", hue: "#009e73" }, { name: "between units", hue: "#d55e00" },
  { name: "workspace", hue: "#56b4e9" },
];
const LASTING = 3, PASSING = CATEGORIES.length - LASTING;
const dark = matchMedia("(prefers-color-scheme: dark)");
const rgb = (hex) => [1, 3, 5].map((from) => parseInt(hex.slice(from, from + 2), 16));
const mixed = (a, b, share) => "#" + rgb(a).map((x, i) => Math.round(x + (rgb(b)[i] - x) * share).toString(16).padStart(2, "0")).join("");
const theme = {};

function readTheme() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["ground", "panel", "ink", "soft", "line", "accent", "warm", "cool"]) theme[name] = style.getPropertyValue("--" + name).trim();
  theme.isDark = dark.matches;
  theme.bubble = theme.isDark ? "#2a3037" : "#eceff2";
  theme.lane = theme.isDark ? "#20262c" : "#f4f6f7";
  theme.exposed = theme.isDark ? "#5c3038" : "#f6d3cf";
  theme.hues = KINDS.map((kind) => (theme.isDark && DARK[kind.name]) || HUES[kind.name]);
  // Stages of one rank differ in depth; two neighbours among microbatches in brightness.
  theme.shades = theme.hues.map((pair) => [0, 0.28, 0.46, 0.58].map((share) => pair.map((hue) => mixed(hue, theme.isDark ? "#ffffff" : "#101820", share * 0.8))));
  theme.palette = theme.shades.flat(2);
  theme.rgbs = Float32Array.from(theme.palette.flatMap(rgb));
  theme.patterns = null;
}

// The place of each instruction's hue in the palette: by kind, stage of its rank, and microbatch or wire.
function shadesOf(step, columns) {
  return Uint8Array.from(columns.kind, (kind, i) => {
    const unit = columns.unit[i], m = columns.microbatch[i], isWire = KINDS[kind].lane === "wire";
    const chunk = unit >= 0 && columns.lane[i] === 0 ? Math.min(3, step.chunkOf[step.stageOf[unit]]) : 0;
    return 8 * kind + 2 * chunk + (isWire ? columns.wire[i] : m > 0 ? m & 1 : 0);
  });
}
const hueOf = (columns, i) => theme.palette[columns.shade[i]];
// Black or white, whichever is read better on the hue.
const inkOn = (hex) => { const [r, g, b] = rgb(hex); return 0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#10161b" : "#ffffff"; };

function hatch(context, hue, ground) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const c = tile.getContext("2d");
  c.fillStyle = ground; c.fillRect(0, 0, 8, 8);
  c.strokeStyle = hue; c.lineWidth = 1.4;
  c.beginPath();
  for (const x of [-8, 0, 8]) c.moveTo(x, 8), c.lineTo(x + 8, 0);
  c.stroke();
  return context.createPattern(tile, "repeat");
}
function patterns(context) {
  theme.patterns ||= {
    bubble: hatch(context, theme.isDark ? "#48525d" : "#c3cad2", theme.bubble),
    exposed: hatch(context, theme.isDark ? "#c46a5c" : "#d55e00", theme.exposed),
  };
  return theme.patterns;
}

function fitCanvas(canvas, width, height, options) {
  const scale = Math.min(2, devicePixelRatio || 1);
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.width = width + "px";
    canvas.style.height = height + "px";
  }
  const context = canvas.getContext("2d", options);
  context.setTransform(scale, 0, 0, scale, 0, 0);
  return context;
}

function sample(draw) {
  const canvas = document.createElement("canvas");
  const context = fitCanvas(canvas, 22, 14);
  draw(context);
  canvas.setAttribute("aria-hidden", "true");
  return canvas;
}
function filled(hue) { return sample((c) => { c.fillStyle = hue; c.fillRect(0, 0, 22, 14); }); }
