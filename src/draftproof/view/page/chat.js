// The chat box of a running server. Closing the connection is the stop button: the server then cancels in the engine.

import { button, h, panel, running } from './dom.js';

const field = (name, type, value, attributes = {}) => h('label', null, `${name} `, h('input', { type, name: name.replaceAll(' ', '_'), value, ...attributes }));

export class Chat {
  #abort = null;

  /** `raced` is called when both texts of a race are complete. */
  constructor(key, raced) {
    Object.assign(this, { key, raced });
    this.prompt = h('textarea', { name: 'prompt', rows: 3, 'aria-label': 'message', required: true }, '');
    this.drafter = h('input', { name: 'drafter', list: 'drafters', value: '', placeholder: 'the server’s own', 'aria-label': 'drafter' });
    this.form = h('form', { class: 'chat', on: { submit: (event) => { event.preventDefault(); this.send(); } } }, this.prompt,
      h('div', { class: 'bar' }, h('label', null, 'drafter ', this.drafter), h('datalist', { id: 'drafters' }, ['none', 'ngram', 'suffix', 'model'].map((name) => h('option', { value: name }))),
        field('depth', 'text', 'auto', { size: 5, pattern: 'auto|[0-9]+', title: 'auto or a number' }), field('temperature', 'number', 0.8, { min: 0, max: 2, step: 0.1 }),
        field('seed', 'number', 1, { min: 0, step: 1 }), field('max tokens', 'number', 256, { min: 1, step: 1 })),
      h('div', { class: 'bar' }, h('button', { type: 'submit', id: 'chat-send' }, 'Send'), button('Race off and on', () => this.race(), { id: 'chat-race' }), this.stopper = button('Stop', () => this.stop(), { id: 'chat-stop', disabled: true })));
    this.answer = h('div', { class: 'text', 'aria-live': 'polite', id: 'chat-answer', role: 'log' });
    this.panel = panel('Chat', this.form, this.answer);
  }

  #body(speculation) {
    const value = (name) => this.form.elements[name].value;
    return { model: 'default', messages: [{ role: 'user', content: this.prompt.value }], stream: true, temperature: Number(value('temperature')), seed: Number(value('seed')), max_tokens: Number(value('max_tokens')), ...(speculation ? { speculation } : {}) };
  }

  #wish() {
    const drafter = this.drafter.value.trim(), depth = this.form.elements.depth.value.trim(), wish = {};
    if (drafter) wish.drafter = drafter;
    if (depth && depth !== 'auto') wish.depth = Number(depth);
    return Object.keys(wish).length ? wish : null;
  }

  async send() { await this.#run(this.#body(this.#wish()), true); }

  /** The same message without guesses and then with them; the pair then stands in the Race view. */
  async race() {
    if (!this.prompt.value) { this.prompt.reportValidity(); return; }
    const ended = await this.#run(this.#body({ drafter: 'none' }), true);
    if (ended && await this.#run(this.#body(this.#wish()), false)) this.raced();
  }

  stop() { this.#abort?.abort(); }

  async #run(body, clear) {
    this.stop();
    const abort = this.#abort = new AbortController();
    this.stopper.disabled = false;
    if (clear) this.answer.replaceChildren();
    let waiting = '', asked = false;
    const flush = () => { asked = false; this.answer.append(running(waiting)); waiting = ''; };
    try {
      const answer = await fetch('/v1/chat/completions', { method: 'POST', signal: abort.signal, headers: { 'Content-Type': 'application/json', ...(this.key ? { Authorization: `Bearer ${this.key}` } : {}) }, body: JSON.stringify(body) });
      if (!answer.ok) { const told = await answer.json().catch(() => null); throw new Error(told?.error?.message ?? `the server answered ${answer.status}`); }
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = '';
      for (;;) {
        const { done, value } = await reader.read();
        if (done) break;
        const lines = (rest + value).split('\n');
        rest = lines.pop();
        for (const line of lines) {
          if (!line.startsWith('data:') || line.includes('[DONE]')) continue;
          const said = JSON.parse(line.slice(5));
          if (said.error) throw new Error(said.error.message ?? 'the server reports an error');
          waiting += said.choices?.[0]?.delta?.content ?? '';
          if (waiting && !asked) { asked = true; requestAnimationFrame(flush); }
        }
      }
      return true;
    } catch (error) {
      waiting += error.name === 'AbortError' ? ' [stopped]' : ` [${error.message}]`;
      requestAnimationFrame(flush);
      return false;
    } finally {
      if (this.#abort === abort) this.stopper.disabled = true;
    }
  }
}
