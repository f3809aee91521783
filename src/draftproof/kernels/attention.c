/* Attention of rows along their paths, over pages of keys and values that are read where they lie. Compiled and called by ../native.py.
 *
 * Every sum has an order of its own, given by places within pages and heads: scores add over the head's lanes, a page's softmax over the
 * page's lanes, averages over the keys in turn, pages one after the other, what came before scaled down where a greater score is met
 * (Milakov & Gimelshein, arXiv 1805.02867). A key that a row does not see adds exactly nothing. So a row's bits depend on nothing but
 * its query and the keys it sees: not on other rows, on threads, or on where the pages lie.
 */
#include <limits.h>
#include <math.h>
#include <stdlib.h>

#include "lanes.h"

#if LANES == 16 /* 32 registers */
#define MOST 6 /* queries of a micro-kernel */
#define EACH(DO, HALVES) DO(1, HALVES) DO(2, HALVES) DO(3, HALVES) DO(4, HALVES) DO(5, HALVES) DO(6, HALVES)
#else
#define MOST 3
#define EACH(DO, HALVES) DO(1, HALVES) DO(2, HALVES) DO(3, HALVES)
#endif
#define SIDE 4      /* keys, or vectors of values, of a micro-kernel: MOST * SIDE sums fill the registers */
#define MOST_QUERIES 48 /* of a piece of work, over all its heads; more only where one head of keys has more */
#define MOST_NUMBERS 16384 /* of a chunk, over all heads of a piece of work: they stay in the caches */

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

/* The same numbers of the next chunk. One by one between the products: all at once, they wait for each other. */
#define NEXT(from, i, halves) __builtin_prefetch((const char *)(from) + size(halves) * ((i) + CHUNK * stride))

/* score [ROWS, SIDE] = query [ROWS, dim] · key [SIDE, dim], keys `stride` numbers apart */
#define SCORE(ROWS, HALVES)                                                                                              \
    static void score_##ROWS##_##HALVES(const float *query, const void *key, long stride, long dim, float *score, long width)           \
    {                                                                                                                    \
        floats sum[ROWS][SIDE] = {0};                                                                                    \
        for (long d = 0; d < dim; d += LANES) {                                                                          \
            floats q[ROWS];                                                                                              \
            UNROLL for (int r = 0; r < ROWS; r++) q[r] = *(const floats *)(query + r * dim + d);                         \
            UNROLL for (int s = 0; s < SIDE; s++) {                                                                      \
                floats k = load_lanes(key, s * stride + d, HALVES);                                                      \
                NEXT(key, s * stride + d, HALVES);                                                                       \
                UNROLL for (int r = 0; r < ROWS; r++) sum[r][s] += q[r] * k;                                             \
            }                                                                                                            \
        }                                                                                                                \
        for (int r = 0; r < ROWS; r++) totals(sum[r], score + r * width);                                                \
    }
/* out [ROWS, SIDE * LANES] += weight [ROWS, keys] times value [keys, SIDE * LANES], `stride` numbers apart, from `at` on; keys in turn */
#define AVERAGE(ROWS, HALVES)                                                                                            \
    static void average_##ROWS##_##HALVES(const float *weight, const void *value, long stride, long at, long width, long dim, float *out) \
    {                                                                                                                    \
        floats sum[ROWS][SIDE];                                                                                          \
        for (int r = 0; r < ROWS; r++) memcpy(sum[r], out + r * dim, sizeof sum[r]);                                     \
        for (long s = 0; s < CHUNK; s++) {                                                                               \
            UNROLL for (int v = 0; v < SIDE; v++) {                                                                      \
                floats x = load_lanes(value, s * stride + at + v * LANES, HALVES);                                       \
                NEXT(value, s * stride + at + v * LANES, HALVES);                                                        \
                UNROLL for (int r = 0; r < ROWS; r++) sum[r][v] += x * weight[r * width + s];                            \
            }                                                                                                            \
        }                                                                                                                \
        for (int r = 0; r < ROWS; r++) memcpy(out + r * dim, sum[r], sizeof sum[r]);                                     \
    }
