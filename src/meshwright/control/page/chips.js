// The cluster in focus: its nodes and chips as a grid that is coloured by health.

import { at, keyed, make, mark, say, show } from "./dom.js";
import { look, LOOKS, worst } from "./model.js";

const MOST_CELLS = 2048; // beyond it a cell is a node

/** Draw all of it. `choose` is called with "node.chip". */
export function drawCluster(model, cluster, chosen) {
  show(at("cluster"), Boolean(cluster));
  if (!cluster) return;
  say(at("cluster-title"), cluster.name);
  say(at("cluster-status"), cluster.status);
  mark(at("cluster-status"), "status", cluster.status);
  const spares = cluster.spares ? `, ${cluster.spares} spare` : "";
  say(
    at("cluster-facts"),
    `${cluster.nodes} nodes of ${cluster.chips_per_node} chips${spares} · ${cluster.engine} · ` +
      `${cluster.healthy_chips} of ${cluster.chips} healthy · ${cluster.chips_in_use} in use`,
  );
  say(at("cluster-message"), cluster.message);
  show(at("cluster-message"), Boolean(cluster.message));
  const work = model.work.get(cluster.id);
  show(at("work"), Boolean(work));
  if (work) {
    at("work-bar").value = work.progress;
    say(at("work-line"), work.text);
  }
  const holders = model.holders(cluster.id);
  const nodes = [...model.nodes.values()];
  const large = cluster.chips > MOST_CELLS;
  at("nodes").classList.toggle("large", large);
  if (large) drawLarge(nodes, holders, chosen);
  else keyed(at("nodes"), nodes, (node) => node.number, createNode, (row, node) => updateNode(row, node, holders));
  keepTabStop(chosen);
}

function createNode(node) {
  const name = make("span", { className: "node-name" });
  return make("div", { className: "node", role: "group" }, name, make("div", { className: "cells" }));
}

function updateNode(row, node, holders) {
  const [name, cells] = row.children;
  const state = node.status === "RUNNING" ? "" : node.status.toLowerCase();
  say(name, state ? `${node.number} ${state}` : String(node.number));
  const title = [node.name, node.status, node.message].filter(Boolean).join(", ");
  if (row.title !== title) row.title = title;
  mark(row, "status", node.status);
  keyed(cells, node.chips, (chip) => `${node.number}.${chip.chip}`, createCell, (cell, chip) => {
    const holder = holders.get(cell.dataset.key);
    updateCell(cell, look(node, chip, holder), `${node.name} chip ${chip.chip}`, words(chip, holder));
    mark(cell, "spare", chip.spare ? "yes" : "no");
  });
}

function createCell() {
  return make("button", { className: "cell", type: "button", tabIndex: -1 });
}

function updateCell(cell, found, name, more) {
  mark(cell, "look", found);
  say(cell, LOOKS[found][0]);
  const label = `${name}: ${LOOKS[found][1]}${more}`;
  if (cell.title === label) return;
  cell.title = label;
  cell.setAttribute("aria-label", label);
}

function words(chip, holder) {
  const parts = chip.spare ? [", spare"] : [];
  if (holder) parts.push(`, ${holder.job.name} ${holder.rank === null ? "spare" : `rank ${holder.rank}`}`);
  return parts.join("");
}

/** Thousands of chips: a cell is a node, by its worst chip; the chips of the chosen one follow. */
function drawLarge(nodes, holders, chosen) {
  const open = Number((chosen ?? "0.0").split(".")[0]);
  const parts = [{ key: "all" }, ...nodes.filter((node) => node.number === open)];
  keyed(
    at("nodes"),
    parts,
    (part) => part.key ?? part.number,
    (part) => (part.key ? make("div", { className: "cells" }) : createNode()),
    (element, part) => {
      if (!part.key) return updateNode(element, part, holders);
      keyed(element, nodes, (node) => node.number, createCell, (cell, node) => {
        const looks = new Map();
        for (const chip of node.chips) {
          const found = look(node, chip, holders.get(`${node.number}.${chip.chip}`));
          looks.set(found, (looks.get(found) ?? 0) + 1);
        }
        const found = worst(looks);
        const count = looks.get(found) ?? 0;
        updateCell(cell, found, node.name, ` ${count} of ${node.chips.length} chips`);
      });
    },
  );
}

/** One cell takes part in Tab; arrows go on from there. */
function keepTabStop(chosen) {
  const holder = at("nodes");
  for (const old of holder.querySelectorAll('[aria-pressed="true"]')) {
    if (old.dataset.key !== chosen) old.removeAttribute("aria-pressed");
  }
  const cell = cellOf(chosen);
  cell?.setAttribute("aria-pressed", "true");
  if (!holder.querySelector('.cell[tabindex="0"]')) {
    const first = cell ?? holder.querySelector(".cell");
    if (first) first.tabIndex = 0;
  }
}

const cellOf = (key) => (key ? at("nodes").querySelector(`.cell[data-key="${CSS.escape(key)}"]`) : null);

export function listen(choose) {
  const holder = at("nodes");
  holder.addEventListener("click", (event) => {
    const cell = event.target.closest(".cell");
    // A cell that is a whole node stands for its first chip.
    if (cell) choose(cell.dataset.key.includes(".") ? cell.dataset.key : `${cell.dataset.key}.0`);
  });
  holder.addEventListener("keydown", (event) => {
    const cell = event.target.closest(".cell");
    const next = cell && neighbour(cell, event.key);
    if (!next) return;
    event.preventDefault();
    for (const old of holder.querySelectorAll('.cell[tabindex="0"]')) old.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });
  drawLegend();
}

/** Left and right: the next cell; up and down: the one that stands above or below. */
function neighbour(cell, key) {
  const cells = [...at("nodes").querySelectorAll(".cell")];
  const place = cells.indexOf(cell);
  const step = { ArrowLeft: -1, ArrowRight: 1 }[key];
  if (step) return cells[place + step];
  if (key === "Home") return cells[0];
  if (key === "End") return cells[cells.length - 1];
  if (key !== "ArrowUp" && key !== "ArrowDown") return null;
  const here = cell.getBoundingClientRect();
  const rest = key === "ArrowUp" ? cells.slice(0, place).reverse() : cells.slice(place + 1);
  return rest.find((other) => {
    const there = other.getBoundingClientRect();
    return Math.abs(there.left - here.left) < here.width / 2 && there.top !== here.top;
  });
}

function drawLegend() {
  for (const [name, [sign, meaning]] of Object.entries(LOOKS).reverse()) {
    const cell = make("span", { className: "cell", "aria-hidden": "true" }, sign);
    cell.dataset.look = name;
    at("legend").append(make("li", {}, cell, ` ${meaning}`));
  }
  const cell = make("span", { className: "cell", "aria-hidden": "true" });
  cell.dataset.look = "idle";
  cell.dataset.spare = "yes";
  at("legend").append(make("li", {}, cell, " on a spare node"));
}
