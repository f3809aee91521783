// What the operator may change while the server runs: PUT /draftproof/speculation, from the next round on, for all requests.

import { button, h, label, panel } from './dom.js';
import { authorised, reached, refusal } from './live.js';

const PATH = '/draftproof/speculation';

/** The server's state of speculation. Throws what the server said. */
export async function speculation(key, change = null) {
  const headers = { ...authorised(key), ...(change ? { 'Content-Type': 'application/json' } : {}) };
  const answer = await reached(PATH, { headers, cache: 'no-store', ...(change ? { method: 'PUT', body: JSON.stringify(change) } : {}) });
  if (!answer.ok) throw new Error(await refusal(answer));
  return answer.json();
}

export class Steering {
  constructor(key, told) {
    Object.assign(this, { key, told });
    this.words = h('span', { role: 'status' });
    this.why = h('span');              // it changes with every round, and is not announced
    this.toggle = button('', () => this.change({ enabled: !this.state.enabled }), { id: 'server-switch' });
    this.cap = h('input', { type: 'number', min: 0, max: 1024, size: 4, name: 'cap', 'aria-label': 'deepest guess for all' });
    const set = (event) => { event.preventDefault(); if (this.cap.value !== '') this.change({ depth_cap: Number(this.cap.value) }); };
    this.panel = panel('Server', h('p', { id: 'server-state' }, this.words, this.why), h('form', { class: 'bar', on: { submit: set } }, this.toggle, h('label', null, 'no guess deeper than ', this.cap),
      h('button', { type: 'submit', id: 'server-cap' }, 'Set'), button('No cap', () => this.change({ depth_cap: null }), { id: 'server-uncap' })));
  }

  show(state) {
    this.state = state;
    const cap = state.depth_cap === null || state.depth_cap === undefined ? '' : `, at most ${state.depth_cap}`;
    const words = state.state === 'none' ? 'This server runs without a drafter: every token is one pass of the target.'
      : `Speculation is ${state.state}: drafter ${label(state.drafter)}, depth ${label(String(state.depth))}${cap}.`;
    if (this.words.textContent !== words) this.words.textContent = words;
    this.why.textContent = state.state === 'none' ? '' : ` Why: ${label(state.reason, 200)}.`;
    this.toggle.textContent = state.enabled ? 'Switch off for all' : 'Switch on';
    this.toggle.disabled = state.state === 'none';
  }

  async look() { await speculation(this.key).then((state) => this.show(state), () => {}); }

  async change(what) {
    try { this.show(await speculation(this.key, what)); } catch (error) { this.told(`Not changed: ${error.message}.`); }
  }
}
