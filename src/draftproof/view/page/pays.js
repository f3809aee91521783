// Does it pay, and how deep: predicted and measured speed against depth.

import { breakEven, expectedTokens, scoreCost, speedup } from './budget.js';
import { h, integer, number, panel, percent, slider, svg, table } from './dom.js';
import { lasted, plainOf, plainly, spentOf } from './speed.js';

/** A line chart: series [{name, points: [[x, y]], kind}], with a line at y = 1. */
export function lines(title, series, { most, wide, across }) {
  const width = 560, height = 260, x = (v) => 44 + 500 * v / wide, y = (v) => 220 - 190 * Math.min(1, v / most);
  const step = 2 ** Math.max(0, Math.ceil(Math.log2((wide + 1) / 16)));      // at most 16 numbers
  const marks = (most > 8 ? [1, 4, 8, 12, 16, 20] : most > 3 ? [0, 1, 2, 3, 4, 5, 6, 7, 8] : [0, 0.5, 1, 1.5, 2, 2.5, 3]).filter((v) => v <= most);
  return svg('svg', { class: 'chart', width, height, viewBox: `0 0 ${width} ${height}`, role: 'img', 'aria-label': title },
    marks.map((v) => [svg('line', { class: v === 1 ? 'even' : 'grid', x1: 44, x2: 544, y1: y(v), y2: y(v) }), svg('text', { x: 38, y: y(v) + 4, 'text-anchor': 'end' }, `${v}×`)]),
    Array.from({ length: wide + 1 }, (_, v) => (v % step === 0 ? svg('text', { x: x(v), y: 238, 'text-anchor': 'middle' }, v) : null)),
    svg('text', { x: 294, y: 256, 'text-anchor': 'middle' }, across),
    series.map(({ points, kind, name }) => (kind === 'dots'
      ? points.map(([a, b]) => svg('circle', { class: 'dot', cx: x(a), cy: y(b), r: 5 }, svg('title', null, `${name}: depth ${a}, ${number(b)}×`)))
      : svg('path', { class: `curve ${kind}`, d: points.map(([a, b], i) => `${i ? 'L' : 'M'}${x(a)} ${y(b)}`).join('') }))));
}

/** What the trace measured, as trace/figures.py: per granted depth the rounds, tokens, and speed against plain decoding; and the costs in plain
 *  passes: of a level of guesses (a chain's level is one guess) and of scoring it. */
export function measured(trace, request) {
  const base = plainOf(trace, request), depths = new Map(), drafted = base ? request.rounds.filter((i) => trace.drafted.at(i)) : [];
  const sum = (of) => drafted.reduce((all, i) => all + of(i), 0), all = (name) => sum((i) => trace[name].at(i));
  const plain = sum((i) => plainly(trace, base, i)) / all('emitted'), levels = all('levels');
  if (!plain || !levels) return { points: [], cost: null, c: 0.1, row: 0.02, o: 0 };
  const bare = spentOf(trace, request, (i) => trace.drafted.at(i) === 0 && trace.score.at(i) > 0), single = bare.rounds > 2 ? bare.score / bare.rounds : plain;
  for (const i of drafted) {
    const depth = trace.depth.at(i), one = depths.get(depth) ?? { rounds: 0, plain: 0, seconds: 0 };
    depths.set(depth, one);
    one.rounds += 1;
    one.plain += plainly(trace, base, i);
    one.seconds += lasted(trace, i);
  }
  const cost = all('draft') / levels / plain, row = (all('score') - single * drafted.length) / levels / plain;
  const points = [...depths].filter(([, one]) => one.rounds >= 2 && one.seconds > 0).map(([depth, one]) => [depth, one.plain / one.seconds, one.rounds]);
  return { points: points.sort((a, b) => a[0] - b[0]), cost, c: Math.min(1, cost), row: Math.max(0, Math.min(1, row)), o: Math.min(1, (all('verify') + all('other')) / drafted.length / plain) };
}

