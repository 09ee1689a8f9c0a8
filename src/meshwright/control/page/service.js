// How the page reaches the service: reads, the stream of events, and whether anything answers.

const DEADLINE_MS = 5000;
const PING_MS = 2000;
const REOPEN_MS = 1000;
const QUIET_MS = 25000; // the service sends a beat every 10 s

/** The line to the service. `silent` is the time since which nothing answers, or null. */
export const line = { heard: Date.now(), silent: null, streaming: false, started: null };

function heard() {
  line.heard = Date.now();
  line.silent = null;
}

function unheard() {
  line.silent ??= line.heard;
}

/** What GET answers; null for what is not there. Throws when nothing answers. */
export async function get(path) {
  let answer;
  try {
    answer = await fetch(path, { signal: AbortSignal.timeout(DEADLINE_MS), cache: "no-store" });
  } catch (error) {
    unheard();
    throw error;
  }
  heard();
  if (answer.status === 404) return null;
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

/** All items of a list, page by page, at most `most` pages; each page is given to `take`. */
export async function walk(path, take, most) {
  let cursor = null;
  for (let page = 0; page < most; page++) {
    const joined = path.includes("?") ? "&" : "?";
    const next = cursor === null ? "" : `${joined}cursor=${encodeURIComponent(cursor)}`;
    const answer = await get(path + next);
    take(answer.items);
    cursor = answer.cursor;
    if (cursor === null) return true;
  }
  return false;
}

/** Gives events after a number, each once, over any break of the line. Read by fetch and not by
 * EventSource, which hears only kinds that it knows by name, and no beats. */
export class Stream {
  #round = 0;

  constructor(take) {
    this.take = take;
    this.after = 0;
  }

  async open(after) {
    const round = ++this.#round;
    this.after = after;
    while (round === this.#round) {
      try {
        await this.#follow(round);
      } catch {
        unheard();
      }
      if (round === this.#round) line.streaming = false;
      await new Promise((done) => setTimeout(done, REOPEN_MS));
    }
  }

  async #follow(round) {
    const ending = new AbortController();
    let timer = setTimeout(() => ending.abort(), QUIET_MS);
    const answer = await fetch(`/v1/events/stream?after=${this.after}`, { signal: ending.signal, cache: "no-store" });
    if (!answer.ok) throw new Error(`stream: ${answer.status}`);
    line.streaming = true;
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    try {
      for (;;) {
        const { value, done } = await reader.read();
        if (done || round !== this.#round) return;
        clearTimeout(timer);
        timer = setTimeout(() => ending.abort(), QUIET_MS);
        heard();
        const parts = (text + value).split("\n\n");
        text = parts.pop();
        for (const part of parts) this.#hear(part);
      }
    } finally {
      clearTimeout(timer);
      ending.abort();
    }
  }

  #hear(part) {
    const data = part.split("\n").find((row) => row.startsWith("data: "));
    if (!data) return; // a beat
    const event = JSON.parse(data.slice(6));
    if (event.seq <= this.after) return;
    this.after = event.seq;
    this.take(event);
  }
}

/** Ask for a sign of life where nothing was heard; `anew` is called when it is another service. */
export function keepAsking(anew) {
  let asking = false;
  setInterval(async () => {
    if (asking || document.hidden || Date.now() - line.heard < PING_MS) return;
    asking = true;
    try {
      const found = await get("/v1/service");
      if (line.started && found.started_at !== line.started) anew();
      line.started = found.started_at;
    } catch {
      // `line` tells since when.
    } finally {
      asking = false;
    }
  }, PING_MS / 4);
}