EACH(SCORE, 0) EACH(SCORE, 1) EACH(AVERAGE, 0) EACH(AVERAGE, 1)
typedef void score(const float *, const void *, long, long, float *, long);
typedef void average(const float *, const void *, long, long, long, long, float *);
#define SCORE_NAME(ROWS, HALVES) score_##ROWS##_##HALVES,
#define AVERAGE_NAME(ROWS, HALVES) average_##ROWS##_##HALVES,
static score *const scores[2][MOST] = {{EACH(SCORE_NAME, 0)}, {EACH(SCORE_NAME, 1)}};
static average *const averages[2][MOST] = {{EACH(AVERAGE_NAME, 0)}, {EACH(AVERAGE_NAME, 1)}};

/* weight [from, to): scores → exponentials of their distance to the greatest so far, 0 but in [low, high). Returns the scale of what was
 * summed before. */
static float normalise(float *weight, long low, long high, long from, long to, float scaling, float *top, float *norm)
{
    if (high <= low) {
        memset(weight + from, 0, 4 * (to - from));
        return 1;
    }
    for (long s = from; s < low; s++) weight[s] = -INFINITY;
    for (long s = low; s < high; s++) weight[s] *= scaling;
    for (long s = high; s < to; s++) weight[s] = -INFINITY;
    floats best = *(const floats *)(weight + from), sum = {0};
    integers sound = best < INFINITY; /* false for what is not a number, too */
    for (long s = from + LANES; s < to; s += LANES) {
        floats w = *(const floats *)(weight + s);
        integers more = w > best;
        best = (floats)(((integers)w & more) | ((integers)best & ~more));
        sound &= w < INFINITY;
    }
    float greatest = *top;
    for (int i = 0; i < LANES; i++) {
        if (!sound[i]) {
            memset(weight + from, 0, 4 * (to - from));
            *norm = NAN; /* and with it all that the row is told */
            return 1;
        }
        if (best[i] > greatest) greatest = best[i];
    }
    float kept = greatest == *top ? 1 : expf(*top - greatest);
    for (long s = from; s < to; s += LANES) {
        floats *w = (floats *)(weight + s);
        *w = exponential(*w - greatest);
        sum += *w;
    }
    *norm = *norm * kept + total(sum);
    *top = greatest;
    return kept;
}

/* CHUNK keys, or values, of some heads: numbers from one key to the next, and from one head to the next. */
typedef struct {
    const char *from;
    long key, head;
    int halves;
} view;

/* Those from `s` on of `count` heads, read where they lie if they are whole: heads that fill vectors, and no key at `end` or behind. Others
 * are copied, to [count, CHUNK, wide] and zeros. */
static view look(const attention *a, const void *pages, long dim, long at, long head, long count, long s, long end, float *to, long wide)
{
    long stride = a->heads * dim;
    const char *from = (const char *)pages + size(a->halves) * ((at + s) * stride + head * dim);
    if (dim == wide && s + CHUNK <= end) return (view){from, stride, dim, a->halves};
    for (long h = 0; h < count; h++)
        for (long r = 0; r < CHUNK; r++) {
            float *row = to + (h * CHUNK + r) * wide;
            if (s + r < end) widen(from, r * stride + h * dim, dim, a->halves, row, wide);
            else memset(row, 0, 4 * wide);
        }
    return (view){(const char *)to, wide, CHUNK * wide, 0};
}

static const char *of_head(view v, long head) { return v.from + size(v.halves) * head * v.head; }

/* Numbers of a thread's memory for `queries` over `heads` heads of keys. */
static long needed(const course *c, const attention *a, long queries, long heads)
{
    long deep = UP(a->dim, LANES), broad = UP(a->value_dim, SIDE * LANES);
    return queries * (deep + broad + UP(c->page, CHUNK) + 2) + heads * CHUNK * (deep > broad ? deep : broad);
}

/* Rows [first, end) of a piece of work that read the same keys, in these pages: those before `until`. */
typedef struct {
    const int64_t *pages;
    long first, end, until;
} party;

/* A piece of work: `count` rows with the queries of `heads` heads of keys from `head` on. Queries of a head of keys lie together, row by
 * row: `group` of each row, n in all. */
