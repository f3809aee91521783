/* Panels of whole numbers of eight or four bits, for linear.c's products.
 *
 * Levels lie in words of 32 bits, as many columns of one output as go into it. Panels of WIDE outputs:
 * Eight bits, W = level * step, a step per output: panels [ceil(out / WIDE), columns / 4, WIDE], the first column in the lowest bits.
 * Four bits, W = (level - 8) * step + zero, both per output and GROUP columns: panels of groups. A group is [GROUP / 8, WIDE] words of
 * levels, even columns in the lower half of a word and odd ones in the upper, the first in its lowest bits; then WIDE words of its step
 * (bfloat16, lower half) and its zero (upper half).
 *
 * Every output adds its products in the order of the columns, whatever the number of rows: a row's bits do not depend on its neighbours.
 */
#include "lanes.h"

#define AHEAD 1024 /* words to fetch ahead */

#if LANES == 16 /* 32 registers; EACH(DO): the rows, and whether the levels of a word are unrolled or leave no registers for the sums */
#define MOST 12
#define EACH(DO) DO(1, UNROLL) DO(2, UNROLL) DO(3, UNROLL) DO(4, UNROLL) DO(5, UNROLL) DO(6, UNROLL)                     \
    DO(7, UNROLL) DO(8, UNROLL) DO(9, UNROLL) DO(10, UNROLL) DO(11, UNROLL) DO(12, UNROLL)
#define OF_TWO 0 /* rows of four bits that meet two panels at a time */
#else /* 16 */
#define MOST 5
#define OF_TWO 1 /* the sums of one panel wait for each other: 0.89 of the time, measured; of eight bits nothing */
#define EACH(DO) DO(1, UNROLL) DO(2, UNROLL) DO(3, UNROLL) DO(4, ROLLED) DO(5, ROLLED)
#endif
#define ROLLED _Pragma("GCC unroll 1")

/* The v-th words of a step: of one panel, or of two adjoining ones, whose steps lie so far apart: a whole panel. */
#define WORDS(V, APART) *(const words *)(panel + (V) / 2 * (APART) + (V) % 2 * LANES)
#define READ(PANELS, APART)                                                                                              \
    for (int q = 0; q < PANELS; q++) fetch(panel + q * (APART) + AHEAD);                                                 \
    UNROLL for (int v = 0; v < 2 * PANELS; v++) w[v] = WORDS(v, APART);
/* sum += what LEVEL makes of the words w[v], times x's j-th column */
#define ADD(ROWS, PANELS, LEVEL, J)                                                                                      \
    UNROLL for (int v = 0; v < 2 * PANELS; v++) level[v] = LEVEL;                                                        \
    UNROLL for (int r = 0; r < ROWS; r++)                                                                                \
        UNROLL for (int v = 0; v < 2 * PANELS; v++) sum[r][v] += level[v] * x[r * stride + (J)];
#define SHIFT(PANELS, BITS) UNROLL for (int v = 0; v < 2 * PANELS; v++) w[v] >>= BITS;

