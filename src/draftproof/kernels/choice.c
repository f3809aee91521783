/* The law of each row, and the choice under noise: the k best of log p + g. Compiled and called by ../native.py; core/probs.py and
 * core/host.py have the twins, and core/noise.py says which number belongs to a token.
 *
 * For the choice a row is read once. A bound that takes a few operations tells which columns could be among the best so far; the noise
 * of these few is computed, in double as there, so that every way to a winner finds the same one.
 */
#include <math.h>
#include <stdlib.h>

#include "lanes.h"

#define SIDE 4 /* vectors whose bounds are tested together */
#define PART 16384 /* columns that one thread takes */
#define SUMS (16 / LANES) /* vectors that exponentials add up in: a vocabulary is long, and the more a number adds up, the less exact it is */
#define SLACK 1e-3f /* far above the error of `reach` in float32 */

static inline words mixed(words h) /* lowbias32 */
{
    h = (h ^ h >> 16) * 0x7feb352du;
    h = (h ^ h >> 15) * 0x846ca68bu;
    return h ^ h >> 16;
}

static inline words noise_bits(words tokens, const uint32_t *key) { return mixed(mixed(tokens ^ key[0]) + key[1]); }

static float gumbel(uint32_t bits)
{
    float exponential = (float)log1p(-(bits + 0.5) * 0x1p-32);
    return (float)-log(-(double)exponential);
}

/* What no token's noise exceeds: -log u >= -log(-log1p(-u)). u is at least n / 2^31, n the bits but the last, and the bits of a float read
 * as an integer are a logarithm but for its curve, from below. */
static inline floats reach(words bits)
{
    floats n = __builtin_convertvector((integers)(bits >> 1), floats);
    floats logarithm = __builtin_convertvector((integers)n - 0x3f800000, floats) * 0x1p-23f;
    return (31 - logarithm) * 0.693147181f + SLACK;
}

/* The best of columns [from, to) of a row, in order; returns how many there are, k or as many as are possible. */
static long best_of_part(const float *row, long from, long to, const uint32_t *key, const int64_t *names, long k, float *scores,
                         int64_t *columns)
{
    long count = 0;
    float floor = -INFINITY;
    for (long c = from; c < to; c += SIDE * LANES) {
        floats value[SIDE], limit[SIDE];
        words bits[SIDE];
        integers any = {0};
        for (int s = 0; s < SIDE; s++) {
            uint32_t token[LANES];
            long first = c + s * LANES;
            for (int i = 0; i < LANES; i++) token[i] = names && first + i < to ? (uint32_t)names[first + i] : (uint32_t)(first + i);
            if (first + LANES <= to) {
                value[s] = *(const floats *)(row + first);
            } else {
                for (int i = 0; i < LANES; i++) value[s][i] = first + i < to ? row[first + i] : -INFINITY;
            }
            limit[s] = value[s];
            if (key) {
                words tokens;
                memcpy(&tokens, token, sizeof tokens);
                bits[s] = noise_bits(tokens, key);
                limit[s] += reach(bits[s]);
            }
            any |= limit[s] > floor;
        }
        uint64_t some[LANES / 2], found = 0;
        memcpy(some, &any, sizeof any);
        for (int i = 0; i < LANES / 2; i++) found |= some[i];
        if (!found) continue;
        for (int s = 0; s < SIDE; s++)
            for (int i = 0; i < LANES; i++) {
                if (!(limit[s][i] > floor)) continue;
                float score = key ? value[s][i] + gumbel(bits[s][i]) : value[s][i];
                if (!(score > floor)) continue;
                count = placed(score, c + s * LANES + i, k, count, scores, columns);
                if (count == k) floor = scores[k - 1];
            }
    }
    return count;
}

/* scores, columns [rows, k]: the best of x [rows, size] plus noise, best first, ties by the lowest column. keys [rows, 2], or null: no
 * noise; names [size]: the tokens of the columns, or null: themselves. A row with fewer possible columns ends in scores of -inf and columns
 * that are none of them. Returns 0, or 1 without memory. */
