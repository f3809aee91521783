/* Attention of queries over pages of keys and values, read where they lie. Compiled and called by ../native.py.
 *
 * An item is one path's queries over one page. Every sum has an order of its own, given by the places within the page and the head:
 * scores add over the head's lanes, the softmax's norm over the page's lanes, averages over the keys in turn. So an item's bits depend
 * on nothing but its query, its page and its mask: not on other items, other queries, the length of the mask or the threads.
 */
#include <math.h>
#include <stdlib.h>

#include "lanes.h"

#define MOST 3      /* queries of a micro-kernel */
#define SIDE 4      /* keys, or vectors of values, of a micro-kernel: MOST * SIDE sums fill the registers */
#define CHUNK 32    /* keys widened at a time: they stay in the first cache */
#define HEADS_QUERIES 48 /* queries of all heads of a piece of work */
#define UP(n, to) (((n) + (to) - 1) / (to) * (to))

static inline float total(floats x) /* over the lanes */
{
    float lanes[LANES];
    memcpy(lanes, &x, sizeof x);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

/* The sums over the lanes of four vectors. A fold adds halves, quarters or neighbours of two vectors and keeps both side by side. */
#define FOLD(a, b, one, other) (__builtin_shuffle(a, b, one) + __builtin_shuffle(a, b, other))
#if LANES == 16
static const integers LOW = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23};
static const integers EVEN_QUARTERS = {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27};
static const integers EVEN = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
#else
static const integers LOW = {0, 1, 2, 3, 8, 9, 10, 11}, EVEN_QUARTERS = {0, 1, 4, 5, 8, 9, 12, 13}, EVEN = {0, 2, 4, 6, 8, 10, 12, 14};
#endif
static inline void totals(const floats *x, float *four)
{
    floats sides = FOLD(x[0], x[1], LOW, LOW + LANES / 2), others = FOLD(x[2], x[3], LOW, LOW + LANES / 2);
    floats sum = FOLD(sides, others, EVEN_QUARTERS, EVEN_QUARTERS + LANES / 4);
    for (int lanes = LANES / 4; lanes > 1; lanes /= 2) sum = FOLD(sum, sum, EVEN, EVEN + 1);
    memcpy(four, &sum, 16);
}

/* score [ROWS, SIDE] = query [ROWS, dim] · key [SIDE, dim] */
#define SCORE(ROWS)                                                                                                      \
    static void score_##ROWS(const float *query, const float *key, long dim, float *score, long width)                   \
    {                                                                                                                    \
        floats sum[ROWS][SIDE] = {0};                                                                                    \
        for (long d = 0; d < dim; d += LANES) {                                                                          \
            floats q[ROWS];                                                                                              \
            UNROLL for (int r = 0; r < ROWS; r++) q[r] = *(const floats *)(query + r * dim + d);                         \
            UNROLL for (int s = 0; s < SIDE; s++) {                                                                      \
                floats k = *(const floats *)(key + s * dim + d);                                                         \
                UNROLL for (int r = 0; r < ROWS; r++) sum[r][s] += q[r] * k;                                             \
            }                                                                                                            \
        }                                                                                                                \
        for (int r = 0; r < ROWS; r++) totals(sum[r], score + r * width);                                                \
    }
/* out [ROWS, SIDE * LANES] += weight [ROWS, keys] times value [keys, SIDE * LANES], the keys in turn */
#define AVERAGE(ROWS)                                                                                                    \
    static void average_##ROWS(const float *weight, const float *value, long keys, long width, long dim, float *out)     \
    {                                                                                                                    \
        floats sum[ROWS][SIDE];                                                                                          \
        for (int r = 0; r < ROWS; r++) memcpy(sum[r], out + r * dim, sizeof sum[r]);                                     \
        for (long s = 0; s < keys; s++) {                                                                                \
            UNROLL for (int v = 0; v < SIDE; v++) {                                                                      \
                floats x = *(const floats *)(value + s * dim + v * LANES);                                               \
                UNROLL for (int r = 0; r < ROWS; r++) sum[r][v] += x * weight[r * width + s];                            \
            }                                                                                                            \
        }                                                                                                                \
        for (int r = 0; r < ROWS; r++) memcpy(out + r * dim, sum[r], sizeof sum[r]);                                     \
    }