/* part [ROWS, WIDE] += x [ROWS, 4 * count] times a panel */
#define EIGHT(ROWS, UNROLLED)                                                                                            \
    KERNEL(eight_##ROWS)                                                                                                 \
    {                                                                                                                    \
        panel += first * WIDE;                                                                                           \
        const float *x = rows;                                                                                           \
        floats sum[ROWS][2], level[2];                                                                                   \
        words w[2];                                                                                                      \
        TAKE(ROWS, 2)                                                                                                    \
        for (long c = 0; c < count; c++, panel += WIDE, x += 4) {                                                        \
            READ(1, 0)                                                                                                   \
            UNROLLED for (int k = 0; k < 4; k++) {                                                                       \
                ADD(ROWS, 1, __builtin_convertvector((integers)(w[v] << 24) >> 24, floats), k)                           \
                SHIFT(1, 8)                                                                                              \
            }                                                                                                            \
        }                                                                                                                \
        GIVE(ROWS, 2)                                                                                                    \
    }

#define EIGHT_PAIRS(ROWS, UNROLLED)                                                                                      \
    KERNEL(eight_pairs_##ROWS)                                                                                           \
    {                                                                                                                    \
        panel += first * WIDE;                                                                                           \
        const pair *x = rows;                                                                                            \
        floats sum[ROWS][2];                                                                                             \
        words w[2], level[2];                                                                                            \
        TAKE(ROWS, 2)                                                                                                    \
        for (long c = 0; c < count; c++, panel += WIDE, x += 2) {                                                        \
            READ(1, 0)                                                                                                   \
            UNROLL for (int k = 0; k < 2; k++) {                                                                         \
                UNROLL for (int v = 0; v < 2; v++) {                                                                     \
                    words even = (words)__builtin_convertvector((integers)(w[v] << 24) >> 24, floats);                   \
                    words odd = (words)__builtin_convertvector((integers)(w[v] << 16) >> 24, floats);                    \
                    level[v] = even >> 16 | odd;                                                                         \
                }                                                                                                        \
                UNROLL for (int r = 0; r < ROWS; r++)                                                                    \
                    UNROLL for (int v = 0; v < 2; v++) sum[r][v] = plus_pairs(sum[r][v], level[v], x[r * stride + k]);   \
                SHIFT(1, 16)                                                                                             \
            }                                                                                                            \
        }                                                                                                                \
        GIVE(ROWS, 2)                                                                                                    \
    }

/* The same of groups. A level's bits go into those of 1 + level / 16, so W = 16 * step * (1 + level / 16) + zero - 24 * step. x holds, of
 * each group, NUMBERS words of its columns, single or in pairs, and their sum. */
#define GROUPS(NAME, ROWS, PANELS, NUMBERS, WORD)                                                                        \
    KERNEL(NAME##_##ROWS##_##PANELS)                                                                                     \
    {                                                                                                                    \
        panel += first * GROUP_WORDS;                                                                                    \
        const uint32_t *at = rows;                                                                                       \
        floats all[ROWS][2 * PANELS];                                                                                    \
        words w[2 * PANELS];                                                                                             \
        memcpy(all, part, sizeof all);                                                                                   \
        for (long g = 0; g < count; g++, at++) {                                                                         \
            floats sum[ROWS][2 * PANELS] = {0};                                                                          \
            for (long c = 0; c < GROUP / 8; c++, panel += WIDE, at += NUMBERS / (GROUP / 8)) {                           \
                READ(PANELS, apart)                                                                                      \
                WORD                                                                                                     \
            }                                                                                                            \
            for (int v = 0; v < 2 * PANELS; v++) {                                                                       \
                floats step = (floats)(WORDS(v, apart) << 16), zero = (floats)(WORDS(v, apart) & 0xffff0000u);           \
                zero -= 24 * step;                                                                                       \
                step *= 16;                                                                                              \
                for (int r = 0; r < ROWS; r++) {                                                                         \
                    all[r][v] += zero * ((const float *)at)[r * stride];                                                 \
                    all[r][v] += step * sum[r][v];                                                                       \
                }                                                                                                        \
            }                                                                                                            \
            panel += WIDE;                                                                                               \
        }                                                                                                                \
        memcpy(part, all, sizeof all);                                                                                   \
    }
#define FOURS(ROWS, PANELS, UNROLLED)                                                                                    \
    GROUPS(four, ROWS, PANELS, GROUP,                                                                                    \
           const float *x = (const float *)at;                                                                           \
           floats level[2 * PANELS];                                                                                     \
           UNROLLED for (int k = 0; k < 8; k += 2) {                                                                     \
               ADD(ROWS, PANELS, (floats)((w[v] << 19 & 0x780000) | 0x3f800000), k)                                      \
               ADD(ROWS, PANELS, (floats)((w[v] << 3 & 0x780000) | 0x3f800000), k + 1)                                   \
               SHIFT(PANELS, 4)                                                                                          \
           })
#define FOUR(ROWS, UNROLLED) FOURS(ROWS, 1, UNROLLED)
#define FOUR_PAIRS(ROWS, UNROLLED)                                                                                       \
    GROUPS(four_pairs, ROWS, 1, GROUP / 2,                                                                               \
           UNROLL for (int k = 0; k < 4; k++) {                                                                          \
               UNROLL for (int r = 0; r < ROWS; r++)                                                                     \
                   UNROLL for (int v = 0; v < 2; v++)                                                                    \
                       sum[r][v] = plus_pairs(sum[r][v], (w[v] << 3 & 0x780078) | 0x3f803f80, at[r * stride + k]);       \
               SHIFT(1, 4)                                                                                               \
           })
#define EIGHT_NAME(ROWS, UNROLLED) eight_##ROWS,
#define EIGHT_PAIRS_NAME(ROWS, UNROLLED) eight_pairs_##ROWS,
#define FOUR_NAME(ROWS, UNROLLED) four_##ROWS##_1,
#define FOUR_PAIRS_NAME(ROWS, UNROLLED) four_pairs_##ROWS##_1,

EACH(EIGHT) EACH(FOUR)
FOURS(1, 2, UNROLL)
static panel_kernel *const eights[] = {EACH(EIGHT_NAME)}, *const fours[] = {EACH(FOUR_NAME)}, *const fours_of_two[] = {four_1_2};

static void as_words(const void *x, long first, long in, int halves, void *to) { widen(x, first, in, halves, to, (in + 3) / 4 * 4); }

static void as_groups(const void *x, long first, long in, int halves, void *to)
{
    float *wide = to;
    for (long c = 0; c < in; c += GROUP, wide += GROUP + 1) {
        widen(x, first + c, least(GROUP, in - c), halves, wide, GROUP);
        wide[GROUP] = sum_of(wide);
    }
}

#if TAKES_PAIRS
EACH(EIGHT_PAIRS) EACH(FOUR_PAIRS)
static panel_kernel *const eight_pairs[] = {EACH(EIGHT_PAIRS_NAME)}, *const four_pairs[] = {EACH(FOUR_PAIRS_NAME)};

static void as_words_of_pairs(const void *x, long first, long in, int halves, void *to)
{
    (void)halves;
    fill(x, first, in, to, (in + 3) / 4 * 4);
}

static void as_groups_of_pairs(const void *x, long first, long in, int halves, void *to)
{
    float wide[GROUP];
    uint32_t *pairs = to;
    for (long c = 0; c < in; c += GROUP, pairs += GROUP / 2 + 1) {
        long count = least(GROUP, in - c);
        widen(x, first + c, count, halves, wide, GROUP);
        fill(x, first + c, count, pairs, GROUP);
        ((float *)pairs)[GROUP / 2] = sum_of(wide);
    }
}
#endif

form form_of_whole(int bits, long in, int halves)
{
    long four = (in + 3) / 4, groups = (in + GROUP - 1) / GROUP; /* words of eight bits, groups of four bits */
#if TAKES_PAIRS
    if (halves && bits == 8) return (form){MOST, 0, four, 4, four * WIDE, 2, 2 * four, 0, 0, as_words_of_pairs, eight_pairs, 0};
    if (halves)
        return (form){MOST, 0, groups, GROUP, groups * GROUP_WORDS, GROUP / 2 + 1, groups * (GROUP / 2 + 1), 0, 0, as_groups_of_pairs, four_pairs, 0};
#endif
    if (bits == 8) return (form){MOST, 0, four, 4, four * WIDE, 4, 4 * four, 0, 0, as_words, eights, 0};
    return (form){MOST, OF_TWO, groups, GROUP, groups * GROUP_WORDS, GROUP + 1, groups * (GROUP + 1), 0, 0, as_groups, fours, fours_of_two};
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

/* levels [out, groups * GROUP] and steps [out, groups], a step and a zero in a word → panels; what is beyond the outputs is zero. */
void arrange_four(const uint8_t *levels, const uint32_t *steps, uint32_t *panels, long out, long groups, int threads)
{
    long count = (out + WIDE - 1) / WIDE;
#pragma omp parallel for num_threads(threads)
    for (long a = 0; a < count; a++)
        for (long g = 0; g < groups; g++)
            for (long j = 0; j <= GROUP / 8; j++)
                for (long i = 0; i < WIDE; i++) {
                    long o = a * WIDE + i;
                    uint32_t word = 0;
                    const uint8_t *from = levels + (o * groups + g) * GROUP + 8 * j;
                    if (o < out && j == GROUP / 8) word = steps[o * groups + g];
                    else if (o < out)
                        for (int k = 0; k < 8; k++) word |= (uint32_t)from[k] << (k / 2 * 4 + k % 2 * 16);
                    panels[((a * groups + g) * (GROUP / 8 + 1) + j) * WIDE + i] = word;
                }
}
