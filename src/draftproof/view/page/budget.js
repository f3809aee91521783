// The formulas of core/budget.py. Costs in units of a plain pass: c to draft a token, v to score, o besides.

export function survival(hazards) {
  let chance = 1;
  return hazards.map((hazard) => (chance *= hazard));
}

export const expectedTokens = (hazards) => survival(hazards).reduce((sum, chance) => sum + chance, 1);
export const speedup = (tokens, depth, c, v = 1, o = 0) => tokens / (depth * c + v + o);

/** The least i.i.d. acceptance at which a draft of this depth costs no time; null if none does. */
export function breakEven(depth, c, v = 1, o = 0) {
  const cost = depth * c + v + o;
  if (cost > depth + 1) return null;
  if (cost <= 1) return 0;
  let low = 0, high = 1;
  while (high - low > 1e-12) {
    const middle = (low + high) / 2;
    if (expectedTokens(Array(depth).fill(middle)) < cost) low = middle; else high = middle;
  }
  return high;
}

/** A pass that scores `depth` guesses for each of `batch` texts, over a plain pass of the same batch, if one row more costs `row`. */
export const scoreCost = (depth, batch, row) => (1 + row * (batch * (depth + 1) - 1)) / (1 + row * (batch - 1));
