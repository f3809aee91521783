/* y = x Wᵀ + b for a matrix W of whole numbers of eight or four bits and few rows x, in float32. Compiled and called by ../native.py.
 *
 * Levels lie in words of 32 bits, as many columns of one output as go into it, the first in the lowest bits. Panels of WIDE outputs:
 * Eight bits, W = level * step, a step per output: panels [ceil(out / WIDE), columns / 4, WIDE].
 * Four bits, W = (level - 8) * step + zero, both per output and GROUP columns: panels of groups. A group is [GROUP / 8, WIDE] words of
 * levels, then WIDE words of its step (bfloat16, lower half) and its zero (upper half).
 *
 * Every output adds its products in the order of the columns, whatever the number of rows: a row's bits do not depend on its neighbours.
 */
#include "lanes.h"

#define WIDE (2 * LANES)
#define MOST 5     /* rows that share one reading of a panel */
#define GROUP 64   /* columns of four bits that share a step */
#define GROUP_WORDS ((GROUP / 8 + 1) * WIDE)
#define AHEAD 1024 /* words to fetch ahead */
#define UNROLL8 _Pragma("GCC unroll 8")
#define ROLLED _Pragma("GCC unroll 1") /* where unrolled levels would leave no registers for the sums */

/* sum [ROWS][2] += x [ROWS, EACH], rows `stride` apart, times EACH columns; LEVEL takes the k-th level out of the words w[v] */
#define COLUMNS(ROWS, EACH, UNROLLED, LEVEL, NEXT)                                                                                      \
    UNROLL8 for (int v = 0; v < 2; v++) w[v] = *(const words *)(word + v * LANES);                                       \
    __builtin_prefetch(word + AHEAD);                                                                                    \
    UNROLLED for (int k = 0; k < EACH; k++) {                                                                            \
        floats level[2];                                                                                                 \
        UNROLL8 for (int v = 0; v < 2; v++) level[v] = __builtin_convertvector(LEVEL, floats), NEXT;                     \
        UNROLL8 for (int r = 0; r < ROWS; r++)                                                                           \
            UNROLL8 for (int v = 0; v < 2; v++) sum[r][v] += level[v] * x[r * stride + k];                               \
    }
/* part [ROWS, WIDE] = x [ROWS, 4 * count] times a panel */
#define EIGHT(ROWS)                                                                                                      \
    static void eight_##ROWS(const uint32_t *word, const float *x, long stride, long count, float *part)                 \
    {                                                                                                                    \
        words w[2];                                                                                                      \
        floats sum[ROWS][2] = {0};                                                                                       \
        for (long c = 0; c < count; c++, word += WIDE, x += 4) {                                                         \
            COLUMNS(ROWS, 4, UNROLL8, (integers)(w[v] << 24) >> 24, w[v] >>= 8)                                                    \
        }                                                                                                                \
        memcpy(part, sum, sizeof sum);                                                                                   \
    }
/* The same of groups; x holds, of each, GROUP numbers and their sum. */
#define FOURS(ROWS, UNROLLED)                                                                                                     \
    static void four_##ROWS(const uint32_t *word, const float *x, long stride, long groups, float *part)                 \
    {                                                                                                                    \
        words w[2];                                                                                                      \
        floats all[ROWS][2] = {0};                                                                                       \
        for (long g = 0; g < groups; g++, x++) {                                                                         \
            floats sum[ROWS][2] = {0};                                                                                   \
            for (long c = 0; c < GROUP / 8; c++, word += WIDE, x += 8) {                                                 \
                COLUMNS(ROWS, 8, UNROLLED, (integers)(w[v] & 15), w[v] >>= 4)                                                        \
            }                                                                                                            \
            for (int v = 0; v < 2; v++, word += LANES) {                                                                 \
                floats step = (floats)(*(const words *)word << 16), zero = (floats)(*(const words *)word & 0xffff0000u); \
                zero -= 8 * step;                                                                                        \
                for (int r = 0; r < ROWS; r++) {                                                                         \
                    all[r][v] += zero * x[r * stride];                                                                   \
                    all[r][v] += step * sum[r][v];                                                                       \
                }                                                                                                        \
            }                                                                                                            \
        }                                                                                                                \
        memcpy(part, all, sizeof all);                                                                                   \
    }
EIGHT(1) EIGHT(2) EIGHT(3) EIGHT(4) EIGHT(5)
FOURS(1, UNROLL8) FOURS(2, UNROLL8) FOURS(3, ROLLED) FOURS(4, ROLLED) FOURS(5, ROLLED)
typedef void block(const uint32_t *, const float *, long, long, float *);
static block *const eights[MOST] = {eight_1, eight_2, eight_3, eight_4, eight_5};
static block *const fours[MOST] = {four_1, four_2, four_3, four_4, four_5};

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
                    if (o < out && j == GROUP / 8) word = steps[o * groups + g];
                    else if (o < out)
                        for (int k = 0; k < 8; k++) word |= (uint32_t)levels[(o * groups + g) * GROUP + 8 * j + k] << 4 * k;
                    panels[((a * groups + g) * (GROUP / 8 + 1) + j) * WIDE + i] = word;
                }
}

/* Numbers that a row of `in` columns takes where it is widened. */
long widened_columns(int bits, long in)
{
    return bits == 4 ? (in + GROUP - 1) / GROUP * (GROUP + 1) : (in + 3) / 4 * 4;
}

static void widen_groups(const void *x, long from, long in, int halves, float *wide)
{
    for (long c = 0; c < in; c += GROUP, wide += GROUP + 1) {
        floats sum = {0};
        widen(x, from + c, in - c < GROUP ? in - c : GROUP, halves, wide, GROUP);
        for (long k = 0; k < GROUP; k += LANES) sum += *(const floats *)(wide + k);
        wide[GROUP] = total(sum);
    }
}

/* x [rows, in] and y [rows, out], both float32 or, with halves, both bfloat16; steps [out] of eight bits; bias [out] or null;
 * wide [rows, widened_columns]: memory. */
void multiply_whole(const uint32_t *panels, int bits, const float *steps, const void *x, float *wide, const float *bias, void *y, long rows,
                    long out, long in, int halves, int threads)
{
    long count = (out + WIDE - 1) / WIDE, stride = widened_columns(bits, in), length = bits == 4 ? stride / (GROUP + 1) : stride / 4;
    long panel = length * (bits == 4 ? GROUP_WORDS : WIDE);
    for (long r = 0; r < rows; r++) {
        if (bits == 4) widen_groups(x, r * in, in, halves, wide + r * stride);
        else widen(x, r * in, in, halves, wide + r * stride, stride);
    }
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * out * in > SMALL)
    for (long a = 0; a < count; a++) {
        float part[MOST * WIDE];
        for (long r = 0, many; r < rows; r += many) {
            many = sharing(rows - r, MOST);
            (bits == 4 ? fours : eights)[many - 1](panels + a * panel, wide + r * stride, stride, length, part);
            hand_out(part, many, WIDE, bits == 8 ? steps : 0, bias, y, r, out, a * WIDE, halves);
        }
    }
}
