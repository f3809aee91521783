// Is it on, does it help, is the text the same: the verdict in words, then every number.

import { chance, h, integer, label, number, panel, percent, seconds, table } from './dom.js';
import { median, resampled } from './tally.js';
import { around, pairs, requestMetrics, requestName, tokenIds } from './trace.js';

const FORMS = {
  acceptance_length: number, acceptance_length_drafted: number, draft_utilisation: percent, tokens_per_s: (v) => number(v, 1),
  ttft_s: seconds, tpot_s: seconds, draft_s: seconds, score_s: seconds, verify_s: seconds, other_s: seconds,
  depth: (value) => label(String(value)), seed: (text) => label(text),
  hazard: (list) => (list.length ? list.map(chance).join(' · ') : '–'),
};
const MEANING = {
  rounds: 'passes of the target after the prompt', target_passes: 'rounds and prefill passes', drafted: 'tokens guessed (in a tree: nodes)',
  accepted: 'guesses that became text', acceptance_length: 'tokens per round, rounds without a guess included',
  acceptance_length_drafted: 'tokens per round that had a guess', draft_utilisation: 'accepted of all guessed',
  hazard: 'accepted at position i, of the rounds that got there', passes_saved: 'tokens beyond one per target pass',
  draft_bytes: 'weights of the drafter, bytes', kv_tokens_lost: 'tokens of cache that they displace', tokens_per_s: 'from submission to the last token',
  ttft_s: 'time to the first token', tpot_s: 'time per token after the first', draft_s: 'guessing', score_s: 'the target reading the guesses',
  verify_s: 'judging', other_s: 'everything else in the rounds',
};

/** A number that scripts and tests read: its name and its exact value, as JSON has it, stand in the element. */
export const metric = (name, value, exact = JSON.stringify(value ?? null)) => h('span', { data: { metric: name, value: exact } }, (FORMS[name] ?? integer)(value));

/** The depth that was asked for, as `generate --json` says it. */
const depthOf = ({ drafter, depth }) => (drafter === 'none' ? 0 : /^[0-9]+$/.test(depth) ? Number(depth) : depth);

export function sameTokens(trace, { off, on }) {
  const a = tokenIds(trace, off), b = tokenIds(trace, on);
  return a.length === b.length && a.every((token, i) => token === b[i]);
}

/** Speed against plain decoding: measured where the trace has the same request without guesses, else estimated from its passes. */
export function speedOf(trace, request) {
  const measured = pairs(trace).filter((pair) => pair.on.drafter === request.drafter);
  const ratio = ({ off, on }) => requestMetrics(on).tokens_per_s / requestMetrics(off).tokens_per_s;
  const own = measured.find((pair) => pair.on === request);
  if (measured.length) return { kind: 'measured', own: own ? ratio(own) : null, pair: own ?? null, ...resampled(measured.map(ratio)), count: measured.length };
  const plain = plainPass(trace, request), spent = requestMetrics(request);
  const busy = spent.draft_s + spent.score_s + spent.verify_s + spent.other_s;
  return { kind: 'estimated', own: plain && busy ? plain * request.tally.emitted / busy : null, pair: null, count: 0 };
}

/** Seconds of a plain pass: the median of this request's rounds without a guess, else its quickest scoring pass; null without times. */
export function plainPass(trace, request) {
  const bare = request.rounds.filter((i) => trace.drafted.at(i) === 0).slice(0, 2000).map((i) => trace.score.at(i));
  if (bare.length > 2) return median(bare) || null;
  const all = request.rounds.slice(0, 2000).map((i) => trace.score.at(i)).sort((a, b) => a - b);
  return all.length ? all[Math.floor(all.length / 20)] || null : null;
}

export function verdict(trace, request, speed) {
  const tally = request.tally;
  if (!tally.rounds && !request.totals) return 'No round has run yet.';
  if (!tally.drafted) return 'Speculation is off for this text: every token was one pass of the target.';
  const gain = speed.own ?? speed.median, how = speed.kind === 'measured' ? '' : ', estimated from its own passes';
  const kept = `${percent(tally.accepted / tally.drafted)} of the guesses stood`;
  if (gain === null || gain === undefined) return `Speculation is on; ${kept}.`;
  if (gain > 1.02) return `Speculation is on and pays: ${number(gain)} times the speed of plain decoding${how}; ${kept}.`;
  if (gain < 0.98) return `Speculation is on and costs time: ${number(gain)} times the speed of plain decoding${how}; ${kept}.`;
  return `Speculation is on and changes little: ${number(gain)} times the speed of plain decoding${how}; ${kept}.`;
}

