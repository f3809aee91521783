// Two requests, of one trace or of two, number by number.

import { choice, counted, h, label, number, panel, table } from './dom.js';
import { requestMetrics, requestName, tokenIds } from './trace.js';

const wanted = { rounds: -1, target_passes: -1, tokens_per_s: 1, ttft_s: -1, tpot_s: -1, acceptance_length: 1, acceptance_length_drafted: 1, draft_utilisation: 1, passes_saved: 1 };
const TOTALS = new Set(['rounds', 'target_passes', 'passes_saved']);
const written = (value) => (Array.isArray(value) ? value.map((one) => number(one)).join(' · ') || '–' : typeof value === 'number' ? (Number.isInteger(value) ? String(value) : value.toPrecision(5)) : '–');

/** `alike`: both texts have as many tokens, or what grows with a text would blame the longer one. */
function verdictOf(name, a, b, alike) {
  if (typeof a !== 'number' || typeof b !== 'number') return '–';
  const good = alike || !TOTALS.has(name) ? (wanted[name] ?? 0) * Math.sign(b - a) : 0;
  return `${a > 0 && b >= 0 ? number(b / a, 3) : '–'}${good > 0 ? ' ▲ better' : good < 0 ? ' ▼ worse' : ''}`;
}

export const compareView = {
  id: 'compare', title: 'Compare', still: true,
  draw(ctx) {
    const { trace, request, state } = ctx, second = state.second ?? trace;
    const other = second.requests[state.other ?? 0] ?? second.requests[0];
    const file = h('input', { type: 'file', accept: '.jsonl,.json,.gz', id: 'second-file', 'aria-label': 'second trace' });
    file.addEventListener('change', async () => {
      if (!file.files.length) return;
      try { state.second = await ctx.load(file.files[0]); state.other = 0; ctx.redraw(); } catch (error) { ctx.complain(error.message); }
    });
    const pick = choice('request to compare with', second.requests.slice(0, 2000).map((one, i) => [i, label(requestName(one), 80)]), other.index, (value) => ctx.go('compare', { b: value }));
    const a = requestMetrics(request), b = requestMetrics(other), mine = tokenIds(trace, request), theirs = tokenIds(second, other);
    const unknown = [[request, mine], [other, theirs]].some(([one, ids]) => ids.includes(one.header.machine.unknown_token));
    const equal = mine.length === theirs.length && mine.every((token, i) => token === theirs[i]), differs = mine.findIndex((token, i) => token !== theirs[i]);
    return [panel('Compare', h('div', { class: 'bar' }, h('span', null, `A: ${label(requestName(request), 80)}`), h('label', null, 'B: ', pick), h('label', { class: 'file' }, 'B from another trace: ', file)),
      h('p', { class: 'verdict' }, unknown || request.totals || other.totals ? 'Whether the texts are equal cannot be said: an imported trace does not name all of its tokens.' : equal ? `The two texts are equal, token by token (${counted(mine.length, 'token')}).` : `The two texts differ${differs >= 0 ? ` from token ${differs + 1} on` : ' in length'}; they may answer different prompts.`),
      table(`A is ${trace.name}, B is ${second.name}`, ['metric', 'A', 'B', 'B / A'], Object.keys(a).map((name) => [h('code', null, name), written(a[name]), written(b[name]), verdictOf(name, a[name], b[name], request.tokens === other.tokens)])))];
  },
};
