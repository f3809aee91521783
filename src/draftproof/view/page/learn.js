// An explainer built of the page's own parts, on a bundled trace of the demo models.

import { expectedTokens } from './budget.js';
import { chance, counted, h, integer, label, number, panel, percent, seconds, slider, svg, table } from './dom.js';
import { payoff } from './pays.js';
import { plainOf } from './speed.js';
import { drawTree } from './tree.js';
import { roundWords } from './words.js';

const SYMBOLS = [
  ['acceptance (one guess)', 'hazard[i]: accepted at i of those that reached i', 'α (often i.i.d.), β for one place', 'vLLM: per-position acceptance counts from the first guess on, so it is the survival, not the hazard'],
  ['acceptance rate', 'draft_utilisation = accepted / drafted', 'acceptance rate', 'vLLM: accepted / drafted; llama.cpp: accepted / drafted, in its logs at times accepted / judged; it falls with the depth, so compare it at one depth only'],
  ['tokens per round', 'acceptance_length, all rounds; acceptance_length_drafted, rounds with a guess', 'τ (EAGLE, Medusa), E, block efficiency', 'vLLM “mean acceptance length” = accepted / drafts + 1; TensorRT-LLM and SGLang: “accept length”, the target’s own token included'],
  ['depth', 'depth, granted per round', 'γ (Leviathan), K (Chen), num_speculative_tokens, draft_n_max', 'all engines: guesses per round in a chain; in a tree “nodes” are counted apart'],
  ['cost of a guess', 'c, in plain passes', 'c', 'not printed by the engines'],
  ['speed-up', 'E / (γc + v + o)', 'walltime improvement', 'the ratio of tokens per second, same prompts and seeds'],
  ['overlap of the laws', 'Σ min(p, q) = 1 − TV', 'α of rule ratio, β', 'the most that one guess can be accepted'],
  ['match acceptance', 'Σ 1 / Σ max(p_y/p_x, q_y/q_x)', 'Daliri et al.', 'what shared noise reaches, at least (1 − TV)/(1 + TV)'],
  ['temperature of the training', '–', 'μ, τ in some papers', 'not a metric; beware of the same letter'],
];

function loop(trace, request) {
  const ordinal = request.rounds.findIndex((i) => trace.accepted.at(i) > 0 && trace.rejected.at(i) > 0), place = h('div'), last = request.rounds.length - 1;
  const start = Math.max(0, ordinal), one = plainOf(trace, request).seconds;
  const paint = (n) => {
    const i = request.rounds[n], record = trace.record(i), words = roundWords(trace, request, record) ?? [record.text];
    place.replaceChildren(h('ol', { class: 'steps' },
      h('li', null, h('b', null, 'Draft. '), `A cheap guesser offers ${counted(record.nodes.length, 'token')}: `, record.nodes.slice(0, 16).map((node) => h('span', { class: `cell ${node.fate}` }, label(trace.piece(node.token, request), 12)))),
      h('li', null, h('b', null, 'Score. '), `The target reads them all in one pass, ${seconds(record.times.score_s)}. One token a pass takes about ${seconds(one)} each, ${seconds(one * (record.nodes.length + 1))} for as many.`),
      h('li', null, h('b', null, 'Verify. '), `At every place the target chooses its own token. Of the guesses ${trace.accepted.at(i)} were that token; the first that is not is rejected, and what stands behind it is discarded.`),
      h('li', null, h('b', null, 'Commit. '), 'The text grows by ', record.tokens.map((token, j) => h('span', { class: `tok ${token.role}` }, label(words[j] || '·', 16))), `: ${counted(record.tokens.length, 'token')} for one pass.`)));
  };
  paint(start);
  return [slider('round', { min: 0, max: Math.max(0, last), step: 1, value: start, show: integer }, paint), place];
}

