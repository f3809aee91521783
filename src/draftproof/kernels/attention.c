/* Attention of rows along their paths, over pages of keys and values that are read where they lie. Compiled and called by ../native.py.
 *
 * Every sum has an order of its own, given by places within pages and heads: a score adds the products of a key's even words and those of
 * its odd ones, apart, then both, where a word is a number, or two of bfloat16 (plus_pairs), or, in tiles, in the order of their
 * instruction; a page's softmax adds over the page's lanes; averages add over the keys in turn, and pages one after the other, what came
 * before scaled down where a greater score is met (Milakov & Gimelshein, arXiv 1805.02867). A key that a row does not see adds exactly
 * nothing, if its value is finite. So a row's bits depend on nothing but its query and the keys it sees: not on other rows, on threads, or
 * on where the pages lie.
 */
#include <limits.h>
#include <math.h>
#include <stdlib.h>

#include "lanes.h"

#if REGISTERS == 32
#define MOST 12 /* queries of a micro-kernel of scores */
#define EACH(KIND, NAME, PAIRS) UP_TO_12(KIND, NAME, PAIRS)
#define MOST_OF_VALUES 6
#define EACH_OF_VALUES(KIND, NAME, HALVES) UP_TO_6(KIND, NAME, HALVES)
#else
#define MOST 6
#define EACH(KIND, NAME, PAIRS) UP_TO_6(KIND, NAME, PAIRS)
#define MOST_OF_VALUES 3
#define EACH_OF_VALUES(KIND, NAME, HALVES) UP_TO_3(KIND, NAME, HALVES)
#endif
#define SIDE 4      /* vectors of values of a micro-kernel: MOST_OF_VALUES * SIDE sums fill the registers */
#define MOST_QUERIES 48 /* of a piece of work, over all its heads; more only where one head of keys has more */
#define MOST_NUMBERS 16384 /* of a chunk, over all heads of a piece of work: they stay in the caches */
#define ALL _Pragma("GCC unroll 16")
/* What is read next, into the second cache on Zen 4, whose first one waits for too few lines at a time: 0.81 of a pass's time behind 4,096
 * keys (docs/log.md). */
#define FETCH(FROM) __builtin_prefetch(FROM, 0, ZEN_4 ? 2 : 3)

/* sum + the products of LANES keys' words with a query's */
static inline floats plus(floats sum, words key, uint32_t asked, int pairs)
{
#if TAKES_PAIRS
    if (pairs) return plus_pairs(sum, key, asked);
#endif
    float number;
    memcpy(&number, &asked, 4);
    return sum + (floats)key * number;
}

/* What a word of a key is: a number, two of bfloat16, or four levels; and what values are. */
enum { NUMBERS, PAIRS, LEVELS };

/* to [ROWS, LANES] = query [deep, ROWS], its words `n` apart, times key [deep, CHUNK], and scaled; deep is even */
#define SCORE(NAME, ROWS, PAIRS)                                                                                         \
    static void NAME##_##ROWS##_##PAIRS(const uint32_t *query, long n, const uint32_t *key, long deep, float scale, float *to, long width) \
    {                                                                                                                    \
        floats sum[ROWS][2] = {0};                                                                                       \
        for (long d = 0; d < deep; d += 2)                                                                               \
            UNROLL for (int i = 0; i < 2; i++) {                                                                         \
                words k = *(const words *)(key + (d + i) * CHUNK);                                                       \
                UNROLL for (int r = 0; r < ROWS; r++) sum[r][i] = plus(sum[r][i], k, query[(d + i) * n + r], PAIRS);     \
            }                                                                                                            \
        UNROLL for (int r = 0; r < ROWS; r++) *(floats *)(to + r * width) = (sum[r][0] + sum[r][1]) * scale;             \
    }

