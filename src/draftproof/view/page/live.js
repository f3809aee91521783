// Events of a running server: GET /draftproof/events?since=ID streams `id: N`, `data: one trace event`, and `event: gap` where some
// are lost. A broken connection goes on where it broke.

const ENCODER = new TextEncoder();
const FULL_BYTES = 1 << 26, MANY = 5000, WAITING = 5000;      // of one trace; of events that no frame has shown yet
const frame = () => new Promise((resume) => { requestAnimationFrame(resume); setTimeout(resume, 1000); });      // a hidden page has no frames

export const authorised = (key) => (key ? { Authorization: `Bearer ${key}` } : {});

/** What a server says about a request that it refused. */
export async function refusal(answer) {
  const told = await answer.json().catch(() => null);
  return told?.error?.message ?? `the server answered ${answer.status}`;
}

/** `fetch`, and words for a server that is not there: a browser's own ("Failed to fetch") say nothing to a reader. */
export async function reached(path, options) {
  try { return await fetch(path, options); } catch (error) {
    throw error.name === 'AbortError' ? error : new Error('the server does not answer; it may have been stopped');
  }
}

export class Live {
  #last = 0; #stopped = false; #waiting = []; #flushing = null; #header = null;

  /** `trace` is fed with what arrives; `changed` is called once per animation frame at most, `told` with what is worth saying; `renew` gives
   *  another trace when this one is full, or null if that must wait. */
  constructor(trace, { changed, told, renew, key }) {
    Object.assign(this, { trace, changed, told, renew, key });
  }

  /** 'open', 'key' if the server wants another one, or null: no server. Resolves with the first connection; the stream goes on by itself. */
  async open() {
    const answer = await this.#connect().catch(() => null);
    if (answer?.status === 401) return 'key';
    if (answer?.status === 429) { this.told(`No events: ${await refusal(answer)}.`); return null; }
    if (!answer?.ok || !(answer.headers.get('content-type') ?? '').startsWith('text/event-stream')) return null;
    this.#follow(answer);
    return 'open';
  }

  stop() { this.#stopped = true; this.abort?.abort(); }

  #connect() {
    this.abort = new AbortController();
    return reached(`/draftproof/events?since=${this.#last}`, { headers: { Accept: 'text/event-stream', ...authorised(this.key) }, signal: this.abort.signal, cache: 'no-store' });
  }

  async #follow(answer) {
    let pause = 500, broken = false;
    for (;;) {
      try {
        answer ??= await this.#connect();
        if (!answer.ok) throw new Error(await refusal(answer));
        if (broken) this.told('');
        pause = 500;
        await this.#drain(answer.body);
        throw new Error('the server ended it');
      } catch (error) {
        if (this.#stopped) return;
        broken = true;
        this.told(`The connection was lost (${error.message}); trying again.`);
      }
      answer = null;
      await new Promise((resume) => setTimeout(resume, pause));
      pause = Math.min(10000, 2 * pause);
    }
  }

  async #drain(body) {
    const reader = body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = '';
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (rest + value.replaceAll('\r', '')).split('\n\n');
      rest = blocks.pop();
      for (const block of blocks) this.#block(block);
      while (this.#waiting.length > WAITING) await this.#flushing;      // who cannot keep up does not read on: the server then tells of a gap
    }
  }

  #block(block) {
    let id = null, event = 'message';
    const data = [];
    for (const line of block.split('\n')) {
      if (line.startsWith('id:')) id = Number(line.slice(3));
      else if (line.startsWith('event:')) event = line.slice(6).trim();
      else if (line.startsWith('data:')) data.push(line.slice(5).replace(/^ /, ''));
    }
    if (id !== null && Number.isSafeInteger(id)) {
      if (data.length && id <= this.#last && event === 'message') return;
      this.#last = id;
    }
    if (!data.length) return;
    this.#waiting.push({ event, line: data.join('\n') });
    this.#flushing ??= frame().then(() => this.#flush());
  }

  #flush() {
    const arrived = this.#waiting;
    this.#waiting = [];
    this.#flushing = null;
    const full = this.trace.bytes > FULL_BYTES || this.trace.requests.length > MANY, fresh = full ? this.renew() : null;
    if (fresh) {
      const before = this.trace;
      this.trace = fresh;
      this.#feed(this.#header);
      fresh.resume(before);
      this.told('Older requests were let go, so that this page stays small; serve --trace FILE keeps them.');
    }
    for (const { event, line } of arrived) {
      if (event === 'gap') this.trace.lost();
      if (event !== 'message') continue;
      if (line.startsWith('{"event":"trace_started"')) { this.#header = line; this.trace.anew(); }
      this.#feed(line);
    }
    this.changed(this.trace);
  }

  #feed(line) {
    try { this.trace.feed(ENCODER.encode(`${line}\n`)); } catch (error) { this.told(`An event could not be read: ${error.message}`); }
  }
}
