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
#define MOST_QUERIES 48 /* of a piece of work, over all its heads */
#define UP(n, to) (((n) + (to) - 1) / (to) * (to))

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

/* Some queries of some heads of an item over its page: what a thread works on at a time. A head of keys has `group` heads of queries.
 * Chunks of keys are read in the order in which they lie, all heads of one before the next. */
typedef struct {
    const char *query, *keys, *values; /* the item's first query, its page's first key and value */
    const float *mask;
    float *out, *lse;
    long head, last, from, queries; /* heads of keys [head, last); of each `queries` from the from-th on */
    long heads, group, dim, value_dim, seen;
    float scaling;
    int halves;
} work;

static inline long place(const work *w, long q) /* of the q-th query, head by head, among the item's [width, heads * group] */
{
    long head = w->head + q / w->queries, one = w->from + q % w->queries;
    return (one / w->group * w->heads + head) * w->group + one % w->group;
}

/* Widen one head's keys (or values) [s, s + CHUNK) into the chunk, and ask for what is next: a head's keys lie too far apart for the
 * processor to foresee them. */
static void take(const work *w, const char *pages, long dim, long s, long head, float *chunk, long wide)
{
    long size = w->halves ? 2 : 4, stride = size * w->heads * dim, next = head + 1 < w->last ? s : s + CHUNK;
    const char *after = pages + size * (head + 1 < w->last ? head + 1 : w->head) * dim;
    for (long r = next; r < next + CHUNK && r < w->seen; r++)
        for (long b = 0; b < size * dim; b += 64) __builtin_prefetch(after + r * stride + b);
    widen(pages + s * stride + size * head * dim, w->halves, w->seen - s < CHUNK ? w->seen - s : CHUNK, w->heads * dim, dim, chunk, CHUNK, wide);
}

static void over_a_page(const work *w, float *scratch)
{
    long deep = UP(w->dim, LANES), broad = UP(w->value_dim, SIDE * LANES), width = UP(w->seen, CHUNK), n = w->queries;
    long size = w->halves ? 2 : 4, all = (w->last - w->head) * n;
    float *asked = scratch, *sum = asked + all * deep, *weight = sum + all * broad, *chunk = weight + all * width, norm[MOST_QUERIES];

    for (long q = 0; q < all; q++) widen(w->query + size * place(w, q) * w->dim, w->halves, 1, 0, w->dim, asked + q * deep, 1, deep);
    for (long s = 0; s < width; s += CHUNK)
        for (long q = 0, many; q < all; q += many) {
            many = n - q % n < MOST ? n - q % n : MOST;
            if (q % n == 0) take(w, w->keys, w->dim, s, w->head + q / n, chunk, deep);
            for (long k = 0; k < CHUNK; k += SIDE)
                scores[many - 1](asked + q * deep, chunk + k * deep, deep, weight + q * width + s + k, width);
        }
    for (long q = 0; q < all; q++) {
        float top;
        const float *mask = w->mask + (w->from + q % n) / w->group * w->seen;
        norm[q] = normalise(weight + q * width, mask, w->scaling, w->seen, width, &top);
        w->lse[place(w, q)] = top + logf(norm[q]);
    }
    memset(sum, 0, 4 * all * broad);
    for (long s = 0; s < width; s += CHUNK)
        for (long q = 0, many; q < all; q += many) {
            many = n - q % n < MOST ? n - q % n : MOST;
            if (q % n == 0) take(w, w->values, w->value_dim, s, w->head + q / n, chunk, broad);
            for (long v = 0; v < broad; v += SIDE * LANES)
                averages[many - 1](weight + q * width + s, chunk + v, CHUNK, width, broad, sum + q * broad + v);
        }
    for (long q = 0; q < all; q++) {
        float *out = w->out + place(w, q) * w->value_dim;
        for (long v = 0; v < w->value_dim; v++) out[v] = norm[q] == 0 ? 0 : sum[q * broad + v] / norm[q];
    }
}

/* query [items, width, heads * group, dim], items `query_stride` numbers apart (0: one query for all); keys and values
 * [pages, page, heads, …]; numbers [items]: the page of each; mask [items, width or more, seen], items `mask_stride` apart: 0 or -inf for
 * the page's first `seen` keys → out [items, width, heads * group, value_dim]: the page's average; lse [items, width, heads * group]: its
 * log-sum-exp. Returns 0, or 1 without memory.
 */
int attend(const void *query, long query_stride, const void *keys, const void *values, const int64_t *numbers, const float *mask,
           long mask_stride, float *out, float *lse, long items, long width, long heads, long group, long dim, long value_dim, long page,
           long seen, float scaling, int halves, int threads)
{
    long queries = width * group; /* of a head of keys */
    long most = queries < MOST_QUERIES ? queries : MOST_QUERIES, pieces = (queries + most - 1) / most;
    long shares = (threads + items * pieces - 1) / (items * pieces); /* of the heads, so that every thread has work */
    long together = (heads + shares - 1) / shares; /* heads of a piece of work */
    if (together > MOST_QUERIES / most) together = MOST_QUERIES / most;
    long parts = (heads + together - 1) / together, size = halves ? 2 : 4;
    long deep = UP(dim, LANES), broad = UP(value_dim, SIDE * LANES), rows = deep > broad ? deep : broad;
    long need = UP(4 * (together * most * (deep + broad + UP(seen, CHUNK)) + CHUNK * rows), 64);
    int failed = 0;
#pragma omp parallel num_threads(threads) if (items * parts * pieces > 1)
    {
        float *scratch = aligned_alloc(64, need);
        if (!scratch) failed = 1;
#pragma omp for collapse(3) schedule(static)
        for (long i = 0; i < items; i++)
            for (long part = 0; part < parts; part++)
                for (long piece = 0; piece < pieces; piece++) {
                    if (!scratch) continue;
                    long from = piece * most, head = part * together;
                    work w = {(const char *)query + size * i * query_stride,
                              (const char *)keys + size * numbers[i] * page * heads * dim,
                              (const char *)values + size * numbers[i] * page * heads * value_dim,
                              mask + i * mask_stride,
                              out + i * queries * heads * value_dim,
                              lse + i * queries * heads,
                              head, head + together < heads ? head + together : heads, from, queries - from < most ? queries - from : most,
                              heads, group, dim, value_dim, seen, scaling, halves};
                    over_a_page(&w, scratch);
                }
        free(scratch);
    }
    return failed;
}