/* The same of levels: a query has two words for each of a key's, as products of eight bits take them (lanes.h). */
#define SCORE_OF_LEVELS(NAME, ROWS, KIND)                                                                                \
    static void NAME##_##ROWS##_##KIND(const uint32_t *query, long n, const uint32_t *key, long deep, float scale, float *to, long width) \
    {                                                                                                                    \
        integers sum[ROWS][2] = {0};                                                                                     \
        for (long d = 0; d < deep; d += 2, key += CHUNK) {                                                               \
            words w = *(const words *)key;                                                                               \
            UNROLL for (int i = 0; i < 2; i++) {                                                                         \
                words level = met(w, i);                                                                                 \
                UNROLL for (int r = 0; r < ROWS; r++) sum[r][i] = plus_products(sum[r][i], level, query[(d + i) * n + r]); \
            }                                                                                                            \
        }                                                                                                                \
        UNROLL for (int r = 0; r < ROWS; r++) {                                                                          \
            integers all = TAKES_DOTS ? in_all(sum[r]) : sum[r][0] + sum[r][1];                                          \
            *(floats *)(to + r * width) = __builtin_convertvector(all, floats) * scale;                                  \
        }                                                                                                                \
    }

/* LANES levels. What the compiler makes of the general form takes three times as long. */
static inline integers levels_from(const char *from)
{
#if LANES == 16 && defined __AVX512F__
    return (integers)_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)from));
#elif LANES == 8 && defined __AVX2__
    return (integers)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)from));
#elif LANES == 4
    uint32_t word;
    memcpy(&word, from, 4);
    return (integers)((word + (words){0}) << (words){24, 16, 8, 0}) >> 24;
#else
    typedef int8_t bytes __attribute__((vector_size(LANES), aligned(1)));
    return __builtin_convertvector(*(const bytes *)from, integers);
#endif
}

/* Vector v of some values. Of bfloat16: the even numbers of 2 * LANES, or for odd v the odd ones, which takes no shuffle. */
static inline floats value_lanes(const char *value, int v, int kind)
{
    if (kind == NUMBERS) return ((const floats *)value)[v];
    if (kind == LEVELS) return __builtin_convertvector(levels_from(value + v * LANES), floats);
    words pairs = ((const words *)value)[v / 2];
    return (floats)(v % 2 ? pairs & 0xffff0000u : pairs << 16);
}

#define BYTES(KIND) (KIND == NUMBERS ? 4 : KIND == PAIRS ? 2 : 1) /* of a value */

/* out [ROWS, SIDE * LANES] += weight [ROWS, keys] times value [keys, SIDE * LANES], `apart` bytes from one to the next; keys in turn. What
 * is read next lies `ahead`, and is fetched bit by bit between the products: all at once, they wait for each other. */
#define AVERAGE(NAME, ROWS, KIND)                                                                                        \
    static void NAME##_##ROWS##_##KIND(const float *weight, long width, const char *value, long keys, long apart, long ahead,        \
                                          float *out, long broad)                                                        \
    {                                                                                                                    \
        floats sum[ROWS][SIDE];                                                                                          \
        UNROLL for (int r = 0; r < ROWS; r++)                                                                            \
            UNROLL for (int v = 0; v < SIDE; v++) sum[r][v] = *(const floats *)(out + r * broad + v * LANES);            \
        for (long s = 0; s < keys; s++, value += apart) {                                                                \
            UNROLL for (int b = 0; b < SIDE * LANES * BYTES(KIND); b += 64) FETCH(value + ahead + b);                    \
            UNROLL for (int v = 0; v < SIDE; v++) {                                                                      \
                floats x = value_lanes(value, v, KIND);                                                                  \
                UNROLL for (int r = 0; r < ROWS; r++) sum[r][v] += x * weight[r * width + s];                            \
            }                                                                                                            \
        }                                                                                                                \
        UNROLL for (int r = 0; r < ROWS; r++)                                                                            \
            UNROLL for (int v = 0; v < SIDE; v++) *(floats *)(out + r * broad + v * LANES) = sum[r][v];                  \
    }
EACH(SCORE, score, 0) EACH(SCORE, score, 1) EACH(SCORE_OF_LEVELS, score, 2)
EACH_OF_VALUES(AVERAGE, average, 0) EACH_OF_VALUES(AVERAGE, average, 1) EACH_OF_VALUES(AVERAGE, average, 2)
static typeof(score_1_0) *const scores[3][MOST] = {{EACH(ENTRY, score, 0)}, {EACH(ENTRY, score, 1)}, {EACH(ENTRY, score, 2)}};
static typeof(average_1_0) *const averages[3][MOST_OF_VALUES] = {
    {EACH_OF_VALUES(ENTRY, average, 0)}, {EACH_OF_VALUES(ENTRY, average, 1)}, {EACH_OF_VALUES(ENTRY, average, 2)}};

