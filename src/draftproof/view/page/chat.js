// The chat box of a running server. Every message is a request by itself, so that off and on can be compared. Closing the connection is the
// stop button: the server then cancels in the engine.

import { button, choice, counted, h, number, panel, percent, running, seconds } from './dom.js';
import { authorised, reached, refusal } from './live.js';
import { keepsText, promised } from './status.js';
import { legend, prefillSpan, roundSpans } from './text.js';

const BIGGEST = Number.MAX_SAFE_INTEGER;
const field = (name, type, value, attributes = {}) => h('label', null, `${name} `, h('input', { type, name: name.replaceAll(' ', '_'), value, ...attributes }));
const rate = (said) => (said?.timings?.predicted_per_second ? `${number(said.timings.predicted_per_second, 1)} tokens/s` : 'one token');

/** Where one answer is written, once a frame: as it arrives, and once the trace has it, token by token with its role. */
class Lane {
  #waiting = ''; #asked = false; #began = 0; #source = null; #rounds = -1;

  constructor(title) {
    this.text = h('div', { class: 'text lane', role: 'log', 'aria-live': 'off', tabindex: '0', 'aria-label': title });
    this.state = h('p', { class: 'quiet', role: 'status' });
    this.card = h('section', { class: 'card answer' }, h('h3', null, title), this.state, this.text);
    this.whole = '';
  }

