/* The law of each row, who can be kept by filters, and the choice under noise: the k best of log p + g. Compiled and called by ../native.py;
 * core/probs.py and core/host.py have the twins, and core/noise.py says which number belongs to a token.
 *
 * For the choice a row is read once. A bound that takes a few operations tells which columns could be among the best so far; the noise
 * of these few is computed, in double as there, so that every way to a winner finds the same one.
 */
#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "lanes.h"

#define SIDE 4 /* vectors whose bounds are tested together */
#define PART 16384 /* columns that one thread takes */
#define SUMS (16 / LANES) /* vectors that exponentials add up in: a vocabulary is long, and the more a number adds up, the less exact it is */
#define TILES 4096 /* of a row, at most, which share a maximum each; of a row that is not LONG they are shorter */
#define TILE 64
#define SHORT_TILE 8
#define LONG 16384
#define LIKELY 1024 /* tokens that a filter of a drafter looks at */
#define GIVEN 1e-6 /* of a threshold: the precision of float32 */
#define SLACK 1e-3f /* far above the error of `reach` in float32 */

static inline int any(integers which)
{
#if defined __AVX512F__ && LANES == 16
    return _mm512_test_epi32_mask((__m512i)which, (__m512i)which) != 0;
#else
    uint64_t some[LANES / 2], found = 0;
    memcpy(some, &which, sizeof which);
    for (int i = 0; i < LANES / 2; i++) found |= some[i];
    return found != 0;
#endif
}

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

/* The tokens of LANES columns from the first on; what is beyond the last one names itself. */
static inline words tokens_of(const int64_t *names, long first, long to)
{
    words tokens = (words)AT + (uint32_t)first;
    for (int i = 0; names && i < LANES && first + i < to; i++) tokens[i] = (uint32_t)names[first + i];
    return tokens;
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
        integers above = {0};
        for (int s = 0; s < SIDE; s++) {
            long first = c + s * LANES;
            if (first + LANES <= to) {
                value[s] = *(const floats *)(row + first);
            } else {
                for (int i = 0; i < LANES; i++) value[s][i] = first + i < to ? row[first + i] : -INFINITY;
            }
            limit[s] = value[s];
            if (key) {
                bits[s] = noise_bits(tokens_of(names, first, to), key);
                limit[s] += reach(bits[s]);
            }
            above |= limit[s] > floor;
        }
        if (!any(above)) continue;
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
    floats most[SIDE];
    integers sound[SIDE];
    float top = -INFINITY;
    long c = 0;
    for (int i = 0; i < SIDE; i++) most[i] = (floats){0} - INFINITY, sound[i] = ~(integers){0};
    for (; c + SIDE * LANES <= width; c += SIDE * LANES)
        UNROLL for (int i = 0; i < SIDE; i++) {
            floats v = load_lanes(row, c + i * LANES, halves);
            most[i] = GREATER(v, most[i]);
            sound[i] &= v < INFINITY;
        }
    for (int i = 1; i < SIDE; i++) most[0] = GREATER(most[i], most[0]), sound[0] &= sound[i];
    if (any(~sound[0])) return INFINITY;
    for (int i = 0; i < LANES; i++)
        if (most[0][i] > top) top = most[0][i];
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
        while (c + LANES <= width && !any(load_lanes(row, c, halves) == top)) c += LANES;
        while (load(row, c, halves) != top) c++;
        columns[r] = c;
    }
    return wrong;
}

/* The logarithm of what the exponentials of (x - top) / temperature add up to, in sixteen sums, whatever the vectors, and these then; and
 * to [width], or null: those numbers. */
static inline float log_mass(const void *row, long width, float top, float temperature, int halves, float *to)
{
    floats sum[SUMS] = {0};
    float rest = 0;
    long whole = width / 16 * 16;
    for (long c = 0; c < whole;)
        UNROLL for (int i = 0; i < SUMS; i++, c += LANES) {
            floats z = (load_lanes(row, c, halves) - top) / temperature;
            if (to) *(floats *)(to + c) = z;
            sum[i] += exponential(z);
        }
    for (long c = whole; c < width; c++) {
        float z = (load(row, c, halves) - top) / temperature;
        if (to) to[c] = z;
        rest += expf(z);
    }
    for (int half = SUMS / 2; half; half /= 2)
        for (int i = 0; i < half; i++) sum[i] += sum[i + half];
    return logf(total(sum[0]) + rest);
}

