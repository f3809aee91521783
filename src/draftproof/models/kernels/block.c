/* The small operations of Llama's block, one call each; fused.py's own lines are their twins. Compiled and called by ../native.py.
 *
 * Numbers are rounded where torch rounds them: after every product, sum and function, in the tensors' own type.
 */
#include <math.h>

#include "lanes.h"

/* y [outer, inner, n] = x / rms(x) * weight over n (Zhang & Sennrich, arXiv 1910.07467); x's outer rows `stride` numbers apart,
 * weight [inner, n]. Squares add over lanes, then over these. */
void norm(const void *x, const void *weight, void *y, long outer, long inner, long n, long stride, float eps, int halves, int threads)
{
#pragma omp parallel for num_threads(threads) if (outer * inner * n > SMALL)
    for (long o = 0; o < outer; o++)
        for (long i = 0; i < inner; i++) {
            const char *from = (const char *)x + (halves ? 2 : 4) * (o * stride + i * n);
            char *to = (char *)y + (halves ? 2 : 4) * (o * inner + i) * n;
            floats squares = {0};
            long c = 0;
            for (; c + LANES <= n; c += LANES) squares += load_lanes(from, c, halves) * load_lanes(from, c, halves);
            for (int j = 0; c + j < n; j++) squares[j] += load(from, c + j, halves) * load(from, c + j, halves);
            float scale = 1 / sqrtf(total(squares) / n + eps);
            for (c = 0; c + LANES <= n; c += LANES)
                store_lanes(to, c, kept_lanes(load_lanes(from, c, halves) * scale, halves) * load_lanes(weight, i * n + c, halves), halves);
            for (; c < n; c++)
                store(to, c, kept(load(from, c, halves) * scale, halves) * load(weight, i * n + c, halves), halves);
        }
}

/* y [rows, heads, dim]: x turned by its position's angles (Su et al., arXiv 2104.09864); x's rows `stride` numbers apart;
 * cos, sin: rows `angles` numbers apart, sin negative in its first half. */
void turn(const void *x, const void *cos, const void *sin, void *y, long rows, long heads, long dim, long stride, long angles, int halves,
          int threads)
{
#pragma omp parallel for num_threads(threads) if (rows * heads * dim > SMALL)
    for (long r = 0; r < rows; r++)
        for (long h = 0; h < heads; h++) {
            const char *from = (const char *)x + (halves ? 2 : 4) * (r * stride + h * dim);
            char *to = (char *)y + (halves ? 2 : 4) * (r * heads + h) * dim;
            for (long side = 0; side < 2; side++) {
                long d = side * dim / 2, end = d + dim / 2, other = dim / 2 - d;
                for (; d + LANES <= end; d += LANES, other += LANES) {
                    floats along = kept_lanes(load_lanes(from, d, halves) * load_lanes(cos, r * angles + d, halves), halves);
                    floats across = kept_lanes(load_lanes(from, other, halves) * load_lanes(sin, r * angles + d, halves), halves);
                    store_lanes(to, d, along + across, halves);
                }
                for (; d < end; d++, other++) {
                    float along = kept(load(from, d, halves) * load(cos, r * angles + d, halves), halves);
                    store(to, d, along + kept(load(from, other, halves) * load(sin, r * angles + d, halves), halves), halves);
                }
            }
        }
}

static inline floats silu(floats x) /* x / (1 + e^-x), by the exponential of what is not positive */
{
    integers negative = x < 0;
    floats e = exponential((floats)((words)x | 0x80000000u)), over = {0};
    over += 1;
    floats top = (floats)(((integers)e & negative) | ((integers)over & ~negative));
    return x * (top / (1 + e));
}

/* y [rows, n] = silu(x[:, :n]) * x[:, n:], x [rows, 2 n] */
void gate(const void *x, void *y, long rows, long n, int halves, int threads)
{
#pragma omp parallel for num_threads(threads) if (rows * n > SMALL)
    for (long r = 0; r < rows; r++) {
        long c = 0, to = r * n, gates = 2 * r * n, ups = gates + n;
        for (; c + LANES <= n; c += LANES)
            store_lanes(y, to + c, kept_lanes(silu(load_lanes(x, gates + c, halves)), halves) * load_lanes(x, ups + c, halves), halves);
        for (; c < n; c++) {
            floats value = {load(x, gates + c, halves)};
            store(y, to + c, kept(silu(value)[0], halves) * load(x, ups + c, halves), halves);
        }
    }
}
