// A trace as the page holds it: bytes and an index. Every line is checked and counted once when it is read, and parsed again
// when it is shown, so that a hundred thousand rounds cost their bytes and little more.

import { Clock, Tally } from './tally.js';

export const TRACE_VERSION = 1;
const WITHHELD = -1;                     // a token of another tenant: a server tells its figures only
const PAGE_BYTES = 1 << 22, LONGEST_LINE = 1 << 26, SLICE_MS = 40;
const FATES = new Set(['accepted', 'rejected', 'discarded']);
const ROLES = new Set(['prefill', 'accepted', 'correction', 'bonus', 'plain']);

export class TraceError extends Error {}

const whole = (value, least = 0) => Number.isInteger(value) && value >= least;
const real = (value) => typeof value === 'number' && Number.isFinite(value);
const maybe = (value) => value === undefined || value === null || real(value);

function need(ok, found) {
  if (!ok) throw new TraceError(found);
}

/** Numbers that grow at the end. */
class Column {
  constructor(Kind) { this.values = new Kind(1024); this.length = 0; }

  push(value) {
    if (this.length === this.values.length) {
      const wider = new this.values.constructor(2 * this.length);
      wider.set(this.values);
      this.values = wider;
    }
    this.values[this.length++] = value;
  }

  at(i) { return this.values[i]; }
}

const COLUMNS = {
  page: Uint32Array, start: Uint32Array, end: Uint32Array, request: Uint32Array, position: Float64Array, depth: Float64Array,
  drafted: Uint32Array, accepted: Uint32Array, rejected: Uint32Array, emitted: Uint32Array, batch: Uint32Array, levels: Uint32Array,
  at: Float64Array, draft: Float64Array, score: Float64Array, verify: Float64Array, other: Float64Array,
};

export class Trace {
  headers = []; requests = []; roundCount = 0; bytes = 0; lines = 0;
  raced = null;                          // pairs that are known to answer one prompt; null: they are found by their options
  damage = null;                         // a sentence about what could not be read, if anything
  complete = false;
  #pages = []; #page = new Uint8Array(PAGE_BYTES); #used = 0; #lineStart = 0;
  #current = new Map(); #words = new Map(); #decoder = new TextDecoder('utf-8', { fatal: true });

  constructor(name) {
    this.name = name;
    this.#pages.push(this.#page);
    for (const [key, kind] of Object.entries(COLUMNS)) this[key] = new Column(kind);
  }

  /** Read a stream of bytes to its end; `progress` is called between slices. What is damaged ends the reading and is told. */
  async read(stream, progress = () => {}) {
    const reader = stream.getReader();
    let slice = performance.now();
    try {
      for (;;) {
        const { done, value } = await reader.read();
        if (done) break;
        this.feed(value);
        if (performance.now() - slice > SLICE_MS) {
          progress();
          await new Promise((resume) => setTimeout(resume));
          slice = performance.now();
        }
      }
      if (this.#used > this.#lineStart) this.damage = `The last line is cut off: its writer was stopped, or is still writing. Shown are the ${this.lines} whole lines before it.`;
      need(this.headers.length, this.lines ? 'No line of the file begins a trace.' : 'The file holds no whole line of a trace.');
    } catch (error) {
      reader.cancel().catch(() => {});
      if (!(error instanceof TraceError) && error.name !== 'TypeError') throw error;
      const reason = error instanceof TraceError ? error.message : `The file could not be unpacked or read (${error.message}).`;
      if (!this.headers.length || !this.requests.length) throw new TraceError(reason);
      this.damage = `${reason} Shown is what stands before it.`;
    }
    this.complete = true;
    return this;
  }

  feed(bytes) {
    this.bytes += bytes.length;
    let from = 0;
    while (from < bytes.length) {
      const newline = bytes.indexOf(10, from), to = newline < 0 ? bytes.length : newline + 1;
      this.#keep(bytes.subarray(from, to));
      if (newline >= 0) this.#line();
      from = to;
    }
  }

  #keep(part) {
    if (this.#used + part.length > this.#page.length) {
      const begun = this.#page.subarray(this.#lineStart, this.#used), size = begun.length + part.length;
      need(size < LONGEST_LINE, `Line ${this.lines + 1} is longer than 64 MB; expected one JSON object a line.`);
      const fresh = new Uint8Array(Math.max(PAGE_BYTES, 2 * size));
      fresh.set(begun);
      this.#pages.push(this.#page = fresh);
      this.#used = begun.length;
      this.#lineStart = 0;
    }
    this.#page.set(part, this.#used);
    this.#used += part.length;
  }