  begin() { this.#began = performance.now(); }

  add(text) {
    this.whole += text;
    this.#waiting += text;
    if (text) this.#ask();
  }

  /** The trace has it, or more of it. */
  paint(trace, request) {
    this.#source = { trace, request };
    if (this.#rounds < request.rounds.length) this.#ask();
  }

  #ask() {
    if (this.#asked) return;
    this.#asked = true;
    requestAnimationFrame(() => this.#flush());
  }

  #flush() {
    this.#asked = false;
    const parts = this.#source?.request.prefill ? this.#fresh(this.#source) : [running(this.#waiting, 100000)].filter(Boolean);
    this.#waiting = '';
    if (!parts.length) return;
    this.text.append(...parts);
    this.text.scrollTop = this.text.scrollHeight;
    if (!this.state.dataset.ended) this.state.textContent = `${seconds((performance.now() - this.#began) / 1000)} …`;
  }

  #fresh({ trace, request }) {
    const parts = [];
    if (this.#rounds < 0) {
      this.text.replaceChildren();
      this.#rounds = 0;
      parts.push(prefillSpan(trace, request));
    }
    for (; this.#rounds < request.rounds.length; this.#rounds++) parts.push(...roundSpans(trace, request, this.#rounds, false));
    return parts;
  }

  end(text, how) {
    this.state.dataset.ended = how;
    this.state.textContent = text;
  }
}

export class Chat {
  #abort = null; #names = new Map(); #trace = null;

  /** server: {key, model, drafters}. `sent(request)` gets the trace's name of each answer; `raced(off, on)` those of a race that has ended; `ended()` is called after each message. */
  constructor(server, sent, raced, ended) {
    Object.assign(this, { server, sent, raced, ended });
    this.prompt = h('textarea', { name: 'prompt', rows: 3, 'aria-label': 'message', required: true });
    this.form = h('form', { class: 'chat', on: { submit: (event) => { event.preventDefault(); this.send(); } } }, this.prompt,
      h('div', { class: 'bar' },
        h('label', null, 'drafter ', this.drafter = choice('drafter', [['', `${server.drafters[0]} (the server’s)`], ...server.drafters.slice(1).map((name) => [name, name]), ['none', 'none']], '', () => {})),
        field('depth', 'text', '', { size: 9, pattern: 'auto|[0-9]+', title: 'auto or a number; empty: as the server has it', placeholder: 'the server’s' }),
        field('temperature', 'number', 0.8, { min: 0, max: 100, step: 'any', required: true }), field('seed', 'number', 1, { min: 0, max: BIGGEST, step: 1, required: true }),
        field('max tokens', 'number', 256, { min: 1, step: 1, required: true })),
      h('div', { class: 'bar' }, h('button', { type: 'submit', id: 'chat-send' }, 'Send'), button('Race: off against on', () => this.race(), { id: 'chat-race' }), this.stopper = button('Stop', () => this.stop(), { id: 'chat-stop', disabled: true }),
        h('label', null, 'as ', this.kind = choice('form of the message', [['chat', 'chat message'], ['plain', 'plain prompt']], 'chat', () => {}))));
    this.answers = h('div', { id: 'chat-answer' });
    this.legend = h('div', { hidden: true }, legend('accepted', 'correction', 'bonus', 'plain', 'prefill'));
    this.result = h('p', { class: 'verdict', id: 'chat-result', role: 'status' });
    this.panel = panel('Chat', this.form, this.answers, this.legend, this.result);
  }

  #value(name) { return this.form.elements[name].value.trim(); }

  /** What the boxes ask for, as one request of one of two forms. */
  #order(wish, limit = Number(this.#value('max_tokens'))) {
    const text = this.prompt.value, chat = this.kind.value === 'chat';
    return {
      path: chat ? '/v1/chat/completions' : '/v1/completions',
      body: { model: this.server.model, ...(chat ? { messages: [{ role: 'user', content: text }] } : { prompt: text }), stream: true, stream_options: { include_usage: true },
        temperature: Number(this.#value('temperature')), seed: Number(this.#value('seed')), max_tokens: limit, ...(wish ? { speculation: wish } : {}) },
    };
  }

  #wish() {
    const drafter = this.drafter.value, depth = this.#value('depth'), wish = {};
    if (drafter) wish.drafter = drafter;
    if (depth) wish.depth = depth === 'auto' ? depth : Number(depth);
    return Object.keys(wish).length ? wish : null;
  }

  #lanes(...titles) {
    const lanes = titles.map((title) => new Lane(title));
    this.answers.className = lanes.length > 1 ? 'lanes' : '';
    this.answers.replaceChildren(...lanes.map((lane) => lane.card));
    this.legend.hidden = false;
    this.#names.clear();
    this.result.textContent = '';
    return lanes;
  }

  async send() {
    const [lane] = this.#lanes('Answer'), abort = this.#start();
    await this.#run(this.#order(this.#wish()), lane, abort, this.sent);
    this.#over(abort);
  }

  /** The same message with guesses and without, one after the other, so that neither slows the other one down; first one token, so that both find the prompt read. */
  async race() {
    if (!this.form.reportValidity()) return;
    const [off, on] = this.#lanes('off: plain decoding', `on: ${this.drafter.selectedOptions[0].textContent}`), abort = this.#start();
    off.state.textContent = on.state.textContent = 'waits';
    const warm = await this.#run(this.#order({ drafter: 'none' }, 1), off, abort, () => {}, true);
    const quick = warm && await this.#run(this.#order(this.#wish()), on, abort, this.sent);
    const plain = quick && await this.#run(this.#order({ drafter: 'none' }), off, abort, this.sent);
    this.#over(abort);
    if (!plain) return;
    const same = off.whole === on.whole, gain = quick.timings?.predicted_per_second / plain.timings?.predicted_per_second;
    const asked = this.#trace?.named(quick.name), differ = !asked || keepsText(asked) ? 'The texts DIFFER.' : `The texts differ, as they may: ${promised(asked)}.`;
    this.result.dataset.same = String(same);
    this.result.textContent = `${same ? 'The texts are equal.' : differ} ${Number.isFinite(gain) ? `With guesses ${number(gain)} times the speed, after the first token.` : ''}`;
    this.raced(plain.name, quick.name);
  }

  stop() { this.#abort?.abort(); }

  get running() { return !this.stopper.disabled; }

  /** The trace has grown: colour what is shown. */
  follow(trace) {
    this.#trace = trace;
    for (const [name, lane] of this.#names) {
      const request = trace.named(name);
      if (request) lane.paint(trace, request);
    }
  }

  #start() {
    this.stop();
    this.stopper.disabled = false;
    return this.#abort = new AbortController();
  }

  #over(abort) {
    if (this.#abort === abort) this.stopper.disabled = true;
    this.ended();
  }

  /** What the server said at the end, with the request's name; null if it did not end well. */
  async #run({ path, body }, lane, abort, sent, silent = false) {
    let said = null;
    if (!silent) lane.begin();
    try {
      const answer = await reached(path, { method: 'POST', signal: abort.signal, headers: { 'Content-Type': 'application/json', ...authorised(this.server.key) }, body: JSON.stringify(body) });
      if (!answer.ok) throw new Error(await refusal(answer));
      const name = answer.headers.get('x-draftproof-request') ?? '';
      if (!silent) this.#names.set(name, lane);
      sent(name);
      for await (const event of answered(answer.body)) {
        if (event.error) throw new Error(event.error.message ?? 'the server reports an error');
        const choiceOf = event.choices?.[0];
        if (!silent) lane.add(choiceOf?.delta?.content ?? choiceOf?.text ?? '');
        if (event.usage) said = { ...event, name };
      }
      if (!silent) lane.end(summary(said), 'done');
      return said;
    } catch (error) {
      const stopped = error.name === 'AbortError';
      lane.end(stopped ? 'Stopped.' : `Failed: ${error.message}`, stopped ? 'stopped' : 'failed');
      return null;
    }
  }
}

function summary(said) {
  if (!said) return 'Ended.';
  const { draft_n: guessed, draft_n_accepted: stood } = said.timings ?? {};
  return `${counted(said.usage.completion_tokens, 'token')}, ${rate(said)}, ${guessed ? `${stood} of ${guessed} guesses stood (${percent(stood / guessed)})` : 'no guesses'}.`;
}

/** The objects of a stream of completions. */
async function* answered(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split('\n');
    rest = lines.pop();
    for (const line of lines) if (line.startsWith('data:') && !line.includes('[DONE]')) yield JSON.parse(line.slice(5));
  }
}
