/* y = x Wᵀ + b for a bfloat16 matrix W and few rows x, in float32, at the speed of memory. Compiled and called by ../native.py.
 *
 * W [out, in] lies in panels of WIDE outputs. A panel holds, for each pair of columns, WIDE words of 32 bits: the even column's
 * bfloat16 in the lower half, the odd column's in the upper half. A shift or a mask makes a float32 of each.
 *
 * Every output is one chain of fused multiply-adds over the columns in order, whatever the number of rows: a row's bits do not
 * depend on its neighbours. Up to MOST rows share one reading of a panel, as many as the accumulators leave registers for.
 */
#include "lanes.h"

#define WIDE (2 * LANES)
#define MOST 6
#define AHEAD(PANELS) ((PANELS) == 1 ? 1024 : 256) /* words to fetch ahead, measured: 4 KB of one stream, 1 KB of each of two */

/* part [ROWS, WIDE * PANELS] = x [ROWS, 2 * pairs] times PANELS adjoining panels. */
#define BLOCK(ROWS, PANELS)                                                                                              \
    static void block_##ROWS##_##PANELS(const uint32_t *panel, const float *x, long pairs, float *part)                  \
    {                                                                                                                    \
        floats sum[ROWS][2 * PANELS] = {0};                                                                              \
        words w[2 * PANELS];                                                                                             \
        for (long p = 0; p < pairs; p++) {                                                                               \
            for (int q = 0; q < PANELS; q++)                                                                             \
                __builtin_prefetch(panel + (q * pairs + p) * WIDE + AHEAD(PANELS));                                      \
            UNROLL for (int v = 0; v < 2 * PANELS; v++)                                                                  \
                w[v] = *(const words *)(panel + (v / 2 * pairs + p) * WIDE + v % 2 * LANES) << 16;                       \
            UNROLL for (int r = 0; r < ROWS; r++)                                                                        \
                UNROLL for (int v = 0; v < 2 * PANELS; v++) sum[r][v] += (floats)w[v] * x[2 * (r * pairs + p)];          \
            UNROLL for (int v = 0; v < 2 * PANELS; v++)                                                                  \
                w[v] = *(const words *)(panel + (v / 2 * pairs + p) * WIDE + v % 2 * LANES) & 0xffff0000u;               \
            UNROLL for (int r = 0; r < ROWS; r++)                                                                        \
                UNROLL for (int v = 0; v < 2 * PANELS; v++) sum[r][v] += (floats)w[v] * x[2 * (r * pairs + p) + 1];      \
        }                                                                                                                \
        memcpy(part, sum, sizeof sum);                                                                                   \
    }
BLOCK(1, 1) BLOCK(2, 1) BLOCK(3, 1) BLOCK(4, 1) BLOCK(5, 1) BLOCK(6, 1)
BLOCK(1, 2) BLOCK(2, 2) BLOCK(3, 2) /* few rows leave registers for a second panel, and more sums at a time hide their delay */
typedef void block(const uint32_t *, const float *, long, float *);
static block *const blocks[2][MOST] = {{block_1_1, block_2_1, block_3_1, block_4_1, block_5_1, block_6_1},
                                       {block_1_2, block_2_2, block_3_2}};

long wide(void) { return WIDE; }

/* weight [out, in] → panels [ceil(out / WIDE), ceil(in / 2), WIDE]; what is beyond the matrix is zero. */
void arrange(const uint16_t *weight, uint32_t *panels, long out, long in, int threads)
{
    long count = (out + WIDE - 1) / WIDE, pairs = (in + 1) / 2;
#pragma omp parallel for num_threads(threads)
    for (long a = 0; a < count; a++)
        for (long p = 0; p < pairs; p++)
            for (long i = 0; i < WIDE; i++) {
                const uint16_t *from = weight + (a * WIDE + i) * in + 2 * p;
                int inside = a * WIDE + i < out;
                uint32_t even = inside ? from[0] : 0, odd = inside && 2 * p + 1 < in ? from[1] : 0;
                panels[(a * pairs + p) * WIDE + i] = even | odd << 16;
            }
}

/* x [rows, in] and y [rows, out], both float32 or, with halves, both bfloat16; bias [out] in float32 or null;
 * even [rows, 2 * ceil(in / 2)]: where x is widened and filled up to whole pairs, or null if it is both already. */
void multiply(const uint32_t *panels, const void *x, float *even, const float *bias, void *y, long rows, long out, long in, int halves,
              int threads)
{
    long count = (out + WIDE - 1) / WIDE, pairs = (in + 1) / 2, step = rows <= MOST / 2 ? 2 : 1;
    const float *from = even ? even : x;
    for (long r = 0; even && r < rows; r++) widen(x, r * in, in, halves, even + 2 * r * pairs, 2 * pairs);
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * out * in > SMALL)
    for (long a = 0; a < count; a += step) {
        long panels_here = step == 2 && a + 1 < count ? 2 : 1;
        float part[MOST * WIDE]; /* MOST rows of one panel, or half of them of two */
        for (long r = 0, many; r < rows; r += many) {
            many = sharing(rows - r, MOST);
            blocks[panels_here - 1][many - 1](panels + a * pairs * WIDE, from + 2 * r * pairs, pairs, part);
            hand_out(part, many, panels_here * WIDE, 0, bias, y, r, out, a * WIDE, halves);
        }
    }
}