typedef struct {
    const attention *a;
    long count, head, heads, n, deep, broad, width;
    float *asked, *sum, *weight, *chunk;
} piece;

/* The rows of a piece, which begin with row `from` of all: the part of each path, and in front all of them for the `common` keys. path: the
 * first of the family. Returns how many parties there are: one more than paths. */
static long gather(const course *c, long path, long from, long count, party *found, long *common)
{
    const int64_t *rows = c->row_of + from;
    long parties = 1;
    *found = (party){c->page_of + c->page_start[path], 0, count, LONG_MAX};
    *common = 0;
    for (long i = 0; i < count; i = found[parties++].end) {
        while (c->row_start[path + 1] <= from + i) path++;
        party mine = {c->page_of + c->page_start[path], i, c->row_start[path + 1] - from, 0};
        if (mine.end > count) mine.end = count;
        for (long r = i; r < mine.end; r++)
            if (c->position[rows[r]] >= mine.until) mine.until = c->position[rows[r]] + 1;
        if (c->common[path] > *common) *common = c->common[path];
        found[parties] = mine;
    }
    return parties;
}

/* CHUNK keys from `s` of page j on: the scores of a party's queries, or the averages of the values. */
static void meet(const piece *w, const party *p, long page, long j, long s, int averaging)
{
    const attention *a = w->a;
    long until = p->until - j * page, end = until < page ? until : page;
    view seen = look(a, averaging ? a->values : a->keys, averaging ? a->value_dim : a->dim, p->pages[j] * page, w->head, w->heads, s, end,
                     w->chunk, averaging ? w->broad : w->deep);
    long apart = seen.key * size(seen.halves);
    for (long h = 0; h < w->heads; h++) {
        const char *from = of_head(seen, h);
        long last = h * w->n + p->end * a->group;
        for (long q = h * w->n + p->first * a->group, many; q < last; q += many) {
            many = sharing(last - q, MOST);
            float *weight = w->weight + q * w->width + s;
            if (averaging)
                for (long v = 0; v < w->broad; v += SIDE * LANES)
                    averages[seen.halves][many - 1](weight, from, seen.key, v, w->width, w->broad, w->sum + q * w->broad + v);
            else
                for (long k = 0; k < CHUNK; k += SIDE)
                    scores[seen.halves][many - 1](w->asked + q * w->deep, from + k * apart, seen.key, w->deep, weight + k, w->width);
        }
    }
}

/* The same over chunks [start, end) of page j, by whoever reads them. */
static void over(const piece *w, const party *parties, long count, long common, long page, long j, long start, long end, int averaging)
{
    for (long s = start; s < end; s += CHUNK) {
        if (j * page + s < common) meet(w, parties, page, j, s, averaging);
        else
            for (const party *p = parties + 1; p < parties + count; p++)
                if (j * page + s < p->until) meet(w, p, page, j, s, averaging);
    }
}