SCORE(1) SCORE(2) SCORE(3)
AVERAGE(1) AVERAGE(2) AVERAGE(3)
typedef void score(const float *, const float *, long, float *, long);
typedef void average(const float *, const float *, long, long, long, float *);
static score *const scores[MOST] = {score_1, score_2, score_3};
static average *const averages[MOST] = {average_1, average_2, average_3};

/* `count` vectors of `dim` numbers, `stride` apart, widened and filled up with zeros: to [rows, wide]. */
static void widen(const void *from, int halves, long count, long stride, long dim, float *to, long rows, long wide)
{
    if (count < rows || dim < wide) memset(to, 0, 4 * rows * wide);
    for (long r = 0, d; r < count; r++) {
        for (d = 0; d + LANES <= dim; d += LANES) *(floats *)(to + r * wide + d) = load_lanes(from, r * stride + d, halves);
        for (; d < dim; d++) to[r * wide + d] = load(from, r * stride + d, halves);
    }
}

/* weight [width]: scores → exponentials of their distance to the greatest, which `top` gets; returns their sum. */
static float normalise(float *weight, const float *mask, float scaling, long keys, long width, float *top)
{
    for (long s = 0; s < keys; s++) weight[s] = weight[s] * scaling + mask[s];
    for (long s = keys; s < width; s++) weight[s] = -INFINITY;
    floats best = *(const floats *)weight, sum = {0};
    integers sound = best < INFINITY; /* false for what is not a number, too */
    for (long s = LANES; s < width; s += LANES) {
        floats w = *(const floats *)(weight + s);
        integers more = w > best;
        best = (floats)(((integers)w & more) | ((integers)best & ~more));
        sound &= w < INFINITY;
    }
    *top = -INFINITY;
    for (int i = 0; i < LANES; i++) {
        if (!sound[i]) return *top = NAN;
        if (best[i] > *top) *top = best[i];
    }
    if (*top == -INFINITY) { /* nothing is seen */
        memset(weight, 0, 4 * width);
        return 0;
    }
    for (long s = 0; s < width; s += LANES) {
        floats *w = (floats *)(weight + s);
        *w = exponential(*w - *top);
        sum += *w;
    }
    return total(sum);
}

/* One item's queries [heads, queries, …] over one page, for heads [first, last): what `attend` works on at a time. Chunks of keys are
 * read in the order in which they lie, all heads of one before the next. */
typedef struct {
    const char *query, *keys, *values; /* of the item's first head and query, the page's first key and value */
    const float *mask;
    float *out, *lse;
    long first, last, queries, asked, heads, dim, value_dim, seen;
    float scaling;
    int halves;
} work;

/* Widen one head's keys (or values) [s, s + CHUNK) into the chunk, and ask for what is next: a head's keys lie too far apart for the
 * processor to foresee them. */
static void take(const work *w, const char *pages, long dim, long s, long head, float *chunk, long wide)
{
    long size = w->halves ? 2 : 4, stride = size * w->heads * dim, next = head + 1 < w->last ? s : s + CHUNK;
    const char *after = pages + size * (head + 1 < w->last ? head + 1 : w->first) * dim;
    for (long r = next; r < next + CHUNK && r < w->seen; r++)
        for (long b = 0; b < size * dim; b += 64) __builtin_prefetch(after + r * stride + b);
    widen(pages + s * stride + size * head * dim, w->halves, w->seen - s < CHUNK ? w->seen - s : CHUNK, w->heads * dim, dim, chunk, CHUNK, wide);
}

