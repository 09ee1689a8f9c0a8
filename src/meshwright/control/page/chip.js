// The chip in focus: its sixteen figures, and the last minutes of one of them.

import { draw } from "./curve.js";
import { at, clock, keyed, make, mark, say, short, show } from "./dom.js";
import { look, LOOKS } from "./model.js";
import { get } from "./service.js";

export class Chip {
  #units = {};
  #figures = null;
  #series = null;
  #busy = false;
  #of = "";

  constructor(redraw) {
    this.redraw = redraw;
    this.figure = "utilization";
  }

  /** Ask for the figures of `key`, "node.chip", of a cluster; once at a time. */
  async ask(cluster, key) {
    if (this.#busy) return;
    this.#busy = true;
    const [node, chip] = key.split(".").map(Number);
    const path = `/v1/clusters/${cluster.id}`;
    const of = `${cluster.id} ${key}`;
    try {
      const [now, series] = await Promise.all([
        get(`${path}/hardware?node=${node}&chip=${chip}`),
        get(`${path}/metrics?figure=${this.figure}&node=${node}&chip=${chip}`),
      ]);
      this.#of = of;
      this.#units = now?.units ?? {};
      this.#figures = now?.nodes[0]?.chips[0]?.figures ?? null;
      this.#series = series;
    } catch {
      // Nothing answers: what is drawn stays, and the head of the page says since when.
    } finally {
      this.#busy = false;
    }
    this.redraw();
  }

  draw(model, cluster, key) {
    const [number, place] = (key ?? "").split(".").map(Number);
    const node = key && cluster ? model.nodes.get(number) : undefined;
    const chip = node?.chips.find((one) => one.chip === place);
    show(at("chip"), Boolean(chip));
    if (!chip) return;
    const holder = model.holders(cluster.id).get(key);
    const found = look(node, chip, holder);
    say(at("chip-title"), `${node.name} chip ${chip.chip}`);
    say(at("chip-health"), `${LOOKS[found][0]} ${LOOKS[found][1]}`.trim());
    mark(at("chip-health"), "look", found);
    say(at("chip-facts"), facts(node, chip, holder));
    if (this.#of !== `${cluster.id} ${key}`) {
      at("chip-figures").replaceChildren();
      at("chip-curve").replaceChildren();
      say(at("chip-caption"), "asking for its figures");
      return;
    }
    const known = Object.entries(this.#figures ?? {}).filter(([, value]) => value !== null);
    keyed(at("chip-figures"), known, ([name]) => name, (item) => this.#create(item), (row, item) => this.#update(row, item));
    this.#drawCurve(known.length > 0);
  }

  #create([name]) {
    const choose = () => {
      this.figure = name;
      this.redraw(true);
    };
    const words = name.replace(/_(bytes_s|bytes|c|w|mhz)$/, "").replaceAll("_", " ");
    return make("button", { type: "button", className: "figure", onclick: choose }, make("span", {}, words), make("b"));
  }

  #update(row, [name, value]) {
    say(row.lastChild, measured(value, this.#units[name] ?? ""));
    row.setAttribute("aria-pressed", String(name === this.figure));
  }

  #drawCurve(any) {
    const series = this.#series;
    const points = series ? series.times.map((when, at) => [when, series.mean[0]?.[at] ?? null]) : [];
    const known = points.filter(([, value]) => value !== null);
    show(at("chip-curve"), known.length > 1);
    const name = (series?.figure ?? this.figure).replaceAll("_", " ");
    if (known.length < 2) say(at("chip-caption"), any ? `${name}: no history yet` : "Its figures are not known");
    else {
      say(at("chip-caption"), `${name}, ${series.unit}, the last ${known.length} s`);
      draw(at("chip-curve"), known, `${name} of the last minutes`, { x: (when) => clock(when * 1000), y: short });
    }
  }
}

function facts(node, chip, holder) {
  const parts = [`node ${node.status}${node.message ? ` (${node.message})` : ""}`, `links ${chip.links}`];
  if (chip.spare) parts.push("stands on a spare node");
  parts.push(holder ? `${holder.job.name}, ${holder.rank === null ? "its spare" : `rank ${holder.rank}`}` : "no job");
  return parts.join(" · ");
}

function measured(value, unit) {
  if (unit === "ratio") return `${(value * 100).toFixed(1)} %`;
  if (unit === "events") return short(value);
  return unit.startsWith("bytes") ? short(value) + unit.replace("bytes", "B") : `${short(value)} ${unit}`;
}
