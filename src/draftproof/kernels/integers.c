/* Panels of whole numbers of eight or four bits, for linear.c's products.
 *
 * Levels lie in words of 32 bits, as many columns of one output as go into it. Panels of WIDE outputs:
 * Eight bits, W = level * step, a step per output: panels [ceil(out / WIDE), columns / 4, WIDE], the first column in the lowest bits.
 * Four bits, W = (level - 8) * step + zero, both per output and GROUP columns: panels of groups. A group is [GROUP / 8, WIDE] words of
 * levels, even columns in the lower half of a word and odd ones in the upper, the first in its lowest bits; then WIDE words of its step
 * (bfloat16, lower half) and its zero (upper half).
 * Four bits in groups of 32 or 16 columns, W = (number - zero) * step: such groups behind a HEAD with the sixteen numbers, bytes, that
 * levels stand for; a word of step and zero is `levels_beside`'s. So E2M1 is whole numbers, too: twice its values, and twelve more.
 *
 * SPAN columns of a row that meets eight bits, or a group that meet four, are whole numbers times a step, too (lanes.h, `in_whole`). So
 * their products and sums are whole numbers, which have no order, and groups follow one another: a row's bits depend on the row alone.
 */
#include <limits.h>

#include "lanes.h"

#define AHEAD(PANELS) ((PANELS) == 1 ? 1024 : 512) /* words to fetch ahead, measured */
#define FETCHES(ROWS) (!ZEN_4 || (ROWS) > 1) /* Zen 4 fetches better by itself for one row, and worse for more */

#define AT_ONCE 2 /* groups, opened: they fit the first cache, beside the rows'; four take 4 % longer for 13 to 32 rows, 4 % less for 300 */

#if LANES == 16 /* 32 registers; ALL levels of a word are unrolled, or by ONE: they leave no registers for the sums */
#define MOST 12
#define EACH(KIND, NAME) UP_TO_12(KIND, NAME, 1, ALL)
#define MOST_OF_TWO (TAKES_PAIRS ? 0 : 5) /* two streams are faster on Intel's; of AMD's, one was where it was measured */
#define EACH_OF_TWO(KIND, NAME) UP_TO_5(KIND, NAME, 2, ALL)
#elif TAKES_DOTS
#define MOST 6
#define EACH(KIND, NAME) UP_TO_6(KIND, NAME, 1, ALL)
#define MOST_OF_TWO 0
#define EACH_OF_TWO(KIND, NAME)
#else /* 16 */
#define MOST 5
#define EACH(KIND, NAME) UP_TO_3(KIND, NAME, 1, ALL) KIND(NAME, 4, 1, ONE) KIND(NAME, 5, 1, ONE)
#define MOST_OF_TWO 0
#define EACH_OF_TWO(KIND, NAME)
#endif
#define UNROLL_ALL UNROLL
#define UNROLL_ONE _Pragma("GCC unroll 1")

/* Rows that meet panels as they lie. Zen 4 multiplies a vector in the time in which it would open another, so that twelve rows' opening
 * costs little there, and reading opened panels, once for each twelve rows, more: 1.12 to 1.45 times the time of all (docs/log.md). */
#define DIRECT (ZEN_4 ? LONG_MAX : MOST)

/* The words of a step */
#define READ(ROWS, PANELS)                                                                                               \
    if (FETCHES(ROWS)) UNROLL for (int q = 0; q < PANELS; q++) fetch(panel + q * apart + AHEAD(PANELS));                 \
    UNROLL for (int v = 0; v < 2 * PANELS; v++) w[v] = *(const words *)(panel + v / 2 * apart + v % 2 * LANES);

#if TAKES_DOTS
#define LOW 0x0f0f0f0f /* the levels of four bits that a word begins with */
#define BETWEEN 0      /* bytes between levels */
#else
#define LOW 0xf000f
#define BETWEEN 0x80008000u
#endif

/* part [ROWS, WIDE * PANELS] += x [ROWS, 4 * count], of a span, times PANELS adjoining panels. Of four columns x has the even ones and the
 * odd ones, or all, in parts; behind them the step. */
