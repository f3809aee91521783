// How one token was judged. Under `match` target and drafter run the same race with the same noise; under `ratio` and `block`
// coins fall; `lossy-typical` asks whether a guess is typical.

import { button, chance, h, label, number, panel, svg, table } from './dom.js';
import { gumbel, noiseKey } from './noise.js';
import { ROLE_NAMES, roundless, walk } from './words.js';

const bar = (value, most, kind) => svg('svg', { class: `bar-of ${kind}`, viewBox: '0 0 100 10', preserveAspectRatio: 'none', 'aria-hidden': 'true' },
  svg('rect', { width: Math.max(0, Math.min(100, 100 * value / most)), height: 10 }));

/** Every token of this place that the trace knows something of: [{token, p, q, g, fate}], likeliest first; `fate` of those that were guessed. */
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
    one.fate = node.fate;
  }
  const key = Number(request.sampling.temperature) === 0 ? null : noiseKey(BigInt(request.seed), request.sample, record.position + j);
  for (const one of rows.values()) one.g = key === null ? 0 : gumbel(key, one.token);
  return { step, greedy: key === null, rows: [...rows.values()].sort((a, b) => (b.p ?? -1) - (a.p ?? -1)) };
}

/**
 * What the joint rules do with the guesses of one place, in order: the limit of each one's coin once those before it were refused, and what
 * these leave of p. As trace/judged.py: core/tree.py's refuse_all over the tokens that the trace holds, which ends, with null, where the
 * others could move a limit by a hundredth; guesses without a law are point masses, which need no other token.
 */
export function refusals(rows, nodes) {
  const sum = (map) => [...map.values()].reduce((total, one) => total + one, 0), points = nodes.every((node) => (node.q ?? null) === null);
  let left = new Map(rows.map((one) => [one.token, one.p ?? 0])), undrawn = 1, sure = true, mass = 1;
  const law = new Map(rows.map((one) => [one.token, one.q ?? 0]));
  let unseen = Math.max(0, 1 - sum(left)) + (points ? 0 : Math.max(0, 1 - sum(law)));
  const limits = nodes.map(({ token }) => {
    if (!sure) return null;
    const draft = (one) => (points ? Number(one === token) : law.get(one) / undrawn), before = new Map([...left].map(([one, p]) => [one, p / mass]));
    const limit = draft(token) ? Math.min(1, before.get(token) / draft(token)) : 0;
    unseen /= mass;
    left = new Map([...before].map(([one, p]) => [one, Math.max(0, p - draft(one))]));
    undrawn = Math.max(1e-300, undrawn - law.get(token));
    law.set(token, 0);
    mass = Math.max(1e-300, sum(left) + (points ? unseen : 0));
    sure = points || unseen <= 0.01 * mass;
    return limit;
  });
  return { limits, left };
}

const fateOf = ({ fate }) => (fate ? h('span', { title: ROLE_NAMES[fate] }, fate) : '–');
const perturbed = (chanceOf, g) => (chanceOf ? Math.log(chanceOf) + g : null);
const best = (rows, name) => rows.reduce((top, one) => (one[name] !== null && (top === null || one[name] > top[name]) ? one : top), null);

function race(trace, request, { rows, greedy, step }) {
  for (const one of rows) { one.target = perturbed(one.p, one.g); one.draft = perturbed(one.q, one.g); }
  const won = best(rows, 'target'), guessed = best(rows, 'draft'), name = (one) => label(trace.piece(one.token, request), 24);
  const heads = ['token', 'guess', 'p (target)', 'q (draft)', ...(greedy ? [] : ['shared noise g', 'log p + g', 'log q + g'])];
  const body = rows.map((one) => [
    h('span', { class: one.token === step.token.token ? 'won' : null }, `${one === won ? '★ ' : ''}${one === guessed ? '◇ ' : ''}${name(one)}`),
    fateOf(one), [bar(one.p ?? 0, 1, 'p'), chance(one.p)], [bar(one.q ?? 0, 1, 'q'), chance(one.q)],
    ...(greedy ? [] : [number(one.g), number(one.target), number(one.draft)]),
  ]);
  const agreed = won && won.token === step.token.token;
  return [
    h('p', null, greedy ? 'Temperature 0: the noise is zero, so the target emits its likeliest token, and the guess stands if it is that token.'
      : 'Rule match: target and drafter add the same noise to their logarithms. The target’s winner (★) is emitted, whatever was guessed; a guess stands if it is that token. ◇ is the drafter’s winner, where its law is known.'),
    table('candidates of this place', heads, body),
    h('p', { class: 'quiet' }, agreed ? 'The noise above is computed here from the seed alone; its winner among these candidates is the token that the engine emitted.'
      : 'The emitted token is none of the winners among the candidates that the trace holds: only the likeliest are kept, and a token outside them can win.'),
  ];
}