/* LANES words of a query or key, or those of n numbers, if they are fewer, and zeros */
static inline words words_of(const char *from, long n, int halves, int pairs)
{
    words some;
    if (n >= (pairs ? 2 * LANES : LANES)) return pairs ? *(const words *)from : (words)load_lanes(from, 0, halves);
    if (pairs) fill(from, 0, n, &some, 2 * LANES);
    else widen(from, 0, n, halves, (float *)&some, LANES);
    return some;
}

/* Rows of x [LANES, LANES] that stand `APART` exchange a part of each: numbers, pairs, or fours of them. */
#if LANES == 16
static const integers ONES = {0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29};
static const integers TWOS = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29};
static const integers FOURS = {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27};
#elif LANES == 4
static const integers ONES = {0, 4, 1, 5}, TWOS = {0, 1, 4, 5}, FOURS;
#else
static const integers ONES = {0, 8, 1, 9, 4, 12, 5, 13}, TWOS = {0, 1, 8, 9, 4, 5, 12, 13}, FOURS = {0, 1, 2, 3, 8, 9, 10, 11};
#endif
#define EXCHANGE(APART, FIRST, SECOND)                                                                                   \
    ALL for (int i = 0; i < LANES / 2; i++) {                                                                            \
        int low = i / APART * 2 * APART + i % APART, high = low + APART;                                                 \
        words a = x[low], b = x[high];                                                                                   \
        x[low] = __builtin_shuffle(a, b, FIRST), x[high] = __builtin_shuffle(a, b, SECOND);                              \
    }
#define TURN                                                                                                             \
    EXCHANGE(1, ONES, ONES + 2)                                                                                          \
    EXCHANGE(2, TWOS, TWOS + 2)                                                                                          \
    for (int half = 4; half < LANES; half *= 2) EXCHANGE(half, FOURS, FOURS + 4)
#define TURNED(i) (((i) & ~3) | ((i) & 1) << 1 | ((i) & 2) >> 1) /* the column that row i has become */

/* to [UP(words, LANES), CHUNK]: the words of `count` keys, `apart` bytes from one to the next, and behind them the last one's, which nobody
 * sees. So a query's scores of LANES keys are a vector, and no sum goes across one. */
static inline __attribute__((always_inline)) void turned(const char *from, long count, long apart, long ahead, long dim, int halves,
                                                         int pairs, uint32_t *to)
{
    long step = pairs ? 2 * LANES : LANES;
    for (int k = 0; k < CHUNK; k += LANES) {
        const char *key[LANES];
        for (int i = 0; i < LANES; i++) key[i] = from + (k + i < count ? k + i : count - 1) * apart;
        for (long d = 0; d < dim; d += step) {
            long at = size(halves) * d;
            words x[LANES];
            if (d + step <= dim)
                ALL for (int i = 0; i < LANES; i++) {
                    FETCH(key[i] + at + ahead);
                    x[i] = words_of(key[i] + at, step, halves, pairs);
                }
            else
                for (int i = 0; i < LANES; i++) x[i] = words_of(key[i] + at, dim - d, halves, pairs);
            TURN
            ALL for (int i = 0; i < LANES; i++) *(words *)(to + (d / step * LANES + TURNED(i)) * CHUNK + k) = x[i];
        }
    }
}

/* e to the x for x <= 0, within 2^-17 of it, enough beside values of bfloat16; exactly 0 below -87. A minimax polynomial for 2^t. */
static inline floats near_exponential(floats x)
{
    integers seen = x > -87.0f;
    floats t = x * 1.44269504088896341f, whole = t + 12582912.0f; /* adding 1.5 * 2^23 rounds to an integer */
    words power = (words)whole << 23;
    t -= whole - 12582912.0f;
    t = (((9.58285294e-3f * t + 5.59064262e-2f) * t + 2.40240991e-1f) * t + 6.93124175e-1f) * t + 1.0f;
    return (floats)((integers)((words)t + power) & seen);
}

/* Scores [from, to) of a query, softly capped: near 0 by a fit of tanh(x) / x, within 8e-8, and by the exponential elsewhere; what is no
 * number stays so. */
