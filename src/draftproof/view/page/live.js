// Events of a running server: GET /draftproof/events?since=ID streams `id: N`, `data: one trace event`. A lost connection goes on where it broke.

const ENCODER = new TextEncoder();

export class Live {
  #last = -1; #stopped = false; #waiting = []; #asked = false;

  /** `trace` is fed with what arrives; `changed` is called once per animation frame at most, `told` with what is worth saying. */
  constructor(trace, changed, told, key = '') {
    Object.assign(this, { trace, changed, told, key });
  }

  /** Whether a server answers here. Resolves after the first connection; the stream then goes on by itself. */
  async open() {
    const answer = await this.#connect().catch(() => null);
    if (!answer?.ok || !(answer.headers.get('content-type') ?? '').startsWith('text/event-stream')) return answer?.status === 401 ? 'key' : null;
    this.#follow(answer);
    return 'open';
  }

  stop() { this.#stopped = true; this.abort?.abort(); }

  #connect() {
    this.abort = new AbortController();
    const headers = { Accept: 'text/event-stream', ...(this.key ? { Authorization: `Bearer ${this.key}` } : {}) };
    return fetch(`/draftproof/events?since=${Math.max(0, this.#last)}`, { headers, signal: this.abort.signal, cache: 'no-store' });
  }

  async #follow(answer) {
    let pause = 500;
    for (;;) {
      try {
        answer ??= await this.#connect();
        if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
        pause = 500;
        this.told('');
        await this.#drain(answer.body);
      } catch (error) {
        if (!this.#stopped) this.told(`The connection was lost (${error.message}); trying again.`);
      }
      if (this.#stopped) return;
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
    }
  }

  #block(block) {
    let id = null;
    const data = [];
    for (const line of block.split('\n')) {
      if (line.startsWith('id:')) id = Number(line.slice(3));
      else if (line.startsWith('data:')) data.push(line.slice(5).replace(/^ /, ''));
    }
    if (Number.isFinite(id) && id !== null) {
      const again = data.some((text) => text.startsWith('{"event":"trace_started"'));       // a server that was started anew counts from the beginning
      if (id <= this.#last && !again) return;
      this.#last = id;
    }
    if (!data.length) return;
    this.#waiting.push(data.join('\n'));
    if (this.#asked) return;
    this.#asked = true;
    requestAnimationFrame(() => this.#flush());
  }

  #flush() {
    this.#asked = false;
    const lines = this.#waiting;
    this.#waiting = [];
    for (const line of lines) {
      try { this.trace.feed(ENCODER.encode(`${line}\n`)); } catch (error) { this.told(`An event could not be read: ${error.message}`); }
    }
    this.changed();
  }
}
