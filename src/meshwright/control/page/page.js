// The page: what is in focus, what is asked for and when. Events tell what to ask for again.

import { Chip } from "./chip.js";
import { drawCluster, listen } from "./chips.js";
import { at, clock, keyed, make, mark, say, show, span } from "./dom.js";
import { drawJob, drawJobs } from "./jobs.js";
import { FINAL, Model } from "./model.js";
import { get, keepAsking, line, Stream, walk } from "./service.js";

const TICK_MS = 1000; // what events ask for is asked once in it
const CHIP_MS = 2000;
const FIRST_POINTS = 600;
const MORE_POINTS = 20; // in a tick
const SMALL_CURVES = 20; // jobs whose small curves are asked for at first
const FEW_NODES = 4; // more are asked for in one answer
const MOST_PAGES = 20;
const SILENT_MS = 4000;

const model = new Model();
const chip = new Chip((anew) => (anew ? askChip() : draw()));
const stream = new Stream(hear);
const wanted = { clusters: new Set(), jobs: new Set(), nodes: new Set(), curve: false };
const focus = { cluster: null, job: null, chip: null };
let curve = []; // [step, loss] of the job in focus
let curveOf = null;
let why = null;
let shownNodes = null; // id of the cluster whose nodes the model has
let nodesOf = null; // the same, also while they are asked for anew
let drawing = false;
let loading = 0;

/** Draw once before the next frame, however much has changed. */
function draw() {
  if (drawing) return;
  drawing = true;
  const now = () => {
    drawing = false;
    drawAll();
  };
  if (document.hidden) setTimeout(now, TICK_MS);
  else requestAnimationFrame(now);
}

function drawAll() {
  const cluster = model.clusters.get(focus.cluster);
  drawList(cluster);
  drawCluster(model, cluster, focus.chip);
  chip.draw(model, cluster, focus.chip);
  drawJobs(model, focus.job, (job) => address({ cluster: job.cluster, job: job.id }));
  const job = model.jobs.get(focus.job);
  drawJob(job, model.clusters.get(job?.cluster)?.name, curve, why);
  drawEvents();
  const chips = [...model.clusters.values()].reduce((sum, one) => sum + one.chips, 0);
  const going = [...model.jobs.values()].filter((one) => !FINAL.has(one.status)).length;
  say(at("tally"), `${model.clusters.size} clusters · ${chips} chips · ${going} jobs under way`);
}

function drawList(chosen) {
  const all = [...model.clusters.values()];
  show(at("no-clusters"), all.length === 0 && loading === 0 && line.streaming);
  const create = () => make("li", {}, make("a", {}, make("b"), make("span", { className: "status" }), make("small")));
  keyed(at("cluster-list"), all, (one) => one.id, create, (item, one) => {
    const link = item.firstChild;
    const [name, status, count] = link.children;
    const where = address({ cluster: one.name, job: null });
    if (link.getAttribute("href") !== where) link.setAttribute("href", where);
    if (one === chosen) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
    say(name, one.name);
    say(status, one.status);
    mark(status, "status", one.status);
    say(count, `${one.healthy_chips} of ${one.chips} chips healthy, ${one.chips_in_use} in use`);
  });
}

function drawEvents() {
  const told = model.events.filter((event) => event.kind !== "job_step").slice(0, 60);
  const create = (event) =>
    make("li", {}, make("time", { dateTime: event.at }, clock(event.at)), make("b", {}, event.kind.replaceAll("_", " ")), make("span"));
  // Names come later than events where the page has just been opened.
  keyed(at("event-list"), told, (event) => event.seq, create, (item, event) => say(item.lastChild, words(event)));
}

function words({ cluster, job, node, chip: place, data }) {
  const parts = [];
  const name = model.jobs.get(job)?.name ?? model.clusters.get(cluster)?.name ?? data.name ?? "";
  const where = node === null ? "" : `node ${node}${place === null ? "" : ` chip ${place}`}`;
  parts.push([name, where].filter(Boolean).join(", "));
  for (const key of ["what", "status", "health", "phase", "line", "error", "message"]) {
    if ((data[key] ?? "") !== "") parts.push(String(data[key]));
  }
  if (data.step !== undefined && data.step !== null) parts.push(`step ${data.step}`);
  return parts.filter(Boolean).join(" · ");
}