static void limit_scores(float *weight, long from, long to, float cap)
{
    for (long s = from; s < to; s += LANES) {
        floats *w = (floats *)(weight + s), x = *w / cap, square = x * x;
        floats size = (floats)((words)x & 0x7fffffffu), e = exponential(-2 * size), far = (1 - e) / (1 + e);
        floats near = (((-0.00570498677f * square + 0.020639087f) * square - 0.053739715f) * square + 0.133314422f) * square;
        near = (near - 0.333332819f) * square * x + x;
        far = (floats)((words)far | ((words)x & 0x80000000u));
        *w = either(x == x, cap * either(size < 0.625f, near, far), x);
    }
}

/* weight [from, to), two vectors at a time: scores → exponentials of their distance to the greatest so far, 0 but in [low, high). Returns
 * the scale of what was summed before. */
static float normalise(float *weight, long low, long high, long from, long to, int halves, float *top, float *norm)
{
    floats sum = {0}, none = sum - INFINITY, best[2] = {none, none};
    integers sound = AT >= 0;
    for (long s = from; s < to; s += 2 * LANES)
        UNROLL for (int i = 0; i < 2; i++) {
            long at = s + i * LANES;
            floats *w = (floats *)(weight + at);
            if (at < low || at + LANES > high) *w = either((AT >= (int)(low - at)) & (AT < (int)(high - at)), *w, none);
            best[i] = GREATER(*w, best[i]);
            sound &= *w < INFINITY; /* false for what is not a number, too */
        }
    best[0] = either(sound, GREATER(best[0], best[1]), -none);
    UNROLL for (int half = LANES / 2; half; half /= 2) best[0] = GREATER(best[0], ACROSS(half, best[0]));
    if (best[0][0] == INFINITY) {
        memset(weight + from, 0, 4 * (to - from));
        *norm = NAN; /* and with it all that the row is told */
        return 1;
    }
    float greatest = best[0][0] > *top ? best[0][0] : *top, kept = greatest == *top ? 1 : expf(*top - greatest);
    for (long s = from; s < to; s += LANES) {
        floats *w = (floats *)(weight + s);
        *w = halves ? near_exponential(*w - greatest) : exponential(*w - greatest);
        sum += *w;
    }
    UNROLL for (int half = LANES / 2; half; half /= 2) sum += ACROSS(half, sum);
    *norm = *norm * kept + sum[0];
    *top = greatest;
    return kept;
}

/* Rows [first, end) of a piece of work that read the same keys, in these pages: those before `until`. */
typedef struct {
    const int64_t *pages;
    long first, end, until;
} party;

/* A piece of work: `count` rows with the queries of `heads` heads of keys from `head` on. Queries of a head of keys lie together, row by
 * row: `group` of each row, n in all. asked [heads, deep, n]: their words; tiled: scores are taken in tiles, which read beyond n what nobody is
 * told; step [heads * n]: of queries that meet levels, whose words they are taken times; sum [heads * n, broad], in the order of
 * value_lanes; weight [heads * n, width]; chunk: keys or values of one head. */
typedef struct {
    const attention *a;
    long page, count, head, heads, n, deep, broad, width;
    int kind, tiled;
    float *chunk, *sum, *weight, *top, *norm, *step;
    uint32_t *asked;
    long numbers; /* of its memory, in all */
} piece;

static piece piece_of(const course *c, const attention *a, long count, long head, long heads, float *memory)
{
    int tiled = a->halves && !a->rounded && a->dim % (2 * CHUNK) == 0 && takes_tiles();
    int kind = a->rounded ? LEVELS : (a->halves && TAKES_PAIRS) || tiled ? PAIRS : NUMBERS;
    long n = count * a->group, all = heads * n, deep = kind == NUMBERS ? UP(a->dim, 2) : UP(a->dim, 4) / 2, broad = UP(a->value_dim, SIDE * LANES);
    long width = UP(c->page, 2 * LANES) + CHUNK; /* not a power of two: lines of all queries would meet in one place of the cache */
    long one = CHUNK * UP(a->dim > broad ? a->dim : broad, LANES); /* chunk */
    float *sum = memory + one, *weight = sum + all * broad, *top = weight + all * width;
    long asked = UP(one + all * (broad + width + 3), CHUNK); /* from a line on */
    return (piece){a, c->page, count, head, heads, n, deep, broad, width, kind, tiled, memory, sum, weight, top, top + all, top + 2 * all,
                   (uint32_t *)memory + asked, asked + all * deep + CHUNK};
}

/* The rows of a piece, which begin with row `from` of all: the part of each path, and in front all of them for the keys in common. path:
 * the first of the family. Returns how many parties there are: one more than paths. */
