// Playing a request again on the engine's own clock. The clock is the page's: nothing here ever delays an engine.

import { button, choice, h, number } from './dom.js';

export const SPEEDS = [0.1, 0.25, 0.5, 1, 2, 5, 10];

/** The bar at the foot of the page. `moved(cursor)` is called with the number of rounds shown, once per frame at most. */
export class Replay {
  #frame = 0; #before = 0; #time = 0;
  playing = false; speed = 1; cursor = 0;

  constructor(moved) {
    this.moved = moved;
    this.range = h('input', { type: 'range', min: 0, max: 0, step: 1, id: 'replay-range', 'aria-label': 'round' });
    this.range.addEventListener('input', () => this.seek(Number(this.range.value)));
    this.place = h('output', { id: 'replay-place' });
    this.toggle = button('Play', () => this.play(!this.playing), { id: 'replay-play', 'aria-pressed': 'false' });
    this.bar = h('div', { class: 'replay', role: 'group', 'aria-label': 'replay' },
      button('Back', () => this.step(-1), { title: 'one round back', id: 'replay-back' }), this.toggle, button('Step', () => this.step(1), { title: 'one round on', id: 'replay-step' }),
      this.range, choice('replay speed', SPEEDS.map((v) => [v, `${v}×`]), 1, (value) => { this.speed = Number(value); }), this.place);
  }

  /** Show `cursor` rounds of a request without telling anyone. */
  set(trace, request, cursor) {
    this.trace = trace;
    this.request = request;
    this.range.max = request.rounds.length;
    this.#show(Math.max(0, Math.min(request.rounds.length, cursor)));
    this.#time = this.#timeOf(this.cursor);
  }

  /** There are more rounds of the same request now. */
  grow() {
    this.range.max = this.request.rounds.length;
    this.#show(this.cursor);
  }

  #timeOf(cursor) { return cursor > 0 ? this.trace.at.at(this.request.rounds[cursor - 1]) - this.request.at : 0; }

  #show(cursor) {
    this.cursor = cursor;
    this.range.value = cursor;
    this.place.textContent = `${cursor} of ${this.request.rounds.length} rounds, ${number(this.#timeOf(cursor), 3)} s`;
  }

  seek(cursor) {
    const bounded = Math.max(0, Math.min(this.request.rounds.length, cursor));
    this.#time = this.#timeOf(bounded);
    if (bounded === this.cursor) return;
    this.#show(bounded);
    this.moved(bounded);
  }

  step(by) { this.play(false); this.seek(this.cursor + by); }

  play(on) {
    if (on && this.cursor >= this.request.rounds.length) this.seek(0);
    this.playing = on;
    this.toggle.textContent = on ? 'Pause' : 'Play';
    this.toggle.setAttribute('aria-pressed', String(on));
    cancelAnimationFrame(this.#frame);
    if (!on) return;
    this.#before = performance.now();
    this.#frame = requestAnimationFrame((now) => this.#tick(now));
  }

  #tick(now) {
    this.#time += Math.max(0, now - this.#before) / 1000 * this.speed;
    this.#before = now;
    let cursor = this.cursor;
    while (cursor < this.request.rounds.length && this.#timeOf(cursor + 1) <= this.#time) cursor += 1;
    if (cursor !== this.cursor) { this.#show(cursor); this.moved(cursor); }
    if (cursor >= this.request.rounds.length) this.play(false);
    else this.#frame = requestAnimationFrame((next) => this.#tick(next));
  }
}