function identical(trace, speed, request) {
  if (request.rule.startsWith('lossy')) return 'no: the rule is lossy';
  if (speed.pair) return sameTokens(trace, speed.pair) ? `yes: all ${request.tokens} tokens equal those of the run without guesses` : 'NO: the run without guesses wrote other tokens';
  if (!request.tally.drafted) return 'it is plain decoding itself';
  return request.rule === 'match' ? 'by rule match; this trace has no run without guesses to compare with' : `the distribution is kept (rule ${request.rule}), not the text`;
}

export const statusView = {
  id: 'status', title: 'Status',
  draw({ trace, request, link }) {
    const speed = speedOf(trace, request), metrics = requestMetrics(request), last = request.rounds.at(-1);
    const record = last === undefined ? null : trace.record(last), machine = request.header.machine;
    const interval = speed.low ? ` (95 % over ${speed.count} pairs: ${number(speed.low)}–${number(speed.high)}×)` : '';
    const facts = [
      ['speculation', request.tally.drafted ? `on: drafter ${label(request.drafter)}, rule ${label(request.rule)}` : 'off'],
      ['why', record ? [record.reason, record.draft_reason].filter(Boolean).map((text) => label(text, 200)).join('; ') || '–' : '–'],
      ['depth now', record ? `${record.depth}, in the last round` : '–'], ['depth asked for', metric('depth', depthOf(request.header))],
      ['speed-up', speed.kind === 'measured' ? `${number(speed.own ?? speed.median)}× measured; all: ${number(speed.median)}×${interval}` : `${number(speed.own)}× estimated`],
      ['identical to plain decoding', identical(trace, speed, request)],
      ['invisible to the bit', label(String(machine.invisible ?? 'the trace does not say'), 300)],
      ['ended', request.done ? label(request.done.finish) + (request.done.error ? `: ${label(String(request.done.error), 300)}` : '') : 'still running, or cut off'],
      ...(request.broken ? [['note', `some of its rounds did not reach this page; the numbers are ${request.done ? 'what the engine said at its end' : 'of those that did'}`]] : []),
      ...(request.withheld ? [['note', 'of another key: its figures are shown, and nothing of its text']] : []),
      ['target', label(request.header.target, 120)],
      ['machine', ['device', 'dtype', 'threads', 'tier', 'torch'].filter((key) => machine[key] !== undefined).map((key) => `${key} ${label(String(machine[key]))}`).join(', ')],
      ['prompt', h('span', null, metric('prompt_tokens', request.promptTokens), ` tokens, ${request.cached} of them cached`)], ['seed', machine.seed === undefined ? metric('seed', request.seed, request.seed) : label(String(machine.seed))],
      ['completion', h('span', null, metric('completion_tokens', request.totals ? request.tokens : request.tally.completionTokens), ' tokens')],
    ];
    return [
      panel('Verdict', h('p', { class: 'verdict' }, verdict(trace, request, speed)),
        h('dl', { class: 'facts' }, facts.map(([name, value]) => [h('dt', null, name), h('dd', null, value)]))),
      panel('Numbers of this request', table('metrics, as generate --json prints them', ['name', 'value', 'meaning'],
        Object.keys(metrics).map((name) => [h('code', null, name), metric(name, metrics[name]), MEANING[name] ?? '']))),
      panel('Requests of this trace', trace.requests.length > 200 ? h('p', null, `200 of ${trace.requests.length}, with the one in sight among them.`) : null,
        table('requests', ['request', 'rounds', 'tokens per round', 'tokens/s'], around(trace.requests, request.index, 200).map((one) => {
          const its = requestMetrics(one);
          return [h('a', { href: link('status', { r: one.index, round: 0 }), 'aria-current': one === request ? 'true' : null }, label(requestName(one), 120)),
            integer(its.rounds), number(its.acceptance_length), number(its.tokens_per_s, 1)];
        }))),
    ];
  },
};