  #line() {
    const start = this.#lineStart, end = this.#used - 1;
    this.#lineStart = this.#used;
    this.lines += 1;
    if (end === start) return;
    try {
      this.#take(this.#parse(this.#page.subarray(start, end)), start, end);
    } catch (error) {
      const first = !this.headers.length ? ' This is no Draftproof trace; expected a file that `draftproof generate --trace FILE` wrote.' : '';
      throw new TraceError(`Line ${this.lines}: ${error.message}${first}`);
    }
  }

  #parse(bytes) {
    let text;
    try { text = this.#decoder.decode(bytes); } catch { throw new TraceError('it is not UTF-8 text.'); }
    try {
      return JSON.parse(text);
    } catch {
      // Python writes what is not finite as a bare word
      const finite = text.replace(/"(?:[^"\\]|\\.)*"|-?Infinity|NaN/g, (part) => (part[0] === '"' ? part : 'null'));
      try { return JSON.parse(finite); } catch { /* told below */ }
      throw new TraceError('it is not JSON.');
    }
  }

  #take(record, start, end) {
    need(record !== null && typeof record === 'object' && typeof record.event === 'string', 'it is not a trace record (no "event").');
    if (record.event === 'trace_started') return this.#begin(record);
    need(this.headers.length, `it is a ${record.event} record before any trace_started.`);
    if (record.event === 'request_started') return this.#open(record, start, end);
    const request = this.#current.get(record.request);
    if (!request) return undefined;
    if (record.event === 'prefill_done') return this.#prefill(request, record);
    if (record.event === 'round_done') return this.#round(request, record, start, end);
    if (record.event === 'request_done') return this.#done(request, record);
    return undefined;                    // an event of a later version: not for this reader
  }

  #begin(record) {
    need(whole(record.version), 'its version is not a number.');
    need(record.version <= TRACE_VERSION, `the trace has version ${record.version}; this page reads up to ${TRACE_VERSION}. Upgrade draftproof and open it again.`);
    for (const name of ['target', 'drafter', 'rule', 'depth']) need(typeof record[name] === 'string', `"${name}" of the header is not text.`);
    const words = record.vocabulary;
    if (words) need(Array.isArray(words) && words.every((word) => typeof word === 'string'), 'its vocabulary is not a list of texts.');
    if (words) this.#words.set(record.target, words);
    this.headers.push({ ...record, machine: record.machine ?? {}, vocabulary: this.#words.get(record.target) ?? null });
  }

  #open(record, start, end) {
    need(typeof record.request === 'string' && real(record.at_s) && whole(record.prompt_tokens), 'a request without id, time or prompt.');
    const seed = /"seed":(-?\d+),"sample"/.exec(this.#decoder.decode(this.#page.subarray(start, end)));
    const request = {
      index: this.requests.length, id: record.request, at: record.at_s, promptTokens: record.prompt_tokens, cached: record.cached_tokens ?? 0,
      sampling: record.sampling && typeof record.sampling === 'object' ? record.sampling : {}, seed: seed ? seed[1] : whole(record.seed) ? String(record.seed) : '0',
      sample: whole(record.sample) ? record.sample : 0, promptClass: typeof record.prompt_class === 'string' ? record.prompt_class : '',
      rule: typeof record.rule === 'string' ? record.rule : 'match', promptIds: Array.isArray(record.prompt_ids) ? record.prompt_ids : null,
      header: this.headers.at(-1), prefill: null, done: null, totals: null, withheld: record.withheld === true, broken: false, rounds: [], line: [this.#pages.length - 1, start, end], tally: new Tally(), clock: new Clock(record.at_s),
      own: typeof record.drafter === 'string' ? record.drafter : '', drafter: 'none', tokens: 0,
    };
    this.requests.push(request);
    this.#current.set(record.request, request);
  }

  #prefill(request, record) {
    need(real(record.at_s) && whole(record.passes) && record.token && whole(record.token.token, WITHHELD) && typeof record.text === 'string', 'a prefill of another form.');
    request.prefill = record;
    request.tally.prefill(record.passes);
    request.clock.delivered(record.at_s, 1);
    request.tokens += 1;
  }

  #round(request, record, start, end) {
    checkRound(record);
    let accepted = 0, rejected = 0, levels = 0;
    const depths = [];
    for (const node of record.nodes) {
      depths.push(1 + (node.parent < 0 ? 0 : depths[node.parent]));
      levels = Math.max(levels, depths.at(-1));
      if (node.fate === 'accepted') accepted += 1; else if (node.fate === 'rejected') rejected += 1;
    }
    const t = record.times, emitted = record.tokens.length;
    request.rounds.push(this.roundCount++);
    const row = [this.#pages.length - 1, start, end, request.index, record.position, record.depth, record.nodes.length, accepted, rejected, emitted,
      record.batch, levels, record.at_s, t.draft_s, t.score_s, t.verify_s, t.other_s];
    Object.keys(COLUMNS).forEach((name, i) => this[name].push(row[i]));
    request.tally.round(record.nodes.length, accepted, rejected, emitted);
    request.clock.delivered(record.at_s, emitted);
    request.clock.spent(t.draft_s, t.score_s, t.verify_s, t.other_s);
    request.drafter = wholeOf(request.own, record.drafter);
    request.tokens += emitted;
  }

  #done(request, record) {
    need(typeof record.finish === 'string' && record.metrics && typeof record.metrics === 'object', 'a request_done of another form.');
    request.done = record;
    if (record.completion_tokens > 1 && (request.broken || !request.rounds.length)) this.#totals(request, record);
  }

  /** Counts without all the rounds, as imported engines and interrupted streams tell them; what was not told stays out of the sums. */
  #totals(request, record) {
    const said = record.metrics, tally = request.tally, rest = record.completion_tokens - 1, missing = Math.max(0, rest + 1 - request.tokens);
    need(whole(rest) && real(record.at_s) && maybe(said.drafted) && maybe(said.accepted) && maybe(said.rounds), 'totals of another form.');
    request.totals = said;
    tally.drafted = said.drafted ?? 0;
    tally.accepted = said.accepted ?? 0;
    if (real(said.rounds)) { tally.rounds = said.rounds; tally.emitted = rest; }
    if (tally.drafted) request.drafter = request.header.drafter;
    request.clock.delivered(record.at_s, missing);
    request.tokens += missing;
  }

  /** Events were lost on their way: what runs now is known again when it ends. */
  lost() {
    for (const request of this.#current.values()) if (!request.done) request.broken = true;
  }

  /** Another engine took over: what ran will not end here, and names begin anew. */
  anew() {
    this.lost();
    this.#current.clear();
  }

  /** Go on with what runs in another trace, whose rounds so far stay there. */
  resume(other) {
    for (const { id, line: [page, start, end], prefill, rounds, broken } of other.#current.values()) {
      if (other.named(id).done) continue;
      const lines = [other.#decoder.decode(other.#pages[page].subarray(start, end)), ...(prefill ? [JSON.stringify(prefill)] : []), ''];
      this.feed(new TextEncoder().encode(lines.join('\n')));
      this.named(id).broken = broken || rounds.length > 0;
    }
  }

  /** The request that has this name now; names begin anew with every engine. */
  named(id) { return this.#current.get(id); }

  /** The record of a round, by its number in the whole trace. */
  record(i) {
    return this.#parse(this.#pages[this.page.at(i)].subarray(this.start.at(i), this.end.at(i)));
  }

  /** The text of a token of a request. Its header's, which may stand in an earlier header of the same target: files may hold several models. */
  piece(token, { header }) {
    const word = header.vocabulary?.[token];
    if (word !== undefined) return word;
    if (token === WITHHELD) return '▒';
    return token === header.machine.unknown_token ? '(not told)' : `#${token}`;
  }
}

/** As trace/report.py's `whole`: the drafter of a request one of whose rounds `part` drafted. */
function wholeOf(own, part) {
  const parts = own.split('+');
  return part.split('+').every((one) => parts.includes(one)) ? own : part;
}

function checkRound(record) {
  need(whole(record.round) && whole(record.position) && whole(record.depth) && whole(record.batch, 1) && real(record.at_s), 'a round without its numbers.');
  for (const name of ['drafter', 'reason', 'draft_reason', 'text']) need(typeof record[name] === 'string', `"${name}" of a round is not text.`);
  need(Array.isArray(record.nodes) && Array.isArray(record.tokens), 'a round without its guesses or tokens.');
  record.nodes.forEach((node, i) => {
    need(node && whole(node.token, WITHHELD) && whole(node.parent, -1) && node.parent < i && FATES.has(node.fate), `guess ${i} of a round has another form.`);
    need(maybe(node.p) && maybe(node.q) && maybe(node.noise) && maybe(node.coin) && maybe(node.score), `guess ${i} of a round has values that are not numbers.`);
  });
  record.tokens.forEach((token, i) => {
    need(token && whole(token.token, WITHHELD) && ROLES.has(token.role) && maybe(token.p) && maybe(token.noise), `token ${i} of a round has another form.`);
    for (const list of [token.alternatives ?? [], token.draft_alternatives ?? []]) {
      need(Array.isArray(list) && list.every((a) => a && whole(a.token) && real(a.probability)), `token ${i} of a round has alternatives of another form.`);
    }
  });
  const t = record.times;
  need(t && real(t.draft_s) && real(t.score_s) && real(t.verify_s) && real(t.other_s), 'a round without its times.');
}

/** `generate --json`'s metrics of a request, from its events alone. */
export function requestMetrics(request) {
  const said = request.done?.metrics ?? {};
  const counted = { ...request.tally.metrics(), draft_bytes: said.draft_bytes ?? 0, kv_tokens_lost: said.kv_tokens_lost ?? 0, ...request.clock.metrics() };
  if (!request.totals) return counted;
  const told = (value) => (Array.isArray(value) ? value.filter(real) : real(value) ? value : null);
  return Object.fromEntries(Object.keys(counted).map((name) => [name, told(said[name])]));
}

export function requestName(request) {
  const heat = request.sampling.temperature, parts = [request.id, request.drafter];
  if (request.promptClass) parts.push(request.promptClass);
  if (request.rule !== 'match') parts.push(request.rule);
  if (typeof heat === 'number') parts.push(`T ${heat}`);
  return `${parts.join(' · ')} · ${request.tokens} token${request.tokens === 1 ? '' : 's'}`;
}

/** At most so many of a list, with the place `index` among them. */
export function around(list, index, most) {
  const from = Math.max(0, Math.min(list.length - most, index - most / 2));
  return list.slice(from, from + most);
}

/** All emitted token ids of a request. */
export function tokenIds(trace, request) {
  const ids = request.prefill ? [request.prefill.token.token] : [];
  for (const i of request.rounds) for (const token of trace.record(i).tokens) ids.push(token.token);
  return ids;
}

const pairKey = (request) => {
  const { prediction, ...options } = request.sampling;
  return JSON.stringify([request.promptClass, request.promptTokens, request.seed, request.sample, options, request.promptIds, request.prefill?.token.token]);
};

/** Requests with the same prompt, seed and options, one without guesses and one with: [{off, on}], in order of appearance. */
export function pairs(trace) {
  if (trace.raced) return trace.raced;
  const waiting = new Map(), found = [];
  for (const request of trace.requests) {
    if (!request.done || request.withheld || request.broken || !['stop', 'length'].includes(request.done.finish)) continue;
    const key = pairKey(request), group = waiting.get(key) ?? { off: [], on: new Map() };
    waiting.set(key, group);
    if (request.tally.drafted === 0 && request.drafter === 'none') group.off.push(request);
    else {
      const arm = JSON.stringify([request.drafter, request.rule]), same = group.on.get(arm) ?? [];
      group.on.set(arm, same);
      same.push(request);
    }
  }
  for (const { off, on } of waiting.values()) {
    for (const same of on.values()) same.forEach((request, i) => off.length && found.push({ off: off[Math.min(i, off.length - 1)], on: request }));
  }
  return found.sort((a, b) => a.on.index - b.on.index);
}
