// The shared noise of core/noise.py: the same integers, so that the page can run a token's race again from the seed alone.

const WORD = (1n << 64n) - 1n;

/** The two words that key a row of stream `text`: seed (BigInt), sample, position. */
export function noiseKey(seed, sample, position) {
  let z = 0n;
  for (const word of [seed, BigInt(sample), 0n, BigInt(position), 0n]) {
    z = ((z ^ (word & WORD)) + 0x9E3779B97F4A7C15n) & WORD;
    z = ((z ^ (z >> 30n)) * 0xBF58476D1CE4E5B9n) & WORD;
    z = ((z ^ (z >> 27n)) * 0x94D049BB133111EBn) & WORD;
    z ^= z >> 31n;
  }
  return [Number(z & 0xFFFFFFFFn), Number(z >> 32n)];
}

function mix(x) {
  x ^= x >>> 16; x = Math.imul(x, 0x7FEB352D);
  x ^= x >>> 15; x = Math.imul(x, 0x846CA68B);
  return (x ^ (x >>> 16)) >>> 0;
}

export function noiseBits([k0, k1], token) {
  return mix((mix((token ^ k0) | 0) + k1) | 0);
}

/** The Gumbel value of a token in a keyed row. */
export function gumbel(key, token) {
  const exponential = Math.fround(-Math.log1p(-((noiseBits(key, token) + 0.5) / 2 ** 32)));
  return Math.fround(-Math.log(exponential));
}