/** The chart with its sliders, also used by the explainer. */
export function payoff(start, hazards, points) {
  const now = { alpha: start.alpha, c: start.c, row: start.row, batch: 1 }, place = h('div', { class: 'scroll', tabindex: '0', role: 'region', 'aria-label': 'speed-up against depth' }), words = h('p', { class: 'verdict', 'aria-live': 'polite' });
  const even = h('div'), wide = Math.max(8, ...points.map(([depth]) => depth), hazards.length);
  const paint = () => {
    const cost = (depth) => scoreCost(depth, now.batch, now.row), curve = [], measuredHazards = [];
    for (let depth = 0; depth <= wide; depth++) {
      const o = depth ? start.o : 0;
      curve.push([depth, speedup(expectedTokens(Array(depth).fill(now.alpha)), depth, now.c, cost(depth), o)]);
      if (depth <= hazards.length) measuredHazards.push([depth, speedup(expectedTokens(hazards.slice(0, depth)), depth, now.c, cost(depth), o)]);
    }
    const top = curve.reduce((a, b) => (b[1] > a[1] ? b : a)), most = Math.max(1.5, ...[...curve, ...measuredHazards, ...points].map(([, v]) => v)) * 1.08;
    place.replaceChildren(lines('predicted and measured speed-up against depth; the line at 1 is plain decoding', [
      { name: 'predicted', kind: 'predicted', points: curve }, { name: 'predicted with the measured acceptance', kind: 'hazards', points: measuredHazards.length > 1 ? measuredHazards : [] },
      { name: 'measured', kind: 'dots', points }], { most, wide, across: 'depth: tokens guessed per round' }));
    words.textContent = top[0] === 0 ? 'At this acceptance and these costs guessing does not pay at any depth.' : `Best depth ${top[0]}: ${number(top[1])} times the speed of plain decoding.`;
    even.replaceChildren(table('break-even', ['depth', 'tokens per round', 'predicted speed-up', 'acceptance needed to lose nothing'], curve.slice(1, 9).map(([depth, gain]) => {
      const need = breakEven(depth, now.c, cost(depth), start.o);
      return [depth, number(expectedTokens(Array(depth).fill(now.alpha))), `${number(gain)}×`, need === null ? 'none is enough' : percent(need)];
    })));
  };
  const set = (name) => (value) => { now[name] = value; paint(); };
  const sliders = h('div', { class: 'sliders' },
    slider('acceptance α of each guess', { min: 0, max: 0.99, step: 0.01, value: now.alpha, show: percent }, set('alpha')),
    slider('cost c of a guess, in plain passes', { min: 0, max: 1, step: 0.005, value: now.c, show: (v) => number(v, 3) }, set('c')),
    slider('cost of scoring one row more, in plain passes', { min: 0, max: 1, step: 0.005, value: now.row, show: (v) => number(v, 3) }, set('row')),
    slider('batch: texts at once', { min: 1, max: 64, step: 1, value: 1, show: integer }, set('batch')));
  paint();
  return [sliders, words, place, h('ul', { class: 'legend' }, h('li', null, h('span', { class: 'key predicted' }), 'predicted, every position α'), hazards.length ? h('li', null, h('span', { class: 'key hazards' }), 'predicted, measured acceptance') : null,
    points.length ? h('li', null, h('span', { class: 'key dots' }), 'measured rounds of that depth') : null, h('li', null, h('span', { class: 'key even' }), 'break-even: plain decoding')), even];
}

export const paysView = {
  id: 'pays', title: 'Pays?', still: true,
  draw({ trace, request }) {
    const found = measured(trace, request), tally = request.tally, judged = tally.reached.reduce((a, b) => a + b, 0);
    const trees = request.rounds.some((i) => trace.drafted.at(i) > trace.levels.at(i));
    const alpha = judged ? tally.accepted / judged : 0.7;
    const costs = found.cost === null ? '; the costs are an example, as its times do not tell them' : `, a guess costs ${number(found.cost, 3)} plain passes${trees ? ', counted by levels of the trees' : ''}`;
    return [panel('Does it pay, and how deep?', h('p', null, judged ? `The sliders begin with what this request measured: acceptance ${percent(alpha)}${costs}.` : 'Nothing was guessed here; the sliders begin with an example.'),
      payoff({ ...found, alpha: Math.min(0.99, alpha) }, tally.hazard, found.points),
      h('p', { class: 'quiet' }, 'S = E / (γc + v + o) with E = 1 + Σ α^k tokens per round at depth γ (Leviathan et al., arXiv 2211.17192); v grows with the rows of a pass, and so with the batch: that is why guessing pays least on a busy server.'))];
  },
};