function toss(trace, request, record, { rows, step }) {
  const nodes = step.siblings.map((i) => record.nodes[i]), several = nodes.length > 1, name = (token, most = 24) => label(trace.piece(token, request), most);
  if (!nodes.length) return [h('p', null, 'Nothing was guessed at this place: the target’s own draw.')];
  const { limits, left } = refusals(rows, nodes), order = step.node === null ? 0 : step.siblings.indexOf(step.node), node = nodes[order];
  const limit = limits[order], u = node.coin ?? null, points = (node.q ?? null) === null, of = order ? `limit of guess ${order + 1}` : points ? 'p' : 'min(1, p/q)';
  const x = (v) => 20 + 560 * v, side = (v) => (v < 0.2 ? 'start' : v > 0.8 ? 'end' : 'middle');
  const drawing = svg('svg', { class: 'chart fit', viewBox: '0 0 600 70', role: 'img', 'aria-label': `coin ${chance(u)} against ${chance(limit)}` },
    limit === null ? svg('text', { x: x(0.5), y: 62, 'text-anchor': 'middle' }, `${of}: the trace holds too little of p and q`)
      : [svg('rect', { class: 'yes', x: x(0), y: 22, width: x(limit) - x(0), height: 22 }), svg('rect', { class: 'no', x: x(limit), y: 22, width: x(1) - x(limit), height: 22 }),
        svg('text', { x: x(limit), y: 62, 'text-anchor': side(limit) }, `${of} = ${chance(limit)}`)],
    u === null ? null : [svg('line', { class: 'coin', x1: x(u), x2: x(u), y1: 14, y2: 50 }), svg('text', { x: x(u), y: 10, 'text-anchor': side(u) }, `u = ${chance(u)}`)]);
  // what the trace does not tell of q may take some of this away
  const most = Math.max(...left.values()), rest = (one) => (one.p === null ? '–' : [bar(most ? left.get(one.token) / most : 0, 1, atMost(one) ? 'r most' : 'r'), atMost(one) ? '≤ ' : '', chance(left.get(one.token))]);
  const atMost = (one) => !points && one.q === null && left.get(one.token) > 0, refused = limits.filter((one) => one !== null).length;
  const head = several ? `left of p behind ${refused} refused` : 'residual max(0, p − q)';
  const rule = several ? `Several guesses stand at this place; they are judged in order, each against what the refused ones left of p. The coin below is that of guess ${order + 1}, ${name(node.token)}, which ${node.fate === 'accepted' ? 'stood' : 'was refused, as were the others'}.`
    : points ? 'This drafter tells no q: its guess is certain for it (q = 1), and stands if the coin u falls below p. A refused guess is replaced by a draw from p without it.'
      : 'The guess stands if the coin u falls below min(1, p/q): always where p ≥ q, and with probability p/q elsewhere. A refused guess is replaced by a draw from the residual max(0, p − q).';
  return [
    h('p', null, rule), drawing,
    several ? table('guesses of this place, in the order in which they are judged', ['guess', 'token', 'coin u', 'limit', 'fate'], nodes.map((one, i) =>
      [i + 1, name(one.token), chance(one.coin), chance(limits[i]), h('span', { title: ROLE_NAMES[one.fate] }, one.fate)])) : null,
    table('the two distributions and the residual', ['token', 'p (target)', 'q (draft)', head], rows.map((one) =>
      [name(one.token), [bar(one.p ?? 0, 1, 'p'), chance(one.p)], [bar(one.q ?? 0, 1, 'q'), chance(one.q)], rest(one)])),
    h('p', { class: 'quiet' }, `The trace holds the likeliest tokens only; the residual shown is over these.${rows.some(atMost) ? ' Where q is not told, the residual is at most what is hatched.' : ''}`),
  ];
}

/** Rule block: every prefix of the guess has a coin; its limits need whole laws, which no trace holds. */
function prefixes(trace, request, record, { rows, step }) {
  const name = (token) => label(trace.piece(token, request), 24), stood = record.nodes.filter((node) => node.fate === 'accepted').length;
  return [
    h('p', null, `Rule block judges the whole guess at once: the longest prefix whose coin u falls below its own limit stands, whatever happened to shorter ones. The limit follows from p and q of all its tokens and of the place behind it, so no coin here is to be held against p/q of one token. Here ${stood} of ${record.nodes.length} stood${stood < record.nodes.length ? ', and a draw from what they left of p replaced the next' : ''}.`),
    table('the coins of this round', ['tokens of the prefix', 'its last token', 'coin u', 'fate'], record.nodes.map((node, i) => [i + 1, name(node.token), chance(node.coin), h('span', { title: ROLE_NAMES[node.fate] }, node.fate)])),
    laws(trace, request, rows, step),
  ];
}