/** The state of the line is drawn each second by itself. */
function drawLine() {
  const since = line.silent ?? (Date.now() - line.heard > SILENT_MS ? line.heard : null);
  const word = since !== null ? "no answer" : line.streaming ? "live" : "connecting";
  say(at("line-word"), word);
  mark(at("line"), "state", word);
  say(at("line-since"), since === null ? "" : `since ${span((Date.now() - since) / 1000)}`);
}

function address(change) {
  const found = new URLSearchParams();
  const { cluster = focus.cluster, job = focus.job, chip: place } = change;
  if (cluster) found.set("cluster", cluster);
  if (job) found.set("job", job);
  if (place) found.set("chip", place);
  return `#${found}`;
}

/** Take the focus from the address; without one, the first cluster and the newest job. */
function aim() {
  const asked = new URLSearchParams(location.hash.slice(1));
  const job = model.jobs.get(asked.get("job")) ?? null;
  const cluster = model.clusterBy(asked.get("cluster")) ?? model.clusters.get(job?.cluster);
  focus.cluster = (cluster ?? model.clusters.values().next().value)?.id ?? null;
  focus.job = (job ?? (asked.get("job") ? null : model.sortedJobs()[0]))?.id ?? null;
  focus.chip = asked.get("chip");
  if (focus.cluster !== shownNodes) loadNodes();
  if (focus.job !== curveOf) loadCurve();
  if (focus.chip) askChip();
  draw();
}

/** Ask, and leave things as they are where nothing answers. */
async function attempt(work) {
  loading++;
  try {
    await work();
  } catch {
    // `line` tells since when; the next event or the next service asks again.
  } finally {
    loading--;
  }
}

const loadNodes = () =>
  attempt(async () => {
    const id = focus.cluster;
    if (nodesOf !== id) model.nodes.clear();
    shownNodes = nodesOf = id;
    wanted.nodes.clear();
    if (!id) return;
    const from = stream.after;
    const found = await get(`/v1/clusters/${id}/hardware?brief=true`);
    if (id !== focus.cluster) return;
    model.nodes = new Map((found?.nodes ?? []).map((node) => [node.number, node]));
    replay(from);
    draw();
  });

const loadNode = (number) =>
  attempt(async () => {
    const id = focus.cluster;
    const from = stream.after;
    const found = await get(`/v1/clusters/${id}/hardware?brief=true&node=${number}`);
    if (id !== focus.cluster || !found) return;
    for (const node of found.nodes) model.nodes.set(node.number, node);
    replay(from);
    draw();
  });

/** Events that came while an answer was under way may be newer than it: apply them again. */
function replay(from) {
  const late = model.events.filter((event) => event.seq > from && event.node !== null);
  for (const event of late.reverse()) if (event.cluster === focus.cluster) model.touch(event);
}

const loadCurve = () =>
  attempt(async () => {
    const id = focus.job;
    curveOf = id;
    curve = [];
    why = null;
    if (!id) return;
    const [points, reason] = await Promise.all([
      get(`/v1/jobs/${id}/metrics?limit=${FIRST_POINTS}`),
      get(`/v1/jobs/${id}/explain`),
    ]);
    if (id !== focus.job) return;
    curve = pairs(points ?? []);
    why = reason;
    draw();
  });

const pairs = (lines) => lines.map(({ step, loss }) => [step, loss]);

const growCurve = () =>
  attempt(async () => {
    const id = focus.job;
    if (!id) return; // one that has been named, and is not known yet
    const last = curve[curve.length - 1]?.[0] ?? 0;
    const lines = (await get(`/v1/jobs/${id}/metrics?after=${last}&limit=${MORE_POINTS}`)) ?? [];
    if (id !== curveOf || (curve[curve.length - 1]?.[0] ?? 0) !== last) return;
    curve.push(...pairs(lines));
    draw();
  });

