// Where every millisecond went: the rounds of a text on one time line, and plain decoding of the same text below.

import { button, h, integer, number, panel, percent, seconds, table } from './dom.js';
import { estimated, lasted, speedOf } from './speed.js';
import { PHASES } from './tally.js';

const SLOWEST = 5;

/** First of `rounds` whose end lies at or behind `at`. */
function behind(trace, rounds, at) {
  let low = 0, high = rounds.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (trace.at.at(rounds[middle]) < at) low = middle + 1; else high = middle;
  }
  return low;
}

function paintLanes(canvas, ctx, span, plain) {
  const { trace, request, cursor } = ctx, ratio = window.devicePixelRatio || 1, width = canvas.clientWidth || 600, height = 218;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const pen = canvas.getContext('2d'), style = getComputedStyle(canvas), colour = (name) => style.getPropertyValue(`--${name}`).trim();
  pen.scale(ratio, ratio);
  pen.font = '12px system-ui';
  pen.clearRect(0, 0, width, height);
  const left = 62, x = (t) => left + (t - span[0]) / (span[1] - span[0]) * (width - left - 4);
  const lane = { prefill: 8, draft: 36, score: 64, verify: 92, other: 120, plain: 160 };
  pen.fillStyle = colour('ink');
  for (const [name, y] of Object.entries(lane)) pen.fillText(name, 2, y + 15);
  // each lane comes in the order of time; what is less than half a pixel beyond what stands there already is not drawn again
  const reached = {}, paint = Object.fromEntries(Object.keys(lane).map((name) => [name, colour(name)]));
  const block = (name, from, to) => {
    const a = Math.max(left, x(from)), b = Math.max(a + 0.6, Math.min(width, x(to)));
    if (to <= from || x(to) < left || a > width || b < reached[name] + 0.5) return;
    reached[name] = b;
    pen.fillStyle = paint[name];
    pen.fillRect(a, lane[name], b - a, 20);
  };
  const rounds = request.rounds, { prefill } = request;
  if (prefill) block('prefill', prefill.at_s - request.at - prefill.seconds, prefill.at_s - request.at);
  for (let n = behind(trace, rounds, request.at + span[0]); n < rounds.length; n++) {
    const i = rounds[n];
    let t = trace.at.at(i) - request.at - lasted(trace, i);
    if (t > span[1]) break;
    for (const name of PHASES) block(name, t, t += trace[name].at(i));
  }
  for (const [from, to] of plain(span)) block('plain', from, to);
  const now = cursor > 0 && rounds[cursor - 1] !== undefined ? trace.at.at(rounds[cursor - 1]) - request.at : null;
  pen.fillStyle = colour('ink');
  if (now !== null && now >= span[0] && now <= span[1]) pen.fillRect(x(now), 4, 2, 180);
  const step = 10 ** Math.floor(Math.log10((span[1] - span[0]) / 3));
  for (let t = Math.ceil(span[0] / step) * step; t <= span[1]; t += step) {
    pen.fillRect(x(t), 188, 1, 5);
    if (Math.round(t / step) % Math.max(1, Math.ceil((span[1] - span[0]) / step / (width / 90))) === 0 && x(t) < width - 30) pen.fillText(seconds(t), x(t) - 12, 208);
  }
}

/** Rows of the table: the phases of a text and what lies outside of them; they add up to the whole. Imported rounds have no phases. */
function spent({ prefill, at, clock, tally, tokens }, whole) {
  const rounds = PHASES.reduce((sum, name) => sum + clock[name], 0), told = (value) => (rounds || !tally.rounds ? value : null);
  const reading = prefill?.seconds ?? 0, waiting = prefill ? Math.max(0, prefill.at_s - at - reading) : 0, between = Math.max(0, whole - waiting - reading - rounds);
  const row = (name, value, count = 0) => [name, number(value, 4), value === null ? '–' : percent(value / whole), seconds(count && value !== null ? value / count : null)];
  if (!tokens) return [row('the whole', whole)];
  return [row('waiting', waiting), row('prefill', reading), ...PHASES.map((name) => row(name, told(clock[name]), tally.rounds)), row('between rounds', told(between), tally.rounds), row('the whole', whole)];
}

/** What there is to say where no round has a time. */
function untimed({ done, tokens }, length) {
  if (!tokens) return done ? `It ended after ${seconds(length)} without a token.` : 'No token has come yet.';
  return `The whole took ${seconds(length)}${tokens > 1 ? '; this trace has no times of single rounds' : ': the prompt gave the only token'}.`;
}