/** As core/typical.py: a likelier token always stands; the flatter the law, the lower the limit. */
const EPSILON = 0.09, DELTA = 0.3;

function lossy(trace, request, record, found) {
  const { step, rows } = found, guesses = step.siblings.map((i) => record.nodes[i]), name = (token) => label(trace.piece(token, request), 24);
  const rule = `Rule lossy-typical: a guess stands if the target finds it typical, which is where p lies above min(${EPSILON}, ${DELTA} · exp(−H)); H is the entropy of p. So p above ${EPSILON} always stands; a limit below that needs all of p, which no trace holds. The text is not the target’s own: LOSSY.`;
  if (step.node !== null) {
    const node = record.nodes[step.node];
    return [h('p', null, `${rule} Here ${name(node.token)} stood, with p = ${chance(node.p)}, whether or not the target would have chosen it.`), laws(trace, request, rows, step)];
  }
  const fell = guesses.length ? `Here ${guesses.map((node) => `${name(node.token)} (p = ${chance(node.p)})`).join(', ')} did not stand` : 'Nothing was guessed at this place';
  return [h('p', null, `${rule} ${fell}; the target’s own choice follows.`), ...race(trace, request, found).slice(1)];
}

/** p and q of the candidates; ★ was emitted. */
const laws = (trace, request, rows, step) => table('candidates of this place', ['token', 'guess', 'p (target)', 'q (draft)'], rows.map((one) =>
  [h('span', { class: one.token === step.token.token ? 'won' : null }, `${one.token === step.token.token ? '★ ' : ''}${label(trace.piece(one.token, request), 24)}`),
    fateOf(one), [bar(one.p ?? 0, 1, 'p'), chance(one.p)], [bar(one.q ?? 0, 1, 'q'), chance(one.q)]]));

/** Why a token has no probabilities. */
function untold({ header: { machine }, withheld }) {
  if (withheld) return 'This request is of another key: its figures are shown, and nothing of its text.';
  if (machine.imported) return `This trace was imported from ${label(String(machine.imported))}, which tells no probabilities.`;
  return 'This trace was written at level summary: it has no probabilities. Write one with --trace-level full to see how each token was judged.';
}

export const verificationView = {
  id: 'verification', title: 'Verification',
  draw(ctx) {
    const place = h('div'), paint = ({ trace, request, cursor, token, link }) => {
      const ordinal = Math.max(0, cursor - 1), i = request.rounds[ordinal];
      if (i === undefined) return place.replaceChildren(h('p', null, roundless(request)));
      const record = trace.record(i), j = Math.min(token, record.tokens.length - 1);
      if (j < 0) return place.replaceChildren(h('p', null, 'This round emitted nothing.'));
      const picks = record.tokens.map((one, k) => h('a', { class: `pick tok ${one.role}`, href: link('verification', { round: ordinal, token: k }), 'aria-current': k === j ? 'true' : null }, label(trace.piece(one.token, request), 16)));
      const one = record.tokens[j], explain = { ratio: toss, block: prefixes, 'lossy-typical': lossy }[request.rule];
      const parts = [h('p', { 'aria-live': 'polite' }, `Round ${record.round}, token ${j + 1} of ${record.tokens.length}: ${one.role}. Rule ${label(request.rule)}.`), h('nav', { class: 'bar', 'aria-label': 'tokens of the round' }, picks)];
      if (one.p === undefined) parts.push(h('p', { class: 'notice' }, untold(request)));
      else if (explain) parts.push(...explain(trace, request, record, candidates(trace, request, record, j)));
      else parts.push(...race(trace, request, candidates(trace, request, record, j)));
      const next = (step) => button(step < 0 ? '← token' : 'token →', () => ctx.go('verification', { round: ordinal, token: Math.max(0, j + step) }), { disabled: j + step < 0 || j + step >= record.tokens.length });
      return place.replaceChildren(...parts.filter(Boolean), h('div', { class: 'bar' }, next(-1), next(1)));
    };
    paint(ctx);
    this.follow = paint;
    return [panel('How a token was judged', place)];
  },
};