/* y [rows, width] = log softmax of x / temperature, the largest taken off first: no overflow, and precise where the mass is. x float32 or,
 * with halves, bfloat16. Returns 0, or 1 if a row's largest number is not finite: then y is of no use. */
int law(const void *x, float *y, long rows, long width, float temperature, int halves, int threads)
{
    int wrong = 0;
#pragma omp parallel for num_threads(threads) reduction(| : wrong) if (rows * width > PART / 2)
    for (long r = 0; r < rows; r++) {
        const char *from = (const char *)x + r * width * size(halves);
        float *to = y + r * width, top = top_of(from, width, halves);
        if (!isfinite(top)) {
            wrong = 1;
            continue;
        }
        float mass = log_mass(from, width, top, temperature, halves, to);
        for (long c = 0; c < width; c++) to[c] -= mass;
    }
    return wrong;
}

/* The k-th largest of x [n], which is put in another order (Hoare's selection). */
static float kth_largest(float *x, long n, long k)
{
    for (long low = 0, high = n - 1; low < high;) {
        float middle = x[(low + high) / 2];
        long i = low, j = high;
        while (i <= j) {
            while (x[i] > middle) i++;
            while (x[j] < middle) j--;
            if (i > j) break;
            float other = x[i];
            x[i++] = x[j];
            x[j--] = other;
        }
        if (k - 1 <= j) high = j;
        else if (k - 1 >= i) low = i;
        else break;
    }
    return x[k - 1];
}

/* What at least k numbers of a row reach: the k-th largest of the maxima of tiles, column c being of tile c modulo their number; -inf if there
 * are too few tiles. */
static float reached_by(const void *row, long width, int halves, long k)
{
    float tile[TILES];
    long tiles = least(TILES, width / (width < LONG ? SHORT_TILE : TILE)) / LANES * LANES;
    if (2 * k > tiles) return -INFINITY;
    for (long c = 0; c < tiles; c += LANES) *(floats *)(tile + c) = load_lanes(row, c, halves);
    for (long first = tiles; first + tiles <= width; first += tiles)
        for (long c = 0; c < tiles; c += LANES) {
            floats v = load_lanes(row, first + c, halves), most = *(const floats *)(tile + c);
            *(floats *)(tile + c) = GREATER(v, most);
        }
    return kth_largest(tile, tiles, k);
}

/* A number and its column as one integer: these rise as numbers fall, equal ones by column, zeros of both signs being equal. */
static uint64_t key_of(float value, long column)
{
    uint32_t bits;
    value += 0.0f;
    memcpy(&bits, &value, 4);
    return (uint64_t)(bits & 0x80000000u ? bits : ~bits & 0x7fffffffu) << 32 | (uint64_t)column;
}

static float value_of(uint64_t key)
{
    uint32_t bits = (uint32_t)(key >> 32);
    float value;
    bits = bits & 0x80000000u ? bits : ~bits & 0x7fffffffu;
    memcpy(&value, &bits, 4);
    return value;
}

/* keys [room]: of what reaches the bound in a row. Returns how many do; more than there is room for are counted no further. */
static long reaching(const void *row, long width, int halves, float bound, long room, uint64_t *keys)
{
    long count = 0;
    for (long c = 0; c < width; c += LANES) {
        long many = least(LANES, width - c);
        if (many == LANES && !any(load_lanes(row, c, halves) >= bound)) continue;
        for (long i = 0; i < many; i++) {
            float value = load(row, c + i, halves);
            if (!(value >= bound)) continue;
            if (count == room) return room + 1;
            keys[count++] = key_of(value, c + i);
        }
    }
    return count;
}

