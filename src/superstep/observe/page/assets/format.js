// Small things that pages share.
const at = (id) => document.getElementById(id);
async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}
// A small number as people write it: 8.4e-6, and not 0.000008362.
const round = (x, digits) => (x && Math.abs(x) < 1e-3 ? x.toExponential(Math.min(1, digits - 1)) : Number(x.toPrecision(digits)).toString());
function timeText(ns, digits = 4) {
  const size = Math.abs(ns);
  if (size >= 1e9) return round(ns / 1e9, digits) + "\u00a0s";
  if (size >= 1e6) return round(ns / 1e6, digits) + "\u00a0ms";
  if (size >= 1e3) return round(ns / 1e3, digits) + "\u00a0µs";
  return Math.round(ns) + "\u00a0ns";
}
function bytesText(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  while (Math.abs(bytes) >= 1024 && power < 4) bytes /= 1024, power++;
  return round(bytes, 3) + "\u00a0" + units[power];
}
function countText(number) {
  for (const [size, sign] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]]) if (Math.abs(number) >= size) return round(number / size, 3) + sign;
  return round(number, 3);
}
const percent = (share) => (100 * share).toFixed(1) + "%";
function el(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}