static long gather(const course *c, long path, long from, long count, party *found)
{
    const int64_t *rows = c->row_of + from;
    long parties = 1;
    *found = (party){c->page_of + c->page_start[path], 0, count, 0};
    for (long i = 0; i < count; i = found[parties++].end) {
        while (c->row_start[path + 1] <= from + i) path++;
        party mine = {c->page_of + c->page_start[path], i, c->row_start[path + 1] - from, 0};
        if (mine.end > count) mine.end = count;
        for (long r = i; r < mine.end; r++)
            if (c->position[rows[r]] >= mine.until) mine.until = c->position[rows[r]] + 1;
        if (c->common[path] > found->until) found->until = c->common[path];
        found[parties] = mine;
    }
    return parties;
}

/* A head [dim] of bfloat16 as levels, one byte each, and behind them their step, float32: x is near level * step. The inverse of a step has
 * sixteen bits, so that its product with a number is exact, and rounded once. What is not finite is none afterwards, either. */
static void round_head(const char *from, long dim, char *to)
{
    integers most = (integers){0} + (27 << 23); /* 2^-100: of far less there is no inverse */
    float numbers[SPAN], greatest, inverse, step;
    widen(from, 0, dim, 1, numbers, UP(dim, LANES));
    for (long d = 0; d < dim; d += LANES) most = GREATER(*(const integers *)(numbers + d) & 0x7fffffff, most); /* in the order of sizes */
    UNROLL for (int half = LANES / 2; half; half /= 2) most = GREATER(most, ACROSS(half, most));
    memcpy(&greatest, &(int32_t){most[0]}, 4);
    inverse = 127 / greatest;
    uint32_t word;
    memcpy(&word, &inverse, 4);
    word &= ~255u;
    memcpy(&inverse, &word, 4);
    step = greatest < INFINITY ? 1 / inverse : NAN;
    memcpy(to + dim, &step, 4);
    for (long d = 0; d < dim; d += LANES) {
        integers near = (integers)(*(const floats *)(numbers + d) * inverse + 12582912.0f); /* adding 1.5 * 2^23 rounds to an integer */
        for (long i = 0; i < least(LANES, dim - d); i++) to[d + i] = near[i];
    }
}

/* Keys or values [heads, dim] of a row, to a place of the storage. */
void keep_heads(const char *from, long heads, long dim, int halves, int rounded, char *to)
{
    if (!rounded) memcpy(to, from, heads * size(halves) * dim);
    for (long h = 0; rounded && h < heads; h++) round_head(from + 2 * h * dim, dim, to + h * kept_bytes(dim, 1, 1));
}

/* Bytes of a head, from one to the next. */
static inline long bytes_of(const attention *a, int averaging)
{
    return kept_bytes(averaging ? a->value_dim : a->dim, a->halves, a->rounded);
}

/* Key, or value, `s` of page j as a party has it: of the piece's first head. */
static const char *place(const piece *w, const party *p, long j, long s, int averaging)
{
    long at = (p->pages[j] * w->page + s) * w->a->heads + w->head;
    return (const char *)(averaging ? w->a->values : w->a->keys) + at * bytes_of(w->a, averaging);
}

static inline int values_kind(const attention *a) { return a->rounded ? LEVELS : a->halves ? PAIRS : NUMBERS; }

/* `count` keys of a head, turned, or its values, if they do not fill vectors; what stands behind them there, nobody is told. */
static void bring(const piece *w, const char *from, long count, long apart, long ahead, int averaging)
{
    const attention *a = w->a;
    long each = BYTES(values_kind(a));
    if (averaging)
        for (long k = 0; k < count; k++) memcpy((char *)w->chunk + k * each * w->broad, from + k * apart, each * a->value_dim);
    else if (a->rounded) turned(from, count, apart, ahead, a->dim / 2, 1, 1, (uint32_t *)w->chunk); /* four bytes are a word as two halves are */
    else if (a->halves) turned(from, count, apart, ahead, a->dim, 1, TAKES_PAIRS, (uint32_t *)w->chunk);
    else turned(from, count, apart, ahead, a->dim, 0, 0, (uint32_t *)w->chunk);
}

