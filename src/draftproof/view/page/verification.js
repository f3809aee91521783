// How one token was judged. Under `match` target and drafter run the same race with the same noise; under `ratio` and `block` a coin falls.

import { button, chance, h, label, number, panel, svg, table } from './dom.js';
import { gumbel, noiseKey } from './noise.js';
import { walk } from './words.js';

const bar = (value, most, kind) => svg('svg', { class: `bar-of ${kind}`, viewBox: '0 0 100 10', preserveAspectRatio: 'none', 'aria-hidden': 'true' },
  svg('rect', { width: Math.max(0, Math.min(100, 100 * value / most)), height: 10 }));

/** Every token of this place that the trace knows something of: [{token, p, q, g}], likeliest first. */
function candidates(trace, request, record, j) {
  const steps = walk(record), step = steps[j], rows = new Map();
  const row = (token) => { if (!rows.has(token)) rows.set(token, { token, p: null, q: null }); return rows.get(token); };
  for (const a of step.token.alternatives ?? []) row(a.token).p = a.probability;
  for (const a of step.token.draft_alternatives ?? []) row(a.token).q = a.probability;
  row(step.token.token).p ??= step.token.p ?? null;
  for (const i of step.siblings) {
    const node = record.nodes[i], one = row(node.token);
    one.p ??= node.p ?? null;
    one.q ??= node.q ?? null;
    one.node = node;
  }
  const key = Number(request.sampling.temperature) === 0 ? null : noiseKey(BigInt(request.seed), request.sample, record.position + j);
  for (const one of rows.values()) one.g = key === null ? 0 : gumbel(key, one.token);
  return { step, greedy: key === null, rows: [...rows.values()].sort((a, b) => (b.p ?? -1) - (a.p ?? -1)) };
}

const perturbed = (chanceOf, g) => (chanceOf ? Math.log(chanceOf) + g : null);
const best = (rows, name) => rows.reduce((top, one) => (one[name] !== null && (top === null || one[name] > top[name]) ? one : top), null);

function race(trace, { rows, greedy, step }) {
  for (const one of rows) { one.target = perturbed(one.p, one.g); one.draft = perturbed(one.q, one.g); }
  const won = best(rows, 'target'), guessed = best(rows, 'draft'), name = (one) => label(trace.piece(one.token), 24);
  const heads = ['token', 'p (target)', 'q (draft)', ...(greedy ? [] : ['shared noise g', 'log p + g', 'log q + g'])];
  const body = rows.map((one) => [
    h('span', { class: one.token === step.token.token ? 'won' : null }, `${one === won ? '★ ' : ''}${one === guessed ? '◇ ' : ''}${name(one)}`),
    [bar(one.p ?? 0, 1, 'p'), chance(one.p)], [bar(one.q ?? 0, 1, 'q'), chance(one.q)],
    ...(greedy ? [] : [number(one.g), number(one.target), number(one.draft)]),
  ]);
  const agreed = won && won.token === step.token.token;
  return [
    h('p', null, greedy ? 'Temperature 0: the noise is zero, so the target emits its likeliest token, and the guess stands if it is that token.'
      : 'Rule match: target and drafter add the same noise to their logarithms. The target’s winner (★) is emitted, whatever was guessed; the guess (◇ the drafter’s winner, where its law is known) stands if it is that token.'),
    table('candidates of this place', heads, body),
    h('p', { class: 'quiet' }, agreed ? 'The noise above is computed here from the seed alone; its winner among these candidates is the token that the engine emitted.'
      : 'The emitted token is none of the winners among the candidates that the trace holds: only the likeliest are kept, and a token outside them can win.'),
  ];
}