#define STRIDE_OF_EIGHT (SPAN / 2 + 16)
#define EIGHT(NAME, ROWS, PANELS, TURNS)                                                                                 \
    KERNEL(NAME##_##ROWS##_##PANELS)                                                                                     \
    {                                                                                                                    \
        panel += first * WIDE;                                                                                           \
        const uint32_t *x = rows;                                                                                        \
        const float *step = (const float *)(x + SPAN / 2);                                                               \
        floats sum[ROWS][2 * PANELS];                                                                                    \
        integers whole[ROWS][2 * PANELS][PARTS] = {0};                                                                   \
        words w[2 * PANELS], level[2 * PANELS];                                                                          \
        TAKE(ROWS, 2 * PANELS)                                                                                           \
        for (long c = 0; c < count; c++, panel += WIDE, x += 2) {                                                        \
            READ(ROWS, PANELS)                                                                                           \
            UNROLL_##TURNS for (int k = 0; k < 2; k++) {                                                                 \
                UNROLL for (int v = 0; v < 2 * PANELS; v++) level[v] = met(w[v], k);                                     \
                UNROLL for (int r = 0; r < ROWS; r++)                                                                    \
                    UNROLL for (int v = 0; v < 2 * PANELS; v++)                                                          \
                        whole[r][v][k % PARTS] = plus_products(whole[r][v][k % PARTS], level[v], x[r * stride + k]);     \
            }                                                                                                            \
        }                                                                                                                \
        UNROLL for (int r = 0; r < ROWS; r++)                                                                            \
            UNROLL for (int v = 0; v < 2 * PANELS; v++)                                                                  \
                sum[r][v] = plus_span(sum[r][v], in_all(whole[r][v]), step[r * stride]);                                 \
        GIVE(ROWS, 2 * PANELS)                                                                                           \
    }

/* The same of groups of SIZE columns: of each, x holds its columns in pairs, their step and their sum. */
#define NUMBERS(SIZE) ((SIZE) / 2 + 2)
#define FOURS(NAME, SIZE, START, level_of, scales_of, ROWS, PANELS, TURNS)                                               \
    KERNEL(NAME##_##ROWS##_##PANELS)                                                                                     \
    {                                                                                                                    \
        const words table = *(const words *)panel;                                                                       \
        (void)table;                                                                                                     \
        panel += START + first * (SIZE / 8 + 1) * WIDE;                                                                  \
        const uint32_t *x = rows;                                                                                        \
        floats sum[ROWS][2 * PANELS];                                                                                    \
        TAKE(ROWS, 2 * PANELS)                                                                                           \
        for (long g = 0; g < count; g++, panel += WIDE, x += 2) {                                                        \
            integers whole[ROWS][2 * PANELS][PARTS] = {0};                                                               \
            words w[2 * PANELS], level[2 * PANELS];                                                                      \
            for (long c = 0; c < SIZE / 8; c++, panel += WIDE, x += 4) {                                                 \
                READ(ROWS, PANELS)                                                                                       \
                UNROLL_##TURNS for (int k = 0; k < 4; k++) {                                                             \
                    UNROLL for (int v = 0; v < 2 * PANELS; v++) level[v] = level_of(w[v] & LOW);                         \
                    UNROLL for (int r = 0; r < ROWS; r++)                                                                \
                        UNROLL for (int v = 0; v < 2 * PANELS; v++)                                                      \
                            whole[r][v][k % PARTS] = plus_products(whole[r][v][k % PARTS], level[v], x[r * stride + k]); \
                    if (k % PARTS == PARTS - 1) UNROLL for (int v = 0; v < 2 * PANELS; v++) w[v] >>= 4;                  \
                }                                                                                                        \
            }                                                                                                            \
            READ(ROWS, PANELS)                                                                                           \
            UNROLL for (int v = 0; v < 2 * PANELS; v++) {                                                                \
                const levels of = scales_of(w[v]);                                                                       \
                UNROLL for (int r = 0; r < ROWS; r++)                                                                    \
                    sum[r][v] = plus_group(sum[r][v], of, in_all(whole[r][v]), (const float *)(x + r * stride));         \
            }                                                                                                            \
        }                                                                                                                \
        GIVE(ROWS, 2 * PANELS)                                                                                           \
    }