static int rising(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* core/host.py's `ranked`: how many tokens filters leave of the `count` whose keys, with all numbers that reach a bound, are given, and come
 * to be sorted; z [count]: (number - the largest) / temperature; mass: what the exponentials of the kept ones add up to. total: what those
 * of all tokens do. Returns 0 where there may be more than these; whole: there are no others. */
static long ranked(const filters *f, uint64_t *keys, long count, int whole, double total, double *z, double *mass)
{
    long left = count, kept = 0;
    double sum = 0;
    if (f->top_k > count && !whole) return 0;
    qsort(keys, count, sizeof *keys, rising);
    if (f->top_k && f->top_k < count)
        for (left = f->top_k; left < count && keys[left] >> 32 == keys[f->top_k - 1] >> 32; left++) {}
    for (long i = 0; i < left; i++) z[i] = ((double)value_of(keys[i]) - value_of(keys[0])) / f->temperature;
    if (f->top_k) {
        total = 0;
        for (long i = 0; i < left; i++) total += exp(z[i]);
    }
    while (kept < left && z[kept] >= f->least - GIVEN && (!kept || f->top_p >= 1 || sum < total * (f->top_p * (1 - GIVEN))))
        sum += exp(z[kept++]);
    *mass = sum;
    return whole || f->top_k || kept < count ? kept : 0;
}

/* What filters leave of each row of x [rows, width], float32 or, with halves, bfloat16: columns, likeliest first, and their log-probabilities,
 * [rows, room], and how many, counts [rows]. They look at what reaches a bound: with k, what at least k numbers do, without, so far below
 * the largest as `fall` says. A count of 0 says that these were too few to tell, or more than there was room for. Returns 0, or 1 if a row's
 * largest number is not finite: then all this is of no use. */
int filter(const void *x, long rows, long width, const filters *f, long k, float fall, long room, int64_t *counts, int64_t *columns,
           double *logs, int halves, int threads)
{
    int wrong = 0;
#pragma omp parallel for num_threads(threads) reduction(| : wrong) if (rows * width > PART / 4)
    for (long r = 0; r < rows; r++) {
        const char *row = (const char *)x + r * width * size(halves);
        float top = top_of(row, width, halves);
        if (!isfinite(top)) {
            wrong = 1;
            continue;
        }
        uint64_t *keys = (uint64_t *)(columns + r * room);
        double *log_p = logs + r * room, mass, total = 0;
        float bound = k ? reached_by(row, width, halves, k) : top - fall;
        long count = reaching(row, width, halves, bound < -FLT_MAX ? -FLT_MAX : bound, room, keys);
        if (f->top_p < 1 && !f->top_k && count <= room) total = exp(log_mass(row, width, top, (float)f->temperature, halves, 0));
        counts[r] = count > room ? 0 : ranked(f, keys, count, bound == -INFINITY, total, log_p, &mass);
        for (long i = 0; i < counts[r]; i++) {
            columns[r * room + i] = (int64_t)(keys[i] & 0xffffffffu);
            log_p[i] -= log(mass);
        }
    }
    return wrong;
}

/* Filters on laws [rows, width] as a drafter needs them, which may be wrong about a token: the likeliest that they leave, and their equals;
 * the others become -inf, and what is left a law. A row whose filters leave more than is looked at stays as it is. temperature: 1. */
void narrow(float *law, long rows, long width, const filters *f, int threads)
{
    if (!f->top_k && f->top_p >= 1 && f->least == -INFINITY) return;
#pragma omp parallel for num_threads(threads) if (rows * width > PART)
    for (long r = 0; r < rows; r++) {
        uint64_t keys[LIKELY];
        double z[LIKELY], mass;
        float *row = law + r * width, bound = reached_by(row, width, 0, most(f->top_k, LIKELY / 8));
        long count = reaching(row, width, 0, bound < -FLT_MAX ? -FLT_MAX : bound, LIKELY, keys), kept = 0;
        if (count <= LIKELY) kept = ranked(f, keys, count, bound == -INFINITY, exp(-(double)top_of(row, width, 0)), z, &mass);
        if (!kept) continue;
        float least = value_of(keys[kept - 1]), share = (float)(value_of(*keys) + log(mass));
        for (long c = 0; c < width; c++) row[c] = row[c] >= least ? row[c] - share : -INFINITY;
    }
}