static void over_a_page(const work *w, float *scratch)
{
    long deep = UP(w->dim, LANES), broad = UP(w->value_dim, SIDE * LANES), width = UP(w->seen, CHUNK), n = w->queries;
    long size = w->halves ? 2 : 4, count = w->last - w->first;
    float *asked = scratch, *sum = asked + count * n * deep, *weight = sum + count * n * broad, *chunk = weight + count * n * width;

    for (long h = 0; h < count; h++)
        widen(w->query + size * (w->first + h) * w->asked * w->dim, w->halves, n, w->dim, w->dim, asked + h * n * deep, n, deep);
    for (long s = 0; s < width; s += CHUNK)
        for (long h = 0; h < count; h++) {
            take(w, w->keys, w->dim, s, w->first + h, chunk, deep);
            for (long q = h * n, many; q < (h + 1) * n; q += many) {
                many = (h + 1) * n - q < MOST ? (h + 1) * n - q : MOST;
                for (long k = 0; k < CHUNK; k += SIDE)
                    scores[many - 1](asked + q * deep, chunk + k * deep, deep, weight + q * width + s + k, width);
            }
        }
    float norm[HEADS_QUERIES];
    for (long q = 0; q < count * n; q++) {
        float top;
        norm[q] = normalise(weight + q * width, w->mask + q % n * w->seen, w->scaling, w->seen, width, &top);
        w->lse[(w->first + q / n) * w->asked + q % n] = top + logf(norm[q]);
    }
    memset(sum, 0, 4 * count * n * broad);
    for (long s = 0; s < width; s += CHUNK)
        for (long h = 0; h < count; h++) {
            take(w, w->values, w->value_dim, s, w->first + h, chunk, broad);
            for (long q = h * n, many; q < (h + 1) * n; q += many) {
                many = (h + 1) * n - q < MOST ? (h + 1) * n - q : MOST;
                for (long v = 0; v < broad; v += SIDE * LANES)
                    averages[many - 1](weight + q * width + s, chunk + v, CHUNK, width, broad, sum + q * broad + v);
            }
        }
    for (long q = 0; q < count * n; q++)
        for (long v = 0; v < w->value_dim; v++) {
            float *out = w->out + ((w->first + q / n) * w->asked + q % n) * w->value_dim;
            out[v] = norm[q] == 0 ? 0 : sum[q * broad + v] / norm[q];
        }
}

/* query [items, heads, queries, dim], items `query_stride` numbers apart (0: one query for all); keys and values [pages, page, heads, …];
 * numbers [items]: the page of each; mask [items, queries, seen]: 0 or -inf for the page's first `seen` keys
 * → out [items, heads, queries, value_dim]: the page's average; lse [items, heads, queries]: its log-sum-exp. Returns 0, or 1 without memory.
 */
int attend(const void *query, long query_stride, const void *keys, const void *values, const int64_t *numbers, const float *mask, float *out,
           float *lse, long items, long heads, long queries, long dim, long value_dim, long page, long seen, float scaling, int halves,
           int threads)
{
    long most = queries < HEADS_QUERIES ? queries : HEADS_QUERIES, pieces = (queries + most - 1) / most;
    long shares = (threads + items * pieces - 1) / (items * pieces); /* of the heads, so that every thread has work */
    long together = (heads + shares - 1) / shares; /* heads of a piece of work */
    if (together > HEADS_QUERIES / most) together = HEADS_QUERIES / most;
    long groups = (heads + together - 1) / together, size = halves ? 2 : 4;
    long deep = UP(dim, LANES), broad = UP(value_dim, SIDE * LANES), rows = deep > broad ? deep : broad;
    long need = UP(4 * (together * most * (deep + broad + UP(seen, CHUNK)) + CHUNK * rows), 64);
    int failed = 0;
#pragma omp parallel num_threads(threads) if (items * groups * pieces > 1)
    {
        float *scratch = aligned_alloc(64, need);
        if (!scratch) failed = 1;
#pragma omp for collapse(3) schedule(static)
        for (long i = 0; i < items; i++)
            for (long g = 0; g < groups; g++)
                for (long piece = 0; piece < pieces; piece++) {
                    if (!scratch) continue;
                    long q = piece * most, last = (g + 1) * together;
                    work w = {(const char *)query + size * (i * query_stride + q * dim),
                              (const char *)keys + size * numbers[i] * page * heads * dim,
                              (const char *)values + size * numbers[i] * page * heads * value_dim,
                              mask + (i * queries + q) * seen,
                              out + (i * heads * queries + q) * value_dim,
                              lse + i * heads * queries + q,
                              g * together, last < heads ? last : heads, queries - q < most ? queries - q : most, queries, heads, dim,
                              value_dim, seen, scaling, halves};
                    over_a_page(&w, scratch);
                }
        free(scratch);
    }
    return failed;
}