/* Rows [from, from + count) of a family, whose first path is `path`, with the queries of `heads` heads of keys from `head` on. */
static void follow(const course *c, const attention *a, long path, long from, long count, long head, long heads, float *scratch)
{
    long deep = UP(a->dim, LANES), broad = UP(a->value_dim, SIDE * LANES), width = UP(c->page, CHUNK);
    long group = a->group, n = count * group, all = heads * n; /* queries of a head of keys, and of all */
    float *asked = scratch, *sum = asked + all * deep, *weight = sum + all * broad, *top = weight + all * width, *norm = top + all;
    const piece work = {a, count, head, heads, n, deep, broad, width, asked, sum, weight, norm + all};
    const int64_t *rows = c->row_of + from;
    party parties[MOST_QUERIES + 1];
    long common, members = gather(c, path, from, count, parties, &common);
    long low = LONG_MAX, to = 0; /* the keys that one of the rows sees at least */
#define COLUMN(q) ((head + (q) / n) * group + (q) % group)
#define ROW(q) rows[(q) % n / group]
#define SEEN_FROM(row) (a->window && c->position[row] >= a->window ? c->position[row] + 1 - a->window : 0)

    for (long q = 0; q < all; q++) {
        widen(a->query, ROW(q) * a->query_stride + COLUMN(q) * a->dim, a->dim, a->halves, asked + q * deep, deep);
        top[q] = a->sinks ? a->sinks[COLUMN(q)] : -INFINITY;
        norm[q] = a->sinks ? 1 : 0;
    }
    for (long i = 0; i < count; i++) {
        if (SEEN_FROM(rows[i]) < low) low = SEEN_FROM(rows[i]);
        if (c->position[rows[i]] >= to) to = c->position[rows[i]] + 1;
    }
    memset(sum, 0, 4 * all * broad);
    for (long j = low / c->page; j * c->page < to; j++) {
        long base = j * c->page, end = to - base < c->page ? to - base : c->page, start = low > base ? (low - base) / CHUNK * CHUNK : 0;
        over(&work, parties, members, common, c->page, j, start, end, 0);
        for (long q = 0; q < all; q++) {
            long first = SEEN_FROM(ROW(q)) - base, last = c->position[ROW(q)] + 1 - base;
            if (c->sight)
                for (long s = start; s < end; s++)
                    if (!c->sight[ROW(q) * c->seen + base + s]) weight[q * width + s] = -INFINITY;
            float kept = normalise(weight + q * width, first > start ? first : start, last < end ? last : end, start, UP(end, CHUNK),
                                   a->scaling, top + q, norm + q);
            if (kept != 1)
                for (long v = 0; v < broad; v++) sum[q * broad + v] *= kept;
        }
        over(&work, parties, members, common, c->page, j, start, end, 1);
    }
    for (long q = 0; q < all; q++) {
        long at = (ROW(q) * a->heads * group + COLUMN(q)) * a->value_dim, v = 0;
        for (; v + LANES <= a->value_dim; v += LANES) store_lanes(a->out, at + v, *(floats *)(sum + q * broad + v) / norm[q], a->halves);
        for (; v < a->value_dim; v++) store(a->out, at + v, sum[q * broad + v] / norm[q], a->halves);
    }
}

/* The path behind the family that begins with this one. */
static long behind(const course *c, long path)
{
    do path++;
    while (path < c->paths && c->common[path]);
    return path;
}

/* All rows of a pass. Returns 0, or 1 without memory. */
int attend(const course *c, const attention *a, int threads)
{
    long most = a->group < MOST_QUERIES ? MOST_QUERIES / a->group : 1, pieces = 0, longest = 1; /* rows of a piece of work */
    for (long i = 0, next; i < c->paths; i = next) {
        next = behind(c, i);
        long rows = c->row_start[next] - c->row_start[i];
        pieces += (rows + most - 1) / most;
        if (rows > longest) longest = rows;
    }
    if (!pieces) return 0;
    if (most > longest) most = longest;
    long widest = a->dim > a->value_dim ? a->dim : a->value_dim;
    long together = MOST_QUERIES / (most * a->group), fitting = MOST_NUMBERS / (CHUNK * widest); /* heads of keys of a piece */
    if (together > fitting) together = fitting;
    if (together < 1) together = 1;
    long shares = (threads + pieces - 1) / pieces, parts = UP((a->heads + together - 1) / together, shares); /* every thread has as many */
    if (parts > a->heads) parts = a->heads;
    together = (a->heads + parts - 1) / parts;
    parts = (a->heads + together - 1) / together;
    long need = UP(4 * needed(c, a, together * most * a->group, together), 64);
    int failed = 0;
#pragma omp parallel num_threads(threads) if (pieces * parts > 1)
    {
        float *scratch = aligned_alloc(64, need);
        if (!scratch) failed = 1;
#pragma omp for schedule(dynamic)
        for (long task = 0; task < pieces * parts; task++) {
            if (!scratch) continue;
            long path, next = 0, first = task / parts * most, rows = 0, head = task % parts * together;
            do {
                first -= UP(rows, most);
                path = next, next = behind(c, path);
                rows = c->row_start[next] - c->row_start[path];
            } while (first >= rows);
            follow(c, a, path, c->row_start[path] + first, rows - first < most ? rows - first : most, head,
                   a->heads - head < together ? a->heads - head : together, scratch);
        }
        free(scratch);
    }
    return failed;
}
