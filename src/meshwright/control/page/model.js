// What the page knows, and how an event changes it. No requests and no drawing here.

export const FINAL = new Set(["SUCCEEDED", "STOPPED", "FAILED"]);
const HOLDS = new Set(["STARTING", "RUNNING", "STOPPING"]);
const MOST_EVENTS = 200;
const MOST_RECENT = 240; // points of a small curve

export class Model {
  constructor() {
    this.clear();
  }

  clear() {
    this.clusters = new Map();
    this.jobs = new Map();
    this.nodes = new Map(); // of the cluster in focus, by number
    this.work = new Map(); // what long work says of itself, by cluster
    this.recent = new Map(); // [step, loss] by job, for small curves
    this.events = []; // newest first
  }

  /** Take an event in. Returns what has to be asked for anew. */
  apply(event, focus) {
    this.events.unshift(event);
    if (this.events.length > MOST_EVENTS) this.events.length = MOST_EVENTS;
    const wanted = { clusters: new Set(), jobs: new Set(), nodes: new Set() };
    const { kind, cluster, job, data } = event;
    if (kind === "cluster_deleted") {
      this.clusters.delete(cluster);
      this.work.delete(cluster);
    } else if (cluster && kind === "operation_progress") {
      this.work.set(cluster, { progress: data.progress, text: `${data.phase}: ${data.line}` });
    } else if (cluster && (kind.startsWith("cluster_") || kind.startsWith("operation_") || HEALTH.has(kind))) {
      if (kind === "operation_ended") this.work.delete(cluster);
      wanted.clusters.add(cluster);
    }
    if (cluster === focus && event.node !== null) {
      this.touch(event);
      // Chips that are seen to be well for the first time have no events of their own.
      if (kind === "node_status" && !this.#known(event.node)) wanted.nodes.add(event.node);
    }
    if (job && kind === "job_step") this.#step(job, data, wanted);
    else if (job && kind.startsWith("job_")) {
      wanted.jobs.add(job);
      if (cluster) wanted.clusters.add(cluster);
    }
    return wanted;
  }

  #known(node) {
    return this.nodes.get(node)?.chips.every((chip) => chip.health !== "UNKNOWN");
  }

  /** Take the health of a node or a chip of the cluster in focus. */
  touch({ kind, node, chip, data }) {
    const found = this.nodes.get(node);
    if (!found) return;
    if (kind === "node_status") Object.assign(found, data);
    const known = found.chips.find((one) => one.chip === chip);
    if (known && kind === "chip_health") known.health = data.health;
    if (known && kind === "link_health") known.links = data.health;
  }

  #step(job, data, wanted) {
    const known = this.jobs.get(job);
    if (!known) {
      wanted.jobs.add(job);
      return;
    }
    Object.assign(known, data);
    this.point(job, data.step, data.loss);
  }

  /** A point of a job's small curve; what a run does again replaces what was there. */
  point(job, step, loss) {
    const points = this.recent.get(job) ?? [];
    while (points.length && points[points.length - 1][0] >= step) points.pop();
    if (Number.isFinite(loss)) points.push([step, loss]);
    // Every second one of the older half: the shape stays, and the memory is bounded.
    if (points.length > MOST_RECENT) this.recent.set(job, points.filter((_, at) => at % 2 || at > MOST_RECENT / 2));
    else this.recent.set(job, points);
  }

  /** Which job holds which chip of a cluster, as "node.chip". */
  holders(cluster) {
    const found = new Map();
    for (const job of this.jobs.values()) {
      if (job.cluster !== cluster || !HOLDS.has(job.status)) continue;
      job.placement.forEach(([node, chip], place) => {
        found.set(`${node}.${chip}`, { job, rank: place < job.ranks ? place : null });
      });
    }
    return found;
  }

  /** Those under way first, then the newest. */
  sortedJobs() {
    const rank = (job) => (FINAL.has(job.status) ? 1 : 0);
    return [...this.jobs.values()].sort(
      (one, other) => rank(one) - rank(other) || (one.created_at < other.created_at ? 1 : -1),
    );
  }

  clusterBy(name) {
    return this.clusters.get(name) ?? [...this.clusters.values()].find((one) => one.name === name);
  }
}

const HEALTH = new Set(["node_status", "chip_health", "link_health"]);

const DRAINS = new Set(["DRAINING", "DRAINED"]);
const AWAY = new Set(["UNKNOWN", "PENDING", "REBOOTING", "REPLACING"]);

/** How a chip looks: the worst that is known of it and of its node. */
export function look(node, chip, holder) {
  if (node.status === "FAILED" || chip.health === "FAILED") return "failed";
  if (AWAY.has(node.status) || chip.health === "UNKNOWN") return "unknown";
  if (chip.health === "DEGRADED" || (chip.links !== "HEALTHY" && chip.links !== "UNKNOWN")) return "degraded";
  if (DRAINS.has(node.status)) return "drained";
  return holder ? "busy" : "idle";
}

/** Looks from worst to best, each with its sign and its words. */
export const LOOKS = {
  failed: ["✕", "failed"],
  unknown: ["?", "unknown"],
  degraded: ["!", "degraded"],
  drained: ["–", "drained"],
  busy: ["●", "in use"],
  idle: ["", "free"],
};

export const worst = (looks) => Object.keys(LOOKS).find((one) => looks.has(one)) ?? "unknown";