#if TAKES_TILES
/* to [many, CHUNK]: scores as tiles leave them, found [CHUNK keys, CHUNK queries], scaled. */
static void spread(const float *found, long many, float scale, float *to, long width)
{
    words x[LANES];
    if (many <= 4) {
        for (long r = 0; r < many; r++) *(floats *)(to + r * width) = (floats)_mm512_i32gather_ps((__m512i)(AT * CHUNK), found + r, 4) * scale;
        return;
    }
    ALL for (int i = 0; i < LANES; i++) x[i] = *(const words *)(found + i * CHUNK);
    TURN
    ALL for (int i = 0; i < LANES; i++)
        if (TURNED(i) < many) *(floats *)(to + TURNED(i) * width) = (floats)x[i] * scale;
}

/* Scores of queries [first, last) of a piece's h-th head and the CHUNK keys `from`, of which `count` are there; what the others get is not
 * looked at. */
static void score_tiled(const piece *w, long h, long first, long last, const char *from, long count, long apart, long ahead, float *weight)
{
    _Alignas(64) float found[CHUNK * CHUNK];
    long own = 2 * w->a->dim;
    for (long k = 0; k < count; k++) {
        for (long b = 0; b < own; b += 64) FETCH(from + k * apart + ahead + b);
        if (count < CHUNK) memcpy((char *)w->chunk + k * own, from + k * apart, own); /* the storage may end here */
    }
    if (count < CHUNK) from = (const char *)w->chunk, apart = own;
    for (long q = first; q < last; q += CHUNK) {
        score_in_tiles(from, apart, w->asked + h * w->n * w->deep + q, w->n, w->a->dim, found);
        spread(found, least(CHUNK, last - q), w->a->scaling, weight + q * w->width, w->width);
    }
}
#endif

/* weight [many, CHUNK] times what stands beside the keys, and beside each query, or null: nothing does. */
static inline void by_steps(float *weight, long width, long many, const float *keys, const float *queries)
{
    for (long r = 0; r < many; r++, weight += width)
        for (long k = 0; k < CHUNK; k += LANES) *(floats *)(weight + k) *= *(const floats *)(keys + k) * (queries ? queries[r] : 1);
}

/* CHUNK keys from `s` of page j on: the scores of a party's queries, or the averages of the values. next: what is read after them. */
static void meet(const piece *w, const party *p, long j, long s, int averaging, const char *next)
{
    const attention *a = w->a;
    const char *from = place(w, p, j, s, averaging);
    long own = bytes_of(a, averaging), apart = own * a->heads, ahead = next - from, each = BYTES(values_kind(a));
    long until = p->until - j * w->page, count = least(CHUNK, least(w->page, until) - s);
    int copied = !averaging || a->value_dim != w->broad;
    for (long h = 0; h < w->heads; h++, from += own) {
#if TAKES_TILES
        if (!averaging && w->tiled) {
            score_tiled(w, h, p->first * a->group, p->end * a->group, from, count, apart, ahead, w->weight + h * w->n * w->width + s);
            continue;
        }
#endif
        float steps[CHUNK]; /* of levels; beyond the last key's, nobody is told what they make */
        for (long k = 0; a->rounded && k < CHUNK; k++) memcpy(steps + k, from + least(k, count - 1) * apart + own - 4, 4);
        if (copied) bring(w, from, count, apart, ahead, averaging);
        for (long q = p->first * a->group, last = p->end * a->group, many; q < last; q += many) {
            many = sharing(last - q, averaging ? MOST_OF_VALUES : MOST);
            float *weight = w->weight + (h * w->n + q) * w->width + s, *sum = w->sum + (h * w->n + q) * w->broad;
            for (long k = 0; !averaging && k < CHUNK; k += LANES)
                scores[w->kind][many - 1](w->asked + h * w->n * w->deep + q, w->n, (uint32_t *)w->chunk + k, w->deep, a->scaling,
                                           weight + k, w->width);
            if (a->rounded) by_steps(weight, w->width, many, steps, averaging ? 0 : w->step + h * w->n + q);
            for (long v = 0; averaging && v < w->broad; v += SIDE * LANES)
                averages[values_kind(a)][many - 1](weight, w->width, (copied ? (char *)w->chunk : from) + each * v, count,
                                              copied ? each * w->broad : apart, copied ? 0 : ahead, sum + v, w->broad);
        }
    }
}