/** Places of the rounds that took longest, the longest first. */
function slowest(trace, rounds) {
  const took = rounds.map((i, ordinal) => ({ ordinal, length: lasted(trace, i) }));
  return took.filter(({ length }) => length > 0).sort((a, b) => b.length - a.length).slice(0, SLOWEST);
}

export const ganttView = {
  id: 'gantt', title: 'Gantt',
  draw(ctx) {
    const { trace, request } = ctx, measured = speedOf(trace, request).pair, about = estimated(trace, request), clock = request.clock;
    const length = Math.max(1e-6, (clock.last ?? request.done?.at_s ?? request.at) - request.at), first = (clock.first ?? request.at) - request.at;
    const pass = about ? (length - first) / request.tally.emitted * about.gain : 0;      // what lies between rounds counts in proportion
    const plainLength = measured ? measured.off.clock.last - measured.off.at : first + pass * request.tally.emitted;
    const whole = [0, Math.max(length, plainLength)];
    let span = [...whole];
    const plain = function* plain(view) {
      if (measured) {
        const off = measured.off;
        for (let n = behind(trace, off.rounds, off.at + view[0]); n < off.rounds.length; n++) {
          const i = off.rounds[n], end = trace.at.at(i) - off.at;
          if (end - trace.score.at(i) > view[1]) return;
          yield [end - trace.score.at(i), end];
        }
      } else if (pass) {
        for (let n = Math.max(0, Math.floor((view[0] - first) / pass)); n < request.tally.emitted; n++) {
          if (first + n * pass > view[1]) return;
          yield [first + n * pass, first + (n + 0.9) * pass];
        }
      }
    };
    const canvas = h('canvas', { class: 'gantt', tabindex: '0', role: 'img', 'aria-label': `time line: ${seconds(length)} with speculation, ${seconds(plainLength)} ${measured ? 'measured' : 'estimated'} without; plus and minus zoom, arrow keys move; the table below says the same` });
    let last = ctx;
    const paint = (next) => { last = next; paintLanes(canvas, next, span, plain); };
    const zoom = (factor, shift = 0) => {
      const size = Math.max(1e-5, Math.min(whole[1], (span[1] - span[0]) * factor)), middle = (span[0] + span[1]) / 2 + shift * (span[1] - span[0]);
      const from = Math.max(0, Math.min(whole[1] - size, middle - size / 2));
      span = [from, from + size];
      paint(last);
    };
    canvas.addEventListener('keydown', (event) => {
      const act = { '+': [0.5], '=': [0.5], '-': [2], ArrowLeft: [1, -0.25], ArrowRight: [1, 0.25] }[event.key];
      if (act) { event.preventDefault(); event.stopPropagation(); zoom(...act); }
    });
    this.follow = (next) => requestAnimationFrame(() => paint(next));
    this.follow(ctx);
    this.repaint = () => paint(last);
    const longest = slowest(trace, request.rounds).map(({ ordinal, length: took }, k) => [k ? ', ' : '',
      h('a', { href: ctx.link('rounds', { round: ordinal }) }, `${trace.record(request.rounds[ordinal]).round} (${seconds(took)})`)]);
    return [panel('Where the time went',
      h('p', null, measured || pass ? `With speculation ${seconds(length)}; plain decoding of the same text ${measured ? '' : 'about '}${seconds(plainLength)} (${measured ? 'measured: the run without guesses in this trace' : `one plain pass a token, ${about.plain.how}`}).`
        : untimed(request, length)),
      h('div', { class: 'bar' }, button('Zoom in', () => zoom(0.5)), button('Zoom out', () => zoom(2)), button('←', () => zoom(1, -0.25), { 'aria-label': 'earlier' }), button('→', () => zoom(1, 0.25), { 'aria-label': 'later' }), button('All', () => zoom(1e9))),
      canvas,
      h('p', { class: 'quiet' }, 'A gap in every lane is time between rounds; the upright line is where the replay stands.'),
      request.tokens || request.done ? table('where the time went', ['phase', 'seconds', 'share', 'per round'], spent(request, length)) : null,
      longest.length ? h('p', { id: 'slowest' }, 'Slowest rounds: ', longest, '.') : null,
      h('p', { class: 'quiet' }, `${integer(request.tally.rounds)} rounds. A pass that several texts share is shown in full for each of them.`))];
  },
};