/* Levels as they are, or looked up in a panel's head. */
#define AS_THEY_ARE(LEVELS) (LEVELS)
#define LOOKED_UP(LEVELS) IN_LANES(shuffle, table, (LEVELS) | BETWEEN)
#define FOUR(NAME, ROWS, PANELS, TURNS) FOURS(NAME, GROUP, 0, AS_THEY_ARE, levels_of, ROWS, PANELS, TURNS)
#define BY_32(NAME, ROWS, PANELS, TURNS) FOURS(NAME, 32, HEAD, LOOKED_UP, levels_beside, ROWS, PANELS, TURNS)
#define BY_16(NAME, ROWS, PANELS, TURNS) FOURS(NAME, 16, HEAD, LOOKED_UP, levels_beside, ROWS, PANELS, TURNS)

/* Dots have little to open, or nothing, and meet panels as they lie. */
#if TAKES_DOTS
#define IF_OPENED(...)
#else
#define IF_OPENED(...) __VA_ARGS__
/* The levels of steps in words of two columns each, as the kernels take them, for many rows: of eight bits [count, 2, WIDE], of four
 * [count, SIZE / 2 + 1, WIDE], with the words of steps and zeros. */
static void open_eight(const uint32_t *panel, long first, long count, spares *left, uint32_t *to)
{
    (void)left;
    panel += first * WIDE;
    for (long c = 0; c < count; c++, panel += WIDE, to += 2 * WIDE)
        for (int v = 0; v < 2; v++) {
            signs w = *(const signs *)(panel + v * LANES);
            *(signs *)(to + v * LANES) = w << 8 >> 8;
            *(signs *)(to + WIDE + v * LANES) = w >> 8;
        }
}

#endif

#define OPEN_FOURS(NAME, SIZE, START, level_of)                                                                          \
    static void open_##NAME(const uint32_t *panel, long first, long count, spares *left, uint32_t *to)                   \
    {                                                                                                                    \
        const words table = *(const words *)panel;                                                                       \
        (void)left, (void)table;                                                                                         \
        panel += START + first * (SIZE / 8 + 1) * WIDE;                                                                  \
        for (long g = 0; g < count; g++, panel += WIDE, to += WIDE) {                                                    \
            for (long c = 0; c < SIZE / 8; c++, panel += WIDE, to += 4 * WIDE)                                           \
                for (int v = 0; v < 2; v++) {                                                                            \
                    words w = *(const words *)(panel + v * LANES);                                                       \
                    for (int k = 0; k < 4; k++, w >>= 4) *(words *)(to + k * WIDE + v * LANES) = level_of(w & 0xf000f);  \
                }                                                                                                        \
            memcpy(to, panel, 4 * WIDE);                                                                                 \
        }                                                                                                                \
    }

#define PLUS_OPENED(ROWS)                                                                                                \
    __builtin_prefetch(next);                                                                                            \
    UNROLL for (int r = 0; r < ROWS; r++)                                                                                \
        UNROLL for (int v = 0; v < 2; v++) whole[r][v] = plus_products(whole[r][v], *(const words *)(panel + v * LANES), x[r * stride]);