/** Two laws over four tokens and one draw of noise: the race that makes guesser and target agree. */
function contest() {
  const p = [0.55, 0.25, 0.15, 0.05], place = h('div'), names = ['the', 'a', 'this', 'one'];
  let skew = 0.3, toss = 1;
  const paint = () => {
    const q = p.map((value, i) => (1 - skew) * value + skew * p[p.length - 1 - i]), g = p.map((_, i) => {
      const u = (Math.imul(toss * 7919 + i * 104729, 2654435761) >>> 8) / 2 ** 24 + 2 ** -26;
      return -Math.log(-Math.log(u));
    });
    const value = (law) => law.map((one, i) => Math.log(one) + g[i]), top = (list) => list.indexOf(Math.max(...list));
    const yes = top(value(p)), guess = top(value(q)), overlap = p.reduce((sum, one, i) => sum + Math.min(one, q[i]), 0);
    const match = p.reduce((sum, px, x) => sum + 1 / p.reduce((all, py, y) => all + Math.max(py / px, q[y] / q[x]), 0), 0);
    place.replaceChildren(table('one place in the text', ['token', 'p (target)', 'q (draft)', 'shared noise g', 'log p + g', 'log q + g'], p.map((one, i) =>
      [`${i === yes ? '★ ' : ''}${i === guess ? '◇ ' : ''}${names[i]}`, chance(one), chance(q[i]), number(g[i]), number(value(p)[i]), number(value(q)[i])])),
    h('p', { 'aria-live': 'polite' }, `The target emits “${names[yes]}” (★) whatever was guessed; the guess is “${names[guess]}” (◇): ${yes === guess ? 'accepted' : 'rejected'}. Over many draws it is accepted ${percent(match)} of the time; no single guess can exceed ${percent(overlap)}.`));
  };
  paint();
  return [h('div', { class: 'sliders' }, slider('how much the drafter disagrees', { min: 0, max: 1, step: 0.05, value: skew, show: percent }, (v) => { skew = v; paint(); }),
    slider('draw of the noise', { min: 1, max: 60, step: 1, value: 1, show: integer }, (v) => { toss = v; paint(); })), place];
}

function growth() {
  const place = h('p', { class: 'verdict', 'aria-live': 'polite' }), drawing = h('div'), now = { alpha: 0.7, depth: 4 };
  const paint = () => {
    const tokens = expectedTokens(Array(now.depth).fill(now.alpha));
    place.textContent = `${number(tokens)} tokens per pass on average, of at most ${now.depth + 1}.`;
    drawing.replaceChildren(svg('svg', { class: 'chart fit', viewBox: '0 0 560 52', role: 'img', 'aria-label': 'chance that each guess is reached and stands' },
      Array.from({ length: now.depth + 1 }, (_, i) => [svg('rect', { class: 'bar', x: i * 43, y: 34 - 30 * now.alpha ** i, width: 38, height: 30 * now.alpha ** i }), svg('text', { x: i * 43 + 19, y: 48, 'text-anchor': 'middle', class: 'small' }, `${Math.round(100 * now.alpha ** i)} %`)])));
  };
  paint();
  return [h('div', { class: 'sliders' }, slider('acceptance of each guess', { min: 0, max: 1, step: 0.01, value: now.alpha, show: percent }, (v) => { now.alpha = v; paint(); }),
    slider('depth', { min: 0, max: 12, step: 1, value: now.depth, show: integer }, (v) => { now.depth = v; paint(); })), drawing, place];
}

export function learnPage(trace) {
  const request = trace.requests.find((one) => one.tally.drafted) ?? trace.requests[0];
  const branching = trace.requests.flatMap((one) => one.rounds).find((i) => trace.drafted.at(i) > 3 && trace.accepted.at(i) > 1 && trace.record(i).nodes.some((node, k) => node.parent !== k - 1));
  return [
    panel('Guessing ahead, in four steps', h('p', null, 'A language model reads its whole memory for every token, and could judge several tokens in that time. So something cheap guesses what comes next, and the model judges all guesses in one pass. This is a real run of the demo models; choose a round.'), loop(trace, request)),
    panel('The rule: the target’s word is the text', h('p', null, 'At temperature 0 a guess stands if it is the target’s likeliest token. Above it, both add the same random noise to their logarithms, and each takes its own best. The text is the target’s choice every time: a bad guesser costs time, never a token. (It is not “accepted if p is at least q”.)'), contest()),
    panel('Trees: several guesses for one place', h('p', null, 'A guesser may offer more than one candidate at a place. The target walks down the branch that agrees with its own choices; the others are pruned.'),
      branching === undefined ? h('p', null, 'The bundled trace has no tree.') : h('div', { class: 'scroll', tabindex: '0', role: 'region', 'aria-label': 'a tree of the demo' }, drawTree(trace, trace.requests[trace.request.at(branching)], trace.record(branching)))),
    panel('How much a guess is worth', h('p', null, 'The k-th guess counts only if all before it stood, so its worth falls as α^k.'), growth()),
    panel('When it helps and when it hurts', h('p', null, 'Guesses cost time too. Drag the cost of a guess, or the batch, and see where the curve falls below the line.'), payoff({ alpha: 0.75, c: 0.08, row: 0.03, o: 0.02 }, [], [])),
    panel('The field’s symbols', table('the same thing under other names', ['what', 'here', 'in papers', 'as engines count it'], SYMBOLS)),
  ];
}
