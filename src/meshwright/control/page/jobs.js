// Jobs: the table of all, and the one in focus with its loss curve.

import { draw } from "./curve.js";
import { at, clock, keyed, make, mark, say, short, show, span } from "./dom.js";
import { FINAL } from "./model.js";

const MOST_ROWS = 100;

/** Draw the table. `link` gives the address of a job on this page. */
export function drawJobs(model, chosen, link) {
  const sorted = model.sortedJobs();
  show(at("job-table"), sorted.length > 0);
  keyed(at("job-rows"), sorted.slice(0, MOST_ROWS), (job) => job.id, createRow, (row, job) => {
    updateRow(row, job, model.recent.get(job.id) ?? [], link);
    row.classList.toggle("chosen", job.id === chosen);
  });
  const more = sorted.length - MOST_ROWS;
  if (more > 0) say(at("jobs-note"), `and ${more} more; meshwright job list shows all`);
  show(at("jobs-note"), more > 0 || sorted.length === 0);
}

function createRow() {
  const cell = (className, ...children) => make("td", { className }, ...children);
  return make(
    "tr",
    {},
    make("th", { scope: "row" }, make("a")),
    cell("", make("span", { className: "status" }), make("span", { className: "why" })),
    cell("number"),
    cell("number"),
    cell("number wide"),
    cell("wide", make("div", { className: "spark" })),
  );
}

function updateRow(row, job, points, link) {
  const [name, status, step, loss, speed, curve] = row.children;
  const anchor = name.firstChild;
  say(anchor, job.name);
  if (anchor.getAttribute("href") !== link(job)) anchor.setAttribute("href", link(job));
  say(status.firstChild, job.status);
  mark(status.firstChild, "status", job.status);
  say(status.lastChild, job.message);
  say(step, `${job.step} / ${job.steps}`);
  say(loss, short(job.loss));
  say(speed, FINAL.has(job.status) ? "" : short(job.tokens_per_s));
  const spark = curve.firstChild;
  const drawn = `${points.length} ${points[points.length - 1]}`;
  if (points.length > 1 && spark.dataset.drawn !== drawn && spark.clientWidth) {
    spark.dataset.drawn = drawn;
    draw(spark, points, `loss of ${job.name}`);
  }
}

/** Draw the job in focus. `curve`: its points; `why`: the answer of /explain, or null. */
export function drawJob(job, clusterName, curve, why) {
  show(at("job"), Boolean(job));
  if (!job) return;
  say(at("job-title"), job.name);
  say(at("job-status"), job.status);
  mark(at("job-status"), "status", job.status);
  const message = job.message || (job.status === "QUEUED" && why?.sentence) || "";
  say(at("job-message"), message);
  show(at("job-message"), Boolean(message));
  keyed(at("job-facts"), facts(job, clusterName, why), ([name]) => name, createFact, (element, [, value]) => {
    say(element.lastChild, value);
  });
  say(at("job-caption"), curve.length ? caption(curve) : "Loss: no step yet");
  show(at("job-curve"), curve.length > 0);
  if (!curve.length) return;
  const label = `Loss of ${job.name} by step, now ${short(job.loss)} at step ${job.step}`;
  draw(at("job-curve"), curve, label, { x: (step) => `step ${Math.round(step)}`, y: short });
}

function caption(curve) {
  const known = curve.filter(([, loss]) => Number.isFinite(loss));
  if (!known.length) return "Loss: none told yet";
  const least = known.reduce((one, other) => (other[1] < one[1] ? other : one));
  return `Loss by step · least ${short(least[1])} at step ${least[0]}`;
}

const createFact = ([name]) => make("div", {}, make("dt", {}, name), make("dd"));

function facts(job, clusterName, why) {
  const found = [
    ["Step", `${job.step} of ${job.steps}`],
    ["Loss", short(job.loss)],
    ["Tokens/s", FINAL.has(job.status) ? "–" : short(job.tokens_per_s)],
    ["Layout", job.layout],
    ["Cluster", clusterName ?? job.cluster],
    ["Ranks", job.spares ? `${job.ranks} and ${job.spares} spare` : String(job.ranks)],
    ["Attempt", job.restarts ? `${job.attempt}, lost ${job.restarts} times` : String(job.attempt)],
    ["Asked for", clock(job.created_at)],
  ];
  if (why?.sentence && job.status !== "QUEUED") found.push(["Where", why.sentence]);
  if (job.unknown_since) {
    found.push(["Unseen", span((Date.now() - Date.parse(job.unknown_since)) / 1000)]);
  }
  return found;
}
