// The page's reading of core/tally.py and trace/report.py: counts added up round by round, ratios only when read.

/** What the times of a round are told by, in their order. */
export const PHASES = ['draft', 'score', 'verify', 'other'];

const share = (part, whole) => (whole ? part / whole : null);

export class Tally {
  requests = 0; prefillPasses = 0; rounds = 0; roundsDrafted = 0;
  drafted = 0; accepted = 0; rejected = 0; emitted = 0; emittedDrafted = 0;
  reached = []; passed = [];
  lengths = [];                          // lengths[a]: rounds with a draft that accepted a tokens

  prefill(passes) { this.requests += 1; this.prefillPasses += passes; }

  round(drafted, accepted, rejected, emitted) {
    this.rounds += 1; this.drafted += drafted; this.accepted += accepted; this.rejected += rejected; this.emitted += emitted;
    if (!drafted) return;
    this.roundsDrafted += 1; this.emittedDrafted += emitted;
    this.lengths[accepted] = (this.lengths[accepted] ?? 0) + 1;
    const judged = accepted + (rejected > 0 ? 1 : 0);
    for (let i = 0; i < judged; i++) this.reached[i] = (this.reached[i] ?? 0) + 1;
    for (let i = 0; i < judged; i++) this.passed[i] = (this.passed[i] ?? 0) + (i < accepted ? 1 : 0);
  }

  add(other) {
    for (const [name, value] of Object.entries(other)) {
      if (Array.isArray(value)) value.forEach((count, i) => { this[name][i] = (this[name][i] ?? 0) + (count ?? 0); });
      else this[name] += value;
    }
    return this;
  }

  get completionTokens() { return this.requests + this.emitted; }
  get hazard() { return this.reached.map((reached, i) => this.passed[i] / reached); }

  metrics() {
    const passes = this.rounds + this.prefillPasses;
    return {
      rounds: this.rounds, target_passes: passes, drafted: this.drafted, accepted: this.accepted,
      acceptance_length: share(this.emitted, this.rounds), acceptance_length_drafted: share(this.emittedDrafted, this.roundsDrafted),
      draft_utilisation: share(this.accepted, this.drafted), hazard: this.hazard, passes_saved: this.completionTokens - passes,
    };
  }
}

/** When tokens arrived and where the rounds' time went; seconds. */
export class Clock {
  first = null; last = null; firstTokens = 0; tokens = 0; draft = 0; score = 0; verify = 0; other = 0;

  constructor(submitted) { this.submitted = submitted; }

  delivered(at, tokens) {
    if (this.first === null) { this.first = at; this.firstTokens = tokens; }
    this.last = at; this.tokens += tokens;
  }

  spent(draft, score, verify, other) { this.draft += draft; this.score += score; this.verify += verify; this.other += other; }

  metrics() {
    const running = this.last !== null && this.last > this.submitted;
    const after = this.first !== null && this.tokens !== this.firstTokens && this.last > this.first;
    return {
      tokens_per_s: running ? this.tokens / (this.last - this.submitted) : null,
      ttft_s: this.first > this.submitted ? this.first - this.submitted : null,
      tpot_s: after ? (this.last - this.first) / (this.tokens - this.firstTokens) : null,
      draft_s: this.draft, score_s: this.score, verify_s: this.verify, other_s: this.other,
    };
  }
}

/** Wilson's 95 % interval of a proportion. */
export function wilson(part, whole) {
  if (!whole) return [0, 1];
  const z = 1.96, p = part / whole, square = z * z / whole;
  const middle = (p + square / 2) / (1 + square), half = z * Math.sqrt(p * (1 - p) / whole + square / (4 * whole)) / (1 + square);
  return [Math.max(0, middle - half), Math.min(1, middle + half)];
}

export function median(values) {
  const sorted = values.filter(Number.isFinite).sort((a, b) => a - b), middle = sorted.length >> 1;
  if (!sorted.length) return null;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

/** Median and 95 % interval by resampling, with a fixed order of draws so that the same trace shows the same interval. */
export function resampled(values) {
  if (values.length < 2) return { median: median(values), low: null, high: null };
  let state = 12345;
  const draw = () => { state = (Math.imul(state, 1664525) + 1013904223) >>> 0; return state / 2 ** 32; };
  const medians = [];
  for (let i = 0; i < 400; i++) medians.push(median(values.map(() => values[Math.floor(draw() * values.length)])));
  medians.sort((a, b) => a - b);
  return { median: median(values), low: medians[10], high: medians[389] };
}