/* part [ROWS, WIDE] += x times opened steps: of eight bits all of a span. */
#define OPENED_EIGHT(NAME, ROWS, PANELS)                                                                                 \
    KERNEL(NAME##_##ROWS##_##PANELS)                                                                                     \
    {                                                                                                                    \
        const uint32_t *x = rows, *next = beside->words;                                                                 \
        const float *step = (const float *)(x + SPAN / 2);                                                               \
        integers whole[ROWS][2] = {0};                                                                                   \
        for (long c = 0; c < 2 * count; c++, panel += WIDE, x++, next += apart) { PLUS_OPENED(ROWS) }                    \
        UNROLL for (int r = 0; r < ROWS; r++)                                                                            \
            UNROLL for (int v = 0; v < 2; v++, part += LANES)                                                            \
                *(floats *)part = plus_span(*(const floats *)part, whole[r][v], step[r * stride]);                       \
    }
#define OPENED_FOURS(NAME, SIZE, scales_of, ROWS)                                                                        \
    KERNEL(NAME##_##ROWS##_1)                                                                                            \
    {                                                                                                                    \
        const uint32_t *x = rows, *next = beside->words;                                                                 \
        for (long g = 0; g < count; g++, panel += WIDE, x += 2, next += apart) {                                         \
            integers whole[ROWS][2] = {0};                                                                               \
            for (long c = 0; c < SIZE / 2; c++, panel += WIDE, x++, next += apart) { PLUS_OPENED(ROWS) }                 \
            __builtin_prefetch(next);                                                                                    \
            UNROLL for (int v = 0; v < 2; v++) {                                                                         \
                const levels of = scales_of(*(const words *)(panel + v * LANES));                                        \
                UNROLL for (int r = 0; r < ROWS; r++) {                                                                  \
                    floats *sum = (floats *)(part + r * WIDE + v * LANES);                                               \
                    *sum = plus_group(*sum, of, whole[r][v], (const float *)(x + r * stride));                           \
                }                                                                                                        \
            }                                                                                                            \
        }                                                                                                                \
    }
#define OPENED_FOUR(NAME, ROWS, PANELS) OPENED_FOURS(NAME, GROUP, levels_of, ROWS)
#define OPENED_BY_32(NAME, ROWS, PANELS) OPENED_FOURS(NAME, 32, levels_beside, ROWS)
#define OPENED_BY_16(NAME, ROWS, PANELS) OPENED_FOURS(NAME, 16, levels_beside, ROWS)

/* The kernels of a kind and their lists. */
#define LISTS(NAME, KIND)                                                                                                \
    LIST(NAME, KIND, EACH) LIST(NAME##_of_two, KIND, EACH_OF_TWO) IF_OPENED(LIST(opened_##NAME, OPENED_##KIND, EACH_OPENED))
LISTS(eights, EIGHT)
IF_OPENED(OPEN_FOURS(four, GROUP, 0, AS_THEY_ARE))
LISTS(fours, FOUR)
#if TAKES_TABLES
IF_OPENED(OPEN_FOURS(by_32, 32, HEAD, LOOKED_UP))
LISTS(fours_by_32, BY_32)
IF_OPENED(OPEN_FOURS(by_16, 16, HEAD, LOOKED_UP))
LISTS(fours_by_16, BY_16)
#endif

/* A whole number where a kernel takes it: the at-th of a row's, or of fours of them. */
static inline void put_whole(void *to, long at, int32_t whole)
{
#if TAKES_DOTS
    int8_t *parts = (int8_t *)to + at / 4 * 8 + at % 4;
    parts[0] = whole >> 7, parts[4] = whole & 127;
#else
    ((int16_t *)to)[at] = whole;
#endif
}

/* n numbers of x, from the `first` on, as eight bits meet them: words of whole numbers, and at SPAN / 2 their step. */
void as_span(const void *x, long first, long n, int halves, void *to)
{
    int32_t whole[SPAN];
    in_whole(x, first, n, halves, SIZE_OF_EIGHT, whole, UP(n, LANES), (float *)to + SPAN / 2);
    for (long k = 0; k < UP(n, 4); k++) put_whole(to, TAKES_DOTS ? k : (k & ~3) + (k % 2 * 2 + k % 4 / 2), whole[k]);
}

static inline void as_fours(const void *x, long first, long in, int halves, void *to, long size)
{
    int16_t *columns = to;
    for (long c = 0; c < in; c += size, columns += 2 * NUMBERS(size)) {
        int32_t whole[GROUP];
        float *scales = (float *)(columns + size);
        long sum = in_whole(x, first + c, least(size, in - c), halves, SIZE_OF_FOUR, whole, size, scales);
        scales[1] = scales[0] * sum;
        for (long k = 0; k < size; k++)
            put_whole(columns, TAKES_DOTS ? (k & ~7) + (k / 2 % 2 * 4 + k % 2 * 2 + k % 8 / 4) : k, whole[k]);
    }
}

static void as_groups(const void *x, long first, long in, int halves, void *to) { as_fours(x, first, in, halves, to, GROUP); }

#if TAKES_TABLES
static void as_32(const void *x, long first, long in, int halves, void *to) { as_fours(x, first, in, halves, to, 32); }

static void as_16(const void *x, long first, long in, int halves, void *to) { as_fours(x, first, in, halves, to, 16); }
#endif

form form_of_whole(int bits, long in)
{
    if (bits == 8) {
        long four = (in + 3) / 4;
        return (form){.most = MOST, .most_of_two = MOST_OF_TWO, .length = four, .columns = 4, .words = four * WIDE,
                      .stride = STRIDE_OF_EIGHT, .block = SPAN / 4, .prepare = as_span, .one = eights, .two = eights_of_two,
                      IF_OPENED(.direct = DIRECT, .at_once = SPAN / 4, .lines = 2, .open = open_eight, .opened = opened_eights)};
    }
    long size = bits == 4 ? GROUP : -bits, groups = (in + size - 1) / size, numbers = NUMBERS(size);
    form f = {.most = MOST, .most_of_two = MOST_OF_TWO, .length = groups, .columns = size, .words = groups * (size / 8 + 1) * WIDE,
              .apart = numbers, .stride = groups * numbers, .prepare = as_groups, .one = fours, .two = fours_of_two,
              IF_OPENED(.direct = DIRECT, .at_once = AT_ONCE * GROUP / size, .lines = size / 2 + 1, .open = open_four,
                        .opened = opened_fours)};
    if (bits == 4) return f;
    f.words += HEAD;
#if TAKES_TABLES
    int small = bits == FOUR_BY_16;
    f.prepare = small ? as_16 : as_32, f.one = small ? fours_by_16 : fours_by_32;
    f.two = small ? fours_by_16_of_two : fours_by_32_of_two;
    IF_OPENED(f.open = small ? open_by_16 : open_by_32, f.opened = small ? opened_fours_by_16 : opened_fours_by_32;)
#endif
    return f;
}

/* levels [out, in] → panels; what is beyond the matrix is zero. */
void arrange_eight(const int8_t *levels, uint32_t *panels, long out, long in, int threads)
{
    long count = (out + WIDE - 1) / WIDE, length = (in + 3) / 4;
#pragma omp parallel for num_threads(threads)
    for (long a = 0; a < count; a++)
        for (long c = 0; c < length; c++)
            for (long i = 0; i < WIDE; i++) {
                long o = a * WIDE + i;
                uint32_t word = 0;
                for (int k = 0; k < 4 && o < out && 4 * c + k < in; k++) word |= (uint32_t)(uint8_t)levels[o * in + 4 * c + k] << 8 * k;
                panels[(a * length + c) * WIDE + i] = word;
            }
}

/* levels [out, groups * size] and steps [out, groups], a step and a zero in a word → panels, which begin with a table [16] if there is one;
 * what is beyond the outputs is zero. */
void arrange_four(const uint8_t *levels, const uint32_t *steps, const uint8_t *table, uint32_t *panels, long out, long groups, long size,
                  int threads)
{
    long count = (out + WIDE - 1) / WIDE, words = size / 8 + 1, head = table ? HEAD : 0;
#pragma omp parallel for num_threads(threads)
    for (long a = 0; a < count; a++) {
        uint32_t *to = panels + a * (head + groups * words * WIDE);
        for (long i = 0; i < head; i++) memcpy(to++, table + i % 4 * 4, 4);
        for (long g = 0; g < groups; g++)
            for (long j = 0; j < words; j++)
                for (long i = 0; i < WIDE; i++) {
                    long o = a * WIDE + i;
                    uint32_t word = 0;
                    const uint8_t *from = levels + (o * groups + g) * size + 8 * j;
                    if (o < out && j == size / 8) word = steps[o * groups + g];
                    else if (o < out)
                        for (int k = 0; k < 8; k++) word |= (uint32_t)from[k] << (k / 2 * 4 + k % 2 * 16);
                    *to++ = word;
                }
    }
}
