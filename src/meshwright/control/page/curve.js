// A curve as a small drawing: a line, and where points are many, a band from the least to the most.

const SPACE = "http://www.w3.org/2000/svg";
const EDGE = { left: 52, right: 8, top: 8, bottom: 20 };

/** `points`: [x, y] by growing x, y null where unknown. Returns them in at most `most` groups of
 * equal width: {x, mean, low, high}. */
export function grouped(points, most) {
  const known = points.filter(([, y]) => Number.isFinite(y));
  if (known.length <= most) return known.map(([x, y]) => ({ x, mean: y, low: y, high: y }));
  const first = known[0][0];
  const width = (known[known.length - 1][0] - first) / most || 1;
  const groups = [];
  let current = null;
  for (const [x, y] of known) {
    const number = Math.min(most - 1, Math.floor((x - first) / width));
    if (current?.number !== number) {
      current = { number, count: 0, x: 0, mean: 0, low: y, high: y };
      groups.push(current);
    }
    current.count++;
    current.x += (x - current.x) / current.count;
    current.mean += (y - current.mean) / current.count;
    current.low = Math.min(current.low, y);
    current.high = Math.max(current.high, y);
  }
  return groups;
}

function piece(parent, tag, attributes, text) {
  const found = document.createElementNS(SPACE, tag);
  for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
  if (text !== undefined) found.textContent = text;
  parent.append(found);
  return found;
}

/** Draw into `holder`. `say`: {x, y} write a value of an axis; without it, no axes. */
export function draw(holder, points, label, say = null) {
  const width = holder.clientWidth || 300;
  const height = holder.clientHeight || 40;
  const edge = say ? EDGE : { left: 1, right: 1, top: 2, bottom: 2 };
  const inner = { width: width - edge.left - edge.right, height: height - edge.top - edge.bottom };
  const groups = grouped(points, Math.max(8, Math.floor(inner.width / 2)));
  const svg = document.createElementNS(SPACE, "svg");
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", label);
  svg.dataset.points = points.length;
  holder.replaceChildren(svg);
  if (!groups.length) return;
  const low = Math.min(...groups.map((group) => group.low));
  const high = Math.max(...groups.map((group) => group.high));
  groups[0].x = points.find(([, value]) => Number.isFinite(value))[0];
  groups[groups.length - 1].x = points.findLast(([, value]) => Number.isFinite(value))[0];
  const from = groups[0].x;
  const to = groups[groups.length - 1].x;
  const x = (value) => round(edge.left + (to > from ? ((value - from) / (to - from)) * inner.width : 0));
  const y = (value) => round(edge.top + (high > low ? ((high - value) / (high - low)) * inner.height : inner.height / 2));
  if (say) axes(svg, { low, high, from, to, x, y, width, height, edge }, say);
  if (groups.length < points.length) {
    const up = groups.map((group) => `${x(group.x)},${y(group.high)}`);
    const down = groups.map((group) => `${x(group.x)},${y(group.low)}`).reverse();
    piece(svg, "polygon", { class: "band", points: [...up, ...down].join(" ") });
  }
  const route = groups.map((group) => `${x(group.x)},${y(group.mean)}`);
  piece(svg, "polyline", { class: "curve-line", points: route.join(" ") });
  const last = groups[groups.length - 1];
  piece(svg, "circle", { class: "curve-end", cx: x(last.x), cy: y(last.mean), r: say ? 3 : 2 });
}

function axes(svg, { low, high, from, to, x, y, width, height, edge }, say) {
  for (const value of high > low ? [low, (low + high) / 2, high] : [low]) {
    piece(svg, "line", { class: "rule", x1: edge.left, x2: width - edge.right, y1: y(value), y2: y(value) });
    piece(svg, "text", { x: edge.left - 6, y: y(value) + 4, "text-anchor": "end" }, say.y(value));
  }
  piece(svg, "text", { x: x(from), y: height - 4 }, say.x(from));
  if (to > from) piece(svg, "text", { x: x(to), y: height - 4, "text-anchor": "end" }, say.x(to));
}

const round = (value) => Math.round(value * 10) / 10;