/* Chunks [start, end) of page j, by whoever reads them. */
static void over(const piece *w, const party *parties, long count, long j, long start, long end, int averaging)
{
    const party *first = 0, *now = 0; /* each meets its keys when it is known who comes next */
    long s_first = 0, s_now = 0, behind = (j + 1) * w->page;
    for (long s = start; s < end; s += CHUNK)
        for (const party *p = parties; p < parties + count; p++) {
            if (j * w->page + s >= p->until) continue;
            if (now) meet(w, now, j, s_now, averaging, place(w, p, j, s, averaging));
            else first = p, s_first = s;
            now = p, s_now = s;
            if (p == parties) break; /* for all */
        }
    if (!now) return;
    meet(w, now, j, s_now, averaging,
         !averaging ? place(w, first, j, s_first, 1) : now->until > behind ? place(w, now, j + 1, 0, 0) : place(w, now, j, s_now, 1));
}

/* What a query is told: numbers from `at` on of all. */
static void answer(const attention *a, long at, const float *sum, float norm)
{
    for (long v = 0; v < a->value_dim; v += 2 * LANES) {
        floats two[2];
        for (int i = 0; i < 2; i++) two[i] = *(const floats *)(sum + v + i * LANES) / norm + 0; /* -0 tells of keys that nobody sees */
        words pairs = (words)kept_lanes(two[0], 1) >> 16 | (words)kept_lanes(two[1], 1);
        if (a->rounded) /* they stand in order */
            for (int i = 0; i < 2; i++) store_lanes(&pairs, i * LANES, two[i], 1);
        char *to = (char *)a->out + size(a->halves) * (at + v);
        if (v + 2 * LANES > a->value_dim) memcpy(to, a->halves ? (void *)&pairs : two, size(a->halves) * (a->value_dim - v));
        else if (a->halves) memcpy(to, &pairs, sizeof pairs);
        else memcpy(to, two, sizeof two);
    }
}

/* The first key that a row at this position sees. */
static inline long seen_from(long position, long window)
{
    return window < 0 ? position / -window * -window : window && position >= window ? position + 1 - window : 0;
}

/* Rows [from, from + count) of a family, whose first path is `path`, with the queries of a piece's heads of keys. */
static void follow(const course *c, const piece *w, long path, long from)
{
    const attention *a = w->a;
    const int64_t *rows = c->row_of + from;
    long group = a->group, n = w->n, all = w->heads * n, numbers = w->kind == PAIRS ? 2 : 1; /* of a word */
    long between = a->out_stride ? a->out_stride : a->heads * group * a->value_dim;
    party parties[MOST_QUERIES + 1];
    long members = gather(c, path, from, w->count, parties);
    long low = LONG_MAX, to = 0; /* the keys that one of the rows sees at least */
#define COLUMN(q) ((w->head + (q) / n) * group + (q) % group)
#define ROW(q) rows[(q) % n / group]
#define SEEN_FROM(row) seen_from(c->position[row], a->window)

    for (long q = 0; q < all; q++) {
        const char *query = (const char *)a->query + size(a->halves) * (ROW(q) * a->query_stride + COLUMN(q) * a->dim);
        uint32_t *asked = w->asked + q / n * n * w->deep + q % n;
        if (w->kind == LEVELS) {
            uint32_t span[SPAN / 2 + 1];
            as_span(query, 0, a->dim, 1, span);
            for (long d = 0; d < w->deep; d++) asked[d * n] = span[d];
            memcpy(w->step + q, span + SPAN / 2, 4);
        } else for (long d = 0; d < w->deep; d += LANES) {
            words some = words_of(query + size(a->halves) * d * numbers, a->dim - d * numbers, a->halves, w->kind);
            for (long i = 0; i < LANES && d + i < w->deep; i++) asked[(d + i) * n] = some[i];
        }
        w->top[q] = a->sinks ? a->sinks[COLUMN(q)] : -INFINITY;
        w->norm[q] = a->sinks ? 1 : 0;
    }
    for (long i = 0; i < w->count; i++) {
        if (SEEN_FROM(rows[i]) < low) low = SEEN_FROM(rows[i]);
        if (c->position[rows[i]] >= to) to = c->position[rows[i]] + 1;
    }
    memset(w->sum, 0, 4 * all * w->broad);
    for (long j = low / c->page; j * c->page < to; j++) {
        long base = j * c->page, end = least(c->page, to - base), start = low > base ? (low - base) / CHUNK * CHUNK : 0;
        over(w, parties, members, j, start, end, 0);
        for (long q = 0; q < all; q++) {
            long first = SEEN_FROM(ROW(q)) - base, last = c->position[ROW(q)] + 1 - base;
            float *weight = w->weight + q * w->width;
            if (a->cap != 0) limit_scores(weight, start, start + UP(end - start, LANES), a->cap);
            if (c->sight)
                for (long s = start; s < end; s++)
                    if (!c->sight[ROW(q) * c->seen + base + s]) weight[s] = -INFINITY;
            float kept = normalise(weight, most(first, start), least(last, end), start,
                                   start + UP(end - start, 2 * LANES), a->halves, w->top + q, w->norm + q);
            if (kept != 1)
                for (long v = 0; v < w->broad; v++) w->sum[q * w->broad + v] *= kept;
        }
        over(w, parties, members, j, start, end, 1);
    }
    for (long q = 0; q < all; q++)
        answer(a, ROW(q) * between + COLUMN(q) * a->value_dim, w->sum + q * w->broad, w->norm[q]);
}