int best(const float *x, long rows, long size, const uint32_t *keys, const int64_t *names, long k, float *scores, int64_t *columns,
         int threads)
{
    long parts = (size + PART - 1) / PART;
    float *part_scores = malloc(rows * parts * k * (sizeof *part_scores + sizeof *columns) + rows * parts * sizeof(long));
    if (!part_scores) return 1;
    int64_t *part_columns = (int64_t *)part_scores;
    long *counts = (long *)(part_columns + rows * parts * k);
    part_scores = (float *)(counts + rows * parts);
#pragma omp parallel for num_threads(threads) if (rows * size > PART / 2)
    for (long task = 0; task < rows * parts; task++) {
        long r = task / parts, from = task % parts * PART, to = least(from + PART, size);
        counts[task] = best_of_part(x + r * size, from, to, keys ? keys + 2 * r : 0, names, k, part_scores + task * k,
                                    part_columns + task * k);
    }
    for (long r = 0; r < rows; r++) {
        float *own = scores + r * k;
        int64_t *where = columns + r * k;
        long count = 0;
        for (long task = r * parts; task < (r + 1) * parts; task++)
            for (long i = task * k; i < task * k + counts[task]; i++)
                if (count < k || part_scores[i] > own[k - 1]) count = placed(part_scores[i], part_columns[i], k, count, own, where);
        for (long filler = 0; count < k; filler++) {
            long i = 0;
            while (i < count && where[i] != filler) i++;
            if (i < count) continue;
            own[count] = -INFINITY;
            where[count++] = filler;
        }
    }
    free(part_columns);
    return 0;
}

/* The largest of row [width], float32 or, with halves, bfloat16; not finite if one of them is NaN or inf, or all are -inf. */
static float top_of(const void *row, long width, int halves)
{
    floats most = {0};
    integers sound = ~(integers){0};
    float top = -INFINITY;
    long c = 0;
    most -= INFINITY;
    for (; c + LANES <= width; c += LANES) {
        floats v = load_lanes(row, c, halves);
        most = GREATER(v, most);
        sound &= v < INFINITY;
    }
    for (int i = 0; i < LANES; i++) {
        if (most[i] > top) top = most[i];
        if (!sound[i]) return INFINITY;
    }
    for (; c < width; c++) {
        float v = load(row, c, halves);
        if (v > top) top = v;
        if (!(v < INFINITY)) return INFINITY;
    }
    return top;
}

/* columns [rows]: the first of each row's largest numbers. Returns 0, or 1 if one of these is not finite: then they are of no use. */
int first(const void *x, long rows, long width, int halves, int64_t *columns, int threads)
{
    int wrong = 0;
#pragma omp parallel for num_threads(threads) reduction(| : wrong) if (rows * width > PART)
    for (long r = 0; r < rows; r++) {
        const char *row = (const char *)x + r * width * size(halves);
        float top = top_of(row, width, halves);
        long c = 0;
        if (!isfinite(top)) {
            wrong = 1;
            continue;
        }
        for (int found = 0; !found && c + LANES <= width; c += found ? 0 : LANES) {
            integers same = load_lanes(row, c, halves) == top;
            for (int i = 0; i < LANES; i++) found |= same[i];
        }
        while (load(row, c, halves) != top) c++;
        columns[r] = c;
    }
    return wrong;
}

/* y [rows, width] = log softmax of x / temperature, the largest taken off first: no overflow, and precise where the mass is. x float32 or,
 * with halves, bfloat16. Exponentials add up in sixteen sums, whatever the vectors, then these do. Returns 0, or 1 if a row's largest number
 * is not finite: then y is of no use. */
int law(const void *x, float *y, long rows, long width, float temperature, int halves, int threads)
{
    int wrong = 0;
#pragma omp parallel for num_threads(threads) reduction(| : wrong) if (rows * width > PART / 2)
    for (long r = 0; r < rows; r++) {
        const char *from = (const char *)x + r * width * size(halves);
        float *to = y + r * width, top = top_of(from, width, halves), rest = 0;
        floats sum[SUMS] = {0};
        long whole = width / 16 * 16;
        if (!isfinite(top)) {
            wrong = 1;
            continue;
        }
        for (long c = 0; c < whole;)
            UNROLL for (int i = 0; i < SUMS; i++, c += LANES) {
                floats z = (load_lanes(from, c, halves) - top) / temperature;
                *(floats *)(to + c) = z;
                sum[i] += exponential(z);
            }
        for (long c = whole; c < width; c++) {
            to[c] = (load(from, c, halves) - top) / temperature;
            rest += expf(to[c]);
        }
        for (int half = SUMS / 2; half; half /= 2)
            for (int i = 0; i < half; i++) sum[i] += sum[i + half];
        float mass = logf(total(sum[0]) + rest);
        for (long c = 0; c < width; c++) to[c] -= mass;
    }
    return wrong;
}
