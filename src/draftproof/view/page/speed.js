// How fast a text was against plain decoding. What plain decoding takes has one definition, here and in trace/figures.py (`plain`).

import { median, resampled } from './tally.js';
import { pairs, requestMetrics } from './trace.js';

const Z95 = 1.959963984540054, FEWEST_ROUNDS = 2, MOST_TOKENS = 0.9, FEWEST_PAIRS = 6;

/** A request's rounds, added up: {rounds, seconds, emitted, score}; all of them, or those that `which` takes. */
export function spentOf(trace, request, which = () => true) {
  const sum = { rounds: 0, seconds: 0, emitted: 0, score: 0 };
  for (const i of request.rounds) {
    if (!which(i)) continue;
    sum.rounds += 1;
    sum.seconds += lasted(trace, i);
    sum.emitted += trace.emitted.at(i);
    sum.score += trace.score.at(i);
  }
  return sum;
}

export const lasted = (trace, i) => trace.draft.at(i) + trace.score.at(i) + trace.verify.at(i) + trace.other.at(i);

/** Plain decoding by `rounds` without a guess, at as many texts at a time as the `chosen` rounds: a pass over more texts takes longer. Null if
 *  there are such rounds for too few of the chosen tokens. */
function atLoad(trace, rounds, chosen, how) {
  const sums = {}, by = {};
  for (const i of rounds) {
    const sum = sums[trace.batch.at(i)] ??= { rounds: 0, seconds: 0, emitted: 0 };
    sum.rounds += 1;
    sum.seconds += lasted(trace, i);
    sum.emitted += trace.emitted.at(i);
  }
  let all = 0, known = 0, seconds = 0;
  for (const i of chosen) {
    const load = trace.batch.at(i), sum = sums[load], tokens = trace.emitted.at(i);
    all += tokens;
    if (!sum || sum.rounds <= FEWEST_ROUNDS || sum.seconds <= 0 || !sum.emitted) continue;
    known += tokens;
    seconds += tokens * (by[load] = sum.seconds / sum.emitted);
  }
  if (!known || known < MOST_TOKENS * all) return null;
  return { seconds: seconds / known, measured: true, how: `measured on ${Object.keys(by).reduce((count, load) => count + sums[load].rounds, 0)} ${how}`, by };
}

/** Seconds that plain decoding takes for the tokens of a round. */
export const plainly = (trace, { seconds, by }, i) => trace.emitted.at(i) * (by[trace.batch.at(i)] ?? seconds);

/** Plain decoding of a request's target: {seconds a token, measured, how, by: texts at a time → seconds}; null without times. */
export function plainOf(trace, request) {
  const bare = (one) => one.drafter === 'none' && !one.tally.drafted && !one.totals && one.header.target === request.header.target;
  const off = trace.requests.flatMap((one) => (bare(one) ? one.rounds : [])), own = request.rounds.filter((i) => trace.drafted.at(i) === 0);
  const found = atLoad(trace, off, request.rounds, 'passes of runs without guesses') ?? atLoad(trace, own, request.rounds, 'passes without a guess');
  if (found) return found;
  const all = spentOf(trace, request);
  return all.score > 0 ? { seconds: all.score / all.rounds, measured: false, how: 'estimated: the mean scoring pass', by: {} } : null;
}

/** How many times as fast a request's rounds were as plain decoding, with a 95 % interval over them: {gain, low, high, plain}; null if nobody knows. */
export function estimated(trace, request, plain = plainOf(trace, request)) {
  const { rounds, seconds, emitted } = spentOf(trace, request);
  if (!plain || !seconds || !emitted) return null;
  const rate = emitted / seconds, gain = request.rounds.reduce((sum, i) => sum + plainly(trace, plain, i), 0) / seconds;
  const squares = request.rounds.reduce((sum, i) => sum + (trace.emitted.at(i) - rate * lasted(trace, i)) ** 2, 0);
  const half = rounds > 1 ? Z95 * gain / emitted * Math.sqrt(rounds / (rounds - 1) * squares) : Infinity;
  return { gain, low: gain - half, high: gain + half, plain };
}

/**
 * Of one request: `own`, against the same request without guesses, where the trace has that `pair`, else `about`, an estimate. `all`: the pairs
 * of its kind; low and high are an interval if there are enough of them, else the range. `certain`: 1 or −1 where that interval excludes 1.
 */
export function speedOf(trace, request) {
  const ratio = ({ off, on }) => requestMetrics(on).tokens_per_s / requestMetrics(off).tokens_per_s;
  const heat = (one) => one.sampling.temperature ?? null;
  const alike = pairs(trace).filter(({ on }) => on.drafter === request.drafter && on.rule === request.rule && heat(on) === heat(request) && on.header.target === request.header.target);
  const pair = alike.find(({ on }) => on === request) ?? null, gains = alike.map(ratio).filter(Number.isFinite), count = gains.length;
  const all = count < FEWEST_PAIRS ? { count, median: median(gains), low: Math.min(...gains), high: Math.max(...gains) } : { count, ...resampled(gains) };
  const certain = count < FEWEST_PAIRS ? 0 : all.low > 1 ? 1 : all.high < 1 ? -1 : 0;
  return { pair, own: pair ? ratio(pair) : null, about: pair ? null : estimated(trace, request), all, certain, enough: count >= FEWEST_PAIRS };
}
