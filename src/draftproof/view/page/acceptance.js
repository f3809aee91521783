// What was accepted: by position with intervals, by class of prompts and drafter, and how long the accepted runs were.

import { choice, counted, h, integer, number, panel, percent, svg, table } from './dom.js';
import { Tally, median, wilson } from './tally.js';
import { requestMetrics } from './trace.js';

/** Bars with intervals: values [{name, value, low, high}] in 0 … most. */
export function bars(title, values, most = 1, show = percent) {
  const width = Math.max(240, 48 + values.length * 56), height = 190, y = (v) => 150 - 130 * Math.min(1, v / most);
  return svg('svg', { class: 'chart', width, height, viewBox: `0 0 ${width} ${height}`, role: 'img', 'aria-label': `${title}: ${values.map((v) => `${v.name} ${show(v.value)}`).join(', ')}` },
    [0, 0.5, 1].map((part) => [svg('line', { class: 'grid', x1: 44, x2: width, y1: y(part * most), y2: y(part * most) }), svg('text', { x: 40, y: y(part * most) + 4, 'text-anchor': 'end' }, most === 1 ? `${100 * part}%` : integer(part * most))]),
    values.map((v, i) => {
      const x = 52 + i * 56, has = v.low !== undefined;
      return svg('g', null, svg('rect', { class: 'bar', x, y: y(v.value), width: 36, height: 150 - y(v.value) }),
        has ? svg('path', { class: 'whisker', d: `M${x + 18} ${y(v.low)}V${y(v.high)}M${x + 12} ${y(v.low)}h12M${x + 12} ${y(v.high)}h12` }) : null,
        svg('text', { x: x + 18, y: 168, 'text-anchor': 'middle' }, v.name), svg('text', { x: x + 18, y: 184, 'text-anchor': 'middle', class: 'small' }, show(v.value)));
    }));
}

export const acceptanceView = {
  id: 'acceptance', title: 'Acceptance',
  draw(ctx) {
    const { trace, request, state } = ctx, scope = ['drafter', 'all'].includes(state.scope) ? state.scope : 'request';
    const chosen = scope === 'request' ? [request] : scope === 'drafter' ? trace.requests.filter((one) => one.drafter === request.drafter) : trace.requests;
    const tally = chosen.reduce((sum, one) => sum.add(one.tally), new Tally());
    const hazard = tally.reached.map((reached, i) => {
      const [low, high] = wilson(tally.passed[i], reached);
      return { name: String(i + 1), value: tally.passed[i] / reached, low, high };
    });
    const nothing = tally.drafted ? 'The trace tells how many guesses stood, and not of which rounds.' : 'Nothing was guessed.';
    const lengths = Array.from(tally.lengths, (count, i) => ({ name: String(i), value: count ?? 0 }));
    const groups = new Map();
    for (const one of trace.requests) {
      const key = JSON.stringify([one.promptClass, one.drafter]);
      groups.set(key, [...(groups.get(key) ?? []), one]);
    }
    const rows = [...groups.entries()].sort(([a], [b]) => (a < b ? -1 : 1)).map(([key, group]) => {
      const [name, drafter] = JSON.parse(key), sum = group.reduce((all, one) => all.add(one.tally), new Tally()), its = sum.metrics();
      const [low, high] = wilson(sum.accepted, sum.drafted);
      return [name || 'no class', drafter, integer(group.length), integer(its.drafted), integer(its.accepted),
        sum.drafted ? `${percent(its.draft_utilisation)} (${percent(low)}–${percent(high)})` : '–', number(its.acceptance_length), number(median(group.map((one) => requestMetrics(one).tokens_per_s)), 1)];
    });
    const pick = choice('rounds of', [['request', 'this request'], ['drafter', `all requests of drafter ${request.drafter}`], ['all', 'the whole trace']], scope, (value) => ctx.go('acceptance', { of: value }));
    return [
      panel('Acceptance by position', h('div', { class: 'bar' }, h('label', null, 'Rounds of ', pick)),
        hazard.length ? h('div', { class: 'scroll', tabindex: '0', role: 'region', 'aria-label': 'acceptance by position' }, bars('accepted at each position, of the rounds that reached it', hazard)) : h('p', null, nothing),
        h('p', { class: 'quiet' }, 'P(the guess at this position is accepted | the walk reached it), with Wilson’s 95 % interval.')),
      panel('How many guesses stood', lengths.length ? h('div', { class: 'scroll', tabindex: '0', role: 'region', 'aria-label': 'histogram' }, bars('rounds by number of accepted guesses', lengths, 2 * Math.ceil(Math.max(1, ...lengths.map((one) => one.value)) / 2), integer)) : h('p', null, nothing),
        h('p', { class: 'quiet' }, `${counted(tally.roundsDrafted, 'round')} with a guess, by the number of guesses accepted.`)),
      panel('By class of prompts and drafter', table('acceptance by class and drafter', ['class', 'drafter', 'requests', 'guessed', 'accepted', 'of all guesses (95 %)', 'tokens per round', 'tokens/s (median)'], rows)),
    ];
  },
};