const loadSmallCurves = (jobs) =>
  attempt(async () => {
    for (const job of jobs) {
      const lines = (await get(`/v1/jobs/${job.id}/metrics?limit=60`)) ?? [];
      const later = model.recent.get(job.id) ?? [];
      model.recent.delete(job.id);
      for (const [step, loss] of [...pairs(lines), ...later]) model.point(job.id, step, loss);
      draw();
    }
  });

function askChip() {
  const cluster = model.clusters.get(focus.cluster);
  if (cluster && focus.chip && /^\d+\.\d+$/.test(focus.chip)) chip.ask(cluster, focus.chip);
}

function hear(event) {
  const asked = model.apply(event, focus.cluster);
  for (const one of asked.clusters) wanted.clusters.add(one);
  for (const one of asked.jobs) wanted.jobs.add(one);
  for (const one of asked.nodes) wanted.nodes.add(one);
  if (event.job === curveOf && event.kind === "job_step") {
    // A run that was started again goes on from an earlier step.
    const last = curve[curve.length - 1]?.[0] ?? 0;
    if (event.data.step < last) loadCurve();
    else wanted.curve = true;
  }
  if (event.kind === "cluster_deleted") aim();
  draw();
}

/** Once in a tick: ask for what events have said is another. */
async function tick() {
  drawLine();
  if (line.silent !== null || document.hidden) return;
  const clusters = [...wanted.clusters];
  const jobs = [...wanted.jobs];
  wanted.clusters.clear();
  wanted.jobs.clear();
  if (wanted.curve) growCurve();
  wanted.curve = false;
  if (wanted.nodes.size > FEW_NODES) loadNodes();
  else wanted.nodes.forEach(loadNode);
  wanted.nodes.clear();
  await attempt(async () => {
    try {
      await Promise.all([...clusters.map(askCluster), ...jobs.map(askJob)]);
    } catch (error) {
      for (const one of clusters) wanted.clusters.add(one);
      for (const one of jobs) wanted.jobs.add(one);
      throw error;
    }
  });
  if (clusters.length || jobs.length) aim();
}

async function askCluster(id) {
  const before = model.clusters.get(id);
  const found = await get(`/v1/clusters/${id}`);
  if (!found) model.clusters.delete(id);
  else model.clusters.set(id, found);
  if (id === focus.cluster && found && before && found.nodes !== before.nodes) shownNodes = null;
  // While it is being made its nodes are not there yet.
  if (id === focus.cluster && found && found.chips && !model.nodes.size) shownNodes = null;
}

async function askJob(id) {
  const found = await get(`/v1/jobs/${id}`);
  if (found) model.jobs.set(id, found);
  else model.jobs.delete(id);
  if (id === focus.job) why = await get(`/v1/jobs/${id}/explain`);
}

/** Everything anew: at first, and when it is another service that answers. */
async function begin() {
  try {
    const recent = await get("/v1/events?newest=true&limit=100");
    const after = recent[recent.length - 1]?.seq ?? 0;
    model.clear();
    shownNodes = curveOf = null;
    loading++;
    await walk("/v1/clusters?limit=100", (found) => found.forEach((one) => model.clusters.set(one.id, one)), MOST_PAGES);
    for (const event of recent) model.apply(event, null);
    loading--;
    aim();
    const whole = await walk("/v1/jobs?limit=500", takeJobs, MOST_PAGES);
    for (const status of whole ? [] : ["QUEUED", "STARTING", "RUNNING", "STOPPING"]) {
      await walk(`/v1/jobs?status=${status}&limit=500`, takeJobs, MOST_PAGES);
    }
    stream.open(after);
    aim();
    loadSmallCurves(model.sortedJobs().slice(0, SMALL_CURVES));
  } catch {
    loading = 0;
    drawLine();
    setTimeout(begin, TICK_MS);
  }
}

function takeJobs(found) {
  for (const one of found) model.jobs.set(one.id, one);
  draw();
}

listen((place) => {
  location.hash = address({ chip: place });
});
addEventListener("hashchange", aim);
addEventListener("resize", draw);
setInterval(tick, TICK_MS);
setInterval(() => !document.hidden && line.silent === null && askChip(), CHIP_MS);
keepAsking(begin);
begin();
