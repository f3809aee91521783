// A running server behind the page: its events, the chat, and which request is followed.

import { h, panel } from './dom.js';
import { Chat } from './chat.js';
import { Live } from './live.js';
import { Steering, speculation } from './steer.js';
import { Trace } from './trace.js';

const WATCH_MS = 3000;

export class Session {
  #wanted = null; #race = null;

  /** shown(trace, request): something arrived; request is the one to be shown, if it is another. raced(pair): both texts of a race are whole. */
  constructor({ shown, raced, told }) {
    Object.assign(this, { shown, raced, told });
    this.trace = null;
  }

  /** 'open', 'key' or null, as `Live.open`. */
  async open(key) {
    const fresh = () => Object.assign(new Trace('live'), { raced: [] });
    this.live = new Live(fresh(), { changed: (trace) => this.#arrived(trace), told: this.told, renew: () => (this.chat?.running ? null : fresh()), key });
    this.trace = this.live.trace;
    const answer = await this.live.open();
    if (answer !== 'open') return answer;
    try {
      const state = await speculation(key);
      this.steering = new Steering(key, this.told);
      this.steering.show(state);
      this.watch = setInterval(() => document.hidden || this.steering.look(), WATCH_MS);      // others may switch, too
      const drafters = [state.configured, ...Object.keys(state.others ?? {})];
      this.chat = new Chat({ key, model: state.model, drafters }, (name) => this.#sent(name), (off, on) => { this.#race = { off, on }; this.#arrived(this.trace); }, () => this.steering.look());
      this.panels = [this.chat.panel, this.steering.panel];
    } catch (error) {
      this.panels = [panel('Chat', h('p', null, `The server did not say how it is: ${error.message}.`))];
    }
    return answer;
  }

  stop() { clearInterval(this.watch); this.live?.stop(); }

  /** The reader has chosen what to look at. */
  release() { this.#wanted = null; }

  #sent(name) {
    this.#wanted = name;
    this.#arrived(this.trace);
  }

  #arrived(trace) {
    this.trace = trace;
    const own = this.#wanted === null ? undefined : trace.named(this.#wanted);
    this.shown(trace, own);
    this.chat?.follow(trace);
    const pair = this.#race && { off: trace.named(this.#race.off), on: trace.named(this.#race.on) };
    if (!pair?.off?.done || !pair.on?.done) return;
    this.#race = null;
    trace.raced.push(pair);
    this.raced(pair);
  }
}
