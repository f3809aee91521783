// Is it on, does it help, is the text the same: the verdict in words, then every number.

import { chance, h, integer, label, number, panel, percent, seconds, table } from './dom.js';
import { speedOf } from './speed.js';
import { around, requestMetrics, requestName, tokenIds } from './trace.js';
import { reasons, roundless } from './words.js';

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

/** Whether the text itself is promised to be that of plain decoding; the other rules promise its distribution, or nothing. */
export const keepsText = ({ rule, sampling }) => rule === 'match' || (!rule.startsWith('lossy') && Number(sampling.temperature) === 0);

/** What a rule promises that does not promise the text. */
export const promised = ({ rule }) => `rule ${label(rule)} ${rule.startsWith('lossy') ? 'is lossy' : 'keeps the distribution, not the text'}`;

/** Why a drafter that is on has not guessed: null for one that was not there, or that was asked for depth 0. */
function restsFor(trace, request) {
  if (request.tally.drafted || request.drafter === 'none' || !request.rounds.length) return null;
  const last = trace.record(request.rounds.at(-1)), asked = request.rounds.some((i) => trace.depth.at(i) > 0);
  if (!asked && !last.reason.startsWith('auto: ')) return null;
  return label((last.depth ? last.draft_reason || last.reason : last.reason).replace(/^auto: /, ''), 200);
}

export function verdict(trace, request, speed) {
  const tally = request.tally, { own, about, all } = speed;
  if (!tally.rounds && !request.totals) return roundless(request);
  const rests = restsFor(trace, request);
  if (rests) return `Speculation is on (${label(request.drafter)}), but it never guessed: ${rests}.`;
  if (!tally.drafted) return 'Speculation is off for this text: every token was one pass of the target.';
  const kept = `${percent(tally.accepted / tally.drafted)} of the guesses stood`, plain = 'times the speed of plain decoding';
  if (speed.pair && speed.enough) {
    const sure = { 1: ' and pays', 0: '', '-1': ' and costs time' }[speed.certain];
    const gain = `${number(all.median)} ${plain} over the ${all.count} pairs of its kind (95 %: ${number(all.low)}–${number(all.high)})`;
    return `Speculation is on${sure}: ${gain}${speed.certain ? '' : ', no certain gain or loss'}; ${number(own)} in this one; ${kept}.`;
  }
  if (speed.pair) return `Speculation is on: ${number(own)} ${plain} in this pair of runs; whether it pays, ${all.count === 1 ? 'one pair does' : `${all.count} pairs do`} not tell; ${kept}.`;
  if (!about) return `Speculation is on; ${kept}.`;
  const sure = !about.plain.measured ? '' : about.low > 1 ? ' and seems to pay' : about.high < 1 ? ' and seems to cost time' : '';
  return `Speculation is on${sure}: about ${number(about.gain)} ${plain}, by an estimate; ${kept}.`;
}

function identical(trace, speed, request) {
  if (request.rule.startsWith('lossy')) return 'no: the rule is lossy';
  if (speed.pair && keepsText(request)) return sameTokens(trace, speed.pair) ? `yes: all ${request.tokens} tokens equal those of the run without guesses` : 'NO: the run without guesses wrote other tokens';
  if (!request.tally.drafted) return request.tokens ? 'it is plain decoding itself' : '–';
  return request.rule === 'match' ? 'by rule match; this trace has no run without guesses to compare with' : `the distribution is kept (rule ${request.rule}), not the text`;
}

/** The speed-up of this request, and that of the pairs of its kind. */
function speedFacts(request, { own, about, all, enough }) {
  const kind = `${all.count} of drafter ${label(request.drafter)}, rule ${label(request.rule)}${typeof request.sampling.temperature === 'number' ? `, temperature ${request.sampling.temperature}` : ''}`;
  return [
    ['speed-up', own !== null ? `${number(own)}×, measured against the same request without guesses` : about && request.drafter !== 'none' ? `about ${number(about.gain)}×; plain decoding ${about.plain.how}` : 'not known'],
    ...(all.count ? [['pairs of its kind', `${kind}: median ${number(all.median)}× (${enough ? '95 %' : 'range'}: ${number(all.low)}–${number(all.high)}×)`]] : []),
  ];
}

export const statusView = {
  id: 'status', title: 'Status',
  draw({ trace, request, link }) {
    const { tally } = request, speed = speedOf(trace, request), metrics = requestMetrics(request), last = request.rounds.at(-1);
    const record = last === undefined ? null : trace.record(last), machine = request.header.machine, completed = request.totals ? request.tokens : request.tally.completionTokens;
    const facts = [
      ['speculation', !tally.rounds && !request.totals ? '–' : tally.drafted || restsFor(trace, request) ? `on: drafter ${label(request.drafter)}, rule ${label(request.rule)}` : 'off'],
      ['why', (record && reasons(record)) || '–'],
      ['depth now', record ? `${record.depth}, in the last round` : '–'], ['depth asked for', metric('depth', depthOf(request.header))],
      ...speedFacts(request, speed),
      ['identical to plain decoding', identical(trace, speed, request)],
      ['invisible to the bit', label(String(machine.invisible ?? 'the trace does not say'), 300)],
      ['ended', request.done ? label(request.done.finish) + (request.done.error ? `: ${label(String(request.done.error), 300)}` : '') : 'still running, or cut off'],
      ...(request.broken ? [['note', `some of its rounds did not reach this page; the numbers are ${request.done ? 'what the engine said at its end' : 'of those that did'}`]] : []),
      ...(request.withheld ? [['note', 'of another key: its figures are shown, and nothing of its text']] : []),
      ['target', label(request.header.target, 120)],
      ['machine', ['device', 'dtype', 'threads', 'tier', 'torch'].filter((key) => machine[key] !== undefined).map((key) => `${key} ${label(String(machine[key]))}`).join(', ')],
      ['prompt', h('span', null, metric('prompt_tokens', request.promptTokens), ` tokens, ${request.cached} of them cached`)], ['seed', machine.seed === undefined ? metric('seed', request.seed, request.seed) : label(String(machine.seed))],
      ['completion', h('span', null, metric('completion_tokens', completed), completed === 1 ? ' token' : ' tokens')],
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