/* The path behind the family that begins with this one. */
static long behind(const course *c, long path)
{
    do path++;
    while (path < c->paths && c->common[path]);
    return path;
}

/* How the rows of a pass are cut: pieces of at most `most` rows of a family, of `together` of the heads of keys, `parts` times. */
typedef struct {
    long most, pieces, together, parts, bytes; /* bytes: of memory for one thread */
} cut;

static long pieces_of(const course *c, long most)
{
    long pieces = 0;
    for (long i = 0, next; i < c->paths; i = next) {
        next = behind(c, i);
        pieces += (c->row_start[next] - c->row_start[i] + most - 1) / most;
    }
    return pieces;
}

static cut cut_of(const course *c, const attention *a, int threads)
{
    long most = a->group < MOST_QUERIES ? MOST_QUERIES / a->group : 1, longest = 1;
    for (long i = 0, next; i < c->paths; i = next) {
        next = behind(c, i);
        if (c->row_start[next] - c->row_start[i] > longest) longest = c->row_start[next] - c->row_start[i];
    }
    if (most > longest) most = longest;
    /* heads that threads cannot share equally: each takes some rows of all heads, if they outweigh bringing the keys once more */
    if (a->heads % threads && longest >= 2 * threads && pieces_of(c, most) < threads) most = (longest + threads - 1) / threads;
    long pieces = pieces_of(c, most), widest = a->dim > a->value_dim ? a->dim : a->value_dim;
    long together = MOST_QUERIES / (most * a->group), fitting = MOST_NUMBERS / (CHUNK * widest); /* heads of keys of a piece */
    if (together > fitting) together = fitting;
    if (together < 1) together = 1;
    long shares = pieces ? (threads + pieces - 1) / pieces : 1;
    long parts = UP((a->heads + together - 1) / together, shares); /* every thread has as many */
    if (parts > a->heads) parts = a->heads;
    together = (a->heads + parts - 1) / parts;
    return (cut){most, pieces, together, (a->heads + together - 1) / together, UP(4 * piece_of(c, a, most, 0, together, 0).numbers, 64)};
}

/* All rows of a pass, by a team, which joins at the end; failed: set where there is no memory. Each thread takes memory of its own: side by
 * side in one block, long texts took half as long again, measured. */
void attended(const member *me, const course *c, const attention *a, int *failed)
{
    const cut how = cut_of(c, a, me->of);
    float *own = aligned_alloc(64, how.bytes);
    if (!own) __atomic_store_n(failed, 1, __ATOMIC_RELAXED);
    for (long task; own && (task = taken(me)) < how.pieces * how.parts;) {
        long path, next = 0, first = task / how.parts * how.most, rows = 0, head = task % how.parts * how.together;
        do {
            first -= UP(rows, how.most);
            path = next, next = behind(c, path);
            rows = c->row_start[next] - c->row_start[path];
        } while (first >= rows);
        piece w = piece_of(c, a, rows - first < how.most ? rows - first : how.most, head,
                           a->heads - head < how.together ? a->heads - head : how.together, own);
        follow(c, &w, path, c->row_start[path] + first);
    }
    free(own);
    leave_tiles();
    join(me);
}

/* The same by a team of its own. Returns 0, or 1 without memory. */
int attend(const course *c, const attention *a, int threads)
{
    int failed = 0;
    TOGETHER(threads, threads > 1, attended(me, c, a, &failed));
    return failed;
}