function toss(trace, record, { rows, step }) {
  const node = step.node === null ? record.nodes[step.siblings[0]] : record.nodes[step.node];
  if (!node) return [h('p', null, 'Nothing was guessed at this place: the target’s own draw.')];
  const limit = node.q ? Math.min(1, (node.p ?? 0) / node.q) : 1, u = node.coin ?? null, x = (v) => 20 + 560 * v;
  const drawing = svg('svg', { class: 'chart fit', viewBox: '0 0 600 70', role: 'img', 'aria-label': `coin ${chance(u)} against ${chance(limit)}` },
    svg('rect', { class: 'yes', x: x(0), y: 22, width: Math.max(0, x(limit) - x(0)), height: 22 }), svg('rect', { class: 'no', x: x(limit), y: 22, width: Math.max(0, x(1) - x(limit)), height: 22 }),
    svg('text', { x: x(limit), y: 62, 'text-anchor': 'middle' }, `min(1, p/q) = ${chance(limit)}`),
    u === null ? null : [svg('line', { class: 'coin', x1: x(u), x2: x(u), y1: 14, y2: 50 }), svg('text', { x: x(u), y: 10, 'text-anchor': 'middle' }, `u = ${chance(u)}`)]);
  const rest = rows.map((one) => ({ ...one, left: Math.max(0, (one.p ?? 0) - (one.q ?? 0)) })), sum = rest.reduce((total, one) => total + one.left, 0);
  return [
    h('p', null, record.nodes.length && step.siblings.length > 1 ? 'Several guesses stand at this place; they are judged in order, each against what the refused ones left of p. The coin below is the first one’s.'
      : 'The guess stands if the coin u falls below min(1, p/q): always where p ≥ q, and with probability p/q elsewhere. A refused guess is replaced by a draw from the residual max(0, p − q).'),
    drawing,
    table('the two distributions and the residual', ['token', 'p (target)', 'q (draft)', 'residual max(0, p − q)'], rest.map((one) =>
      [label(trace.piece(one.token), 24), [bar(one.p ?? 0, 1, 'p'), chance(one.p)], [bar(one.q ?? 0, 1, 'q'), chance(one.q)], [bar(sum ? one.left / sum : 0, 1, 'r'), chance(one.left)]])),
    h('p', { class: 'quiet' }, 'The trace holds the likeliest tokens only; the residual shown is over these.'),
  ];
}

export const verificationView = {
  id: 'verification', title: 'Verification',
  draw(ctx) {
    const place = h('div'), paint = ({ trace, request, cursor, token, link }) => {
      const ordinal = Math.max(0, cursor - 1), i = request.rounds[ordinal];
      if (i === undefined) return place.replaceChildren(h('p', null, 'This request has no round yet.'));
      const record = trace.record(i), j = Math.min(token, record.tokens.length - 1);
      if (j < 0) return place.replaceChildren(h('p', null, 'This round emitted nothing.'));
      const picks = record.tokens.map((one, k) => h('a', { class: `pick tok ${one.role}`, href: link('verification', { round: ordinal, token: k }), 'aria-current': k === j ? 'true' : null }, label(trace.piece(one.token), 16)));
      const one = record.tokens[j], joint = request.rule === 'ratio' || request.rule === 'block';
      const parts = [h('p', { 'aria-live': 'polite' }, `Round ${record.round}, token ${j + 1} of ${record.tokens.length}: ${one.role}. Rule ${label(request.rule)}.`), h('nav', { class: 'bar', 'aria-label': 'tokens of the round' }, picks)];
      if (one.p === undefined) parts.push(h('p', { class: 'notice' }, request.header.machine.imported ? `This trace was imported from ${label(String(request.header.machine.imported))}, which tells no probabilities.`
        : 'This trace was written at level summary: it has no probabilities. Write one with --trace-level full to see how each token was judged.'));
      else if (joint) {
        if (request.rule === 'block') parts.push(h('p', null, 'Rule block judges the whole guess at once: it keeps the longest prefix whose coin falls below the prefix’s joint ratio, so one token’s bar below is a lower bound, not the whole story.'));
        parts.push(...toss(trace, record, candidates(trace, request, record, j)));
      } else parts.push(...race(trace, candidates(trace, request, record, j)));
      const next = (step) => button(step < 0 ? '← token' : 'token →', () => ctx.go('verification', { round: ordinal, token: Math.max(0, j + step) }), { disabled: j + step < 0 || j + step >= record.tokens.length });
      return place.replaceChildren(...parts, h('div', { class: 'bar' }, next(-1), next(1)));
    };
    paint(ctx);
    this.follow = paint;
    return [panel('How a token was judged', place)];
  },
};
