// The same prompt and seed, without guesses and with them, side by side on the engine's own clock.

import { button, choice, counted, h, label, number, panel, running, seconds } from './dom.js';
import { keepsText, promised, sameTokens } from './status.js';
import { legend } from './text.js';
import { pairs, requestName } from './trace.js';
import { roundWords } from './words.js';

/** What arrived when: [{at, text, role}], seconds since submission. */
function arrivals(trace, request) {
  const list = request.prefill ? [{ at: request.prefill.at_s - request.at, text: request.prefill.text, role: 'prefill', tokens: 1 }] : [];
  for (const i of request.rounds) {
    const record = trace.record(i), words = roundWords(trace, request, record), at = record.at_s - request.at;
    if (words) record.tokens.forEach((token, j) => list.push({ at, text: words[j], role: token.role, tokens: 1 }));
    else list.push({ at, text: record.text, role: record.tokens.at(-1)?.role ?? 'plain', tokens: record.tokens.length });
  }
  return list;
}

function runner(trace, request, title) {
  const list = arrivals(trace, request), text = h('div', { class: 'text lane', tabindex: '0', role: 'group', 'aria-label': `text ${title}` }), state = h('p', { class: 'quiet' }), length = list.at(-1)?.at ?? 0;
  let shown = 0, tokens = 0;
  return {
    length,
    panel: h('section', { class: 'card', 'aria-label': title }, h('h3', null, title), state, text),
    to(t) {
      if (shown && (t === 0 || list[shown - 1].at > t)) { text.replaceChildren(); shown = tokens = 0; }
      const fresh = [];
      while (shown < list.length && list[shown].at <= t) {
        const one = list[shown++];
        tokens += one.tokens;
        fresh.push(h('span', { class: `tok ${one.role}` }, running(one.text, 2000)));
      }
      text.append(...fresh);
      if (fresh.length) text.scrollTop = text.scrollHeight;
      state.textContent = `${counted(tokens, 'token')}, ${seconds(Math.min(t, length))}${t >= length ? ' – finished' : ''}`;
    },
  };
}

export const raceView = {
  id: 'race', title: 'Race', still: true,
  draw(ctx) {
    const { trace, request, state } = ctx, all = pairs(trace);
    if (!all.length) {
      return [panel('Race', h('p', null, 'A race needs the same prompt with the same seed and options twice in one trace: once with drafter none, once with guesses. The demo’s trace has such pairs; against a server, “Race” beside the chat makes one.'))];
    }
    const pair = all.find(({ on, off }) => on === request || off === request) ?? all[0];
    const off = runner(trace, pair.off, 'off: plain decoding'), on = runner(trace, pair.on, `on: drafter ${label(pair.on.drafter)}`), length = Math.max(off.length, on.length);
    const result = h('p', { class: 'verdict', role: 'status', id: 'race-result' });
    let t = 0, running_ = false, before = 0, speed = state.raceSpeed ?? 1, frame = 0;
    const finish = () => {
      running_ = false;
      const same = sameTokens(trace, pair);
      const words = keepsText(pair.on) ? 'The texts DIFFER.' : `The texts differ, as they may: ${promised(pair.on)}.`, gain = off.length / pair.off.tokens * pair.on.tokens / on.length;
      result.dataset.same = String(same);
      result.textContent = `${same ? `The texts are equal: all ${pair.on.tokens} tokens.` : words} ${number(gain)} times as fast with guesses (${seconds(on.length)} against ${seconds(off.length)}).`;
    };
    const show = () => { off.to(t); on.to(t); if (t >= length) finish(); };
    const tick = (now) => {
      if (!running_) return;
      t = Math.min(length, t + (now - before) / 1000 * speed);
      before = now;
      show();
      if (running_) frame = requestAnimationFrame(tick);
    };
    const start = () => {
      if (t >= length) { t = 0; result.textContent = ''; delete result.dataset.same; }
      running_ = !running_;
      before = performance.now();
      show();
      frame = requestAnimationFrame(tick);
    };
    this.leave = () => { running_ = false; cancelAnimationFrame(frame); };
    off.to(0);
    on.to(0);
    if (state.starts) requestAnimationFrame(() => { result.closest('main').scrollIntoView(); start(); });
    state.starts = false;
    const pick = choice('pair', all.slice(0, 500).map((one, i) => [i, label(requestName(one.on), 80)]), all.indexOf(pair), (value) => ctx.go('race', { r: all[Number(value)].on.index, round: 0 }));
    const speeds = choice('speed', [0.1, 0.25, 0.5, 1, 2, 5, 10].map((v) => [v, `${v}×`]), speed, (value) => { speed = state.raceSpeed = Number(value); });
    return [panel('Race: off against on', h('div', { class: 'bar' }, button('Start or pause', start, { id: 'race-start' }), button('To the end', () => { running_ = false; t = length; show(); }, { id: 'race-end' }), h('label', null, 'Speed ', speeds), h('label', null, 'Pair ', pick)),
      result, legend('accepted', 'correction', 'bonus', 'plain', 'prefill'), h('div', { class: 'lanes' }, off.panel, on.panel))];
  },
};
