/* Llama's block, and its small operations; fused.py's own lines are their twins. Compiled and called by ../native.py.
 *
 * Numbers are rounded where torch rounds them: after every product, sum and function, in the tensors' own type.
 */
#include <math.h>
#include <stdlib.h>

#include "lanes.h"

#define FEW 8192 /* numbers that one thread finishes before a second has woken */

/* y [outer, inner, n] = x / rms(x) * weight over n (Zhang & Sennrich, arXiv 1910.07467); x's outer rows `stride` numbers apart,
 * weight [inner, n]. Squares add over lanes, then over these. */
void norm(const void *x, const void *weight, void *y, long outer, long inner, long n, long stride, float eps, int halves, int threads)
{
#pragma omp parallel for num_threads(threads) if (outer * inner * n > FEW)
    for (long o = 0; o < outer; o++)
        for (long i = 0; i < inner; i++) {
            const char *from = (const char *)x + size(halves) * (o * stride + i * n);
            char *to = (char *)y + size(halves) * (o * inner + i) * n;
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
#pragma omp parallel for num_threads(threads) if (rows * heads * dim > FEW)
    for (long r = 0; r < rows; r++)
        for (long h = 0; h < heads; h++) {
            const char *from = (const char *)x + size(halves) * (r * stride + h * dim);
            char *to = (char *)y + size(halves) * (r * heads + h) * dim;
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
    long vectors = n / LANES;
#pragma omp parallel for num_threads(threads) if (rows * n > FEW)
    for (long i = 0; i < rows * vectors; i++) {
        long r = i / vectors, c = i % vectors * LANES, gates = 2 * r * n, ups = gates + n;
        store_lanes(y, r * n + c, kept_lanes(silu(load_lanes(x, gates + c, halves)), halves) * load_lanes(x, ups + c, halves), halves);
    }
    for (long r = 0; r < rows; r++)
        for (long c = vectors * LANES, gates = 2 * r * n, ups = gates + n; c < n; c++) {
            floats value = {load(x, gates + c, halves)};
            store(y, r * n + c, kept(silu(value)[0], halves) * load(x, ups + c, halves), halves);
        }
}

static void add(void *x, const void *y, long n, int halves) /* x += y */
{
    long i = 0;
    for (; i + LANES <= n; i += LANES) store_lanes(x, i, load_lanes(x, i, halves) + load_lanes(y, i, halves), halves);
    for (; i < n; i++) store(x, i, load(x, i, halves) + load(y, i, halves), halves);
}

/* Within each of `count` stores, whose rows have sizes[i] bytes: for each of n moves [n, 3], from, to and how many, the rows from `from` on
 * to `to`. */
void copy_rows(void *const *stores, const long *sizes, long count, const int64_t *moves, long n, int threads)
{
    long rows = 0;
    for (long m = 0; m < n; m++) rows += moves[3 * m + 2];
#pragma omp parallel for num_threads(threads) if (count * rows * sizes[0] > 8 * FEW)
    for (long i = 0; i < count; i++)
        for (const int64_t *move = moves; move < moves + 3 * n; move += 3)
            memcpy((char *)stores[i] + move[1] * sizes[i], (char *)stores[i] + move[0] * sizes[i], move[2] * sizes[i]);
}

static long most(long a, long b) { return a > b ? a : b; }

/* What a layer's first product reads [rows, qkv.in], in `to`; `room` [rows, hidden]. */
static void enter(const layer *l, void *x, const void *beside, void *to, void *room, long rows, int halves, int threads)
{
    long hidden = l->o.out, bytes = size(halves) * hidden;
    if (l->of_stream) {
        for (int side = 0; side < 2; side++) {
            norm(side ? x : beside, side ? l->of_stream : l->before, room, rows, 1, hidden, hidden, l->before_eps, halves, threads);
            for (long r = 0; r < rows; r++) memcpy((char *)to + (2 * r + side) * bytes, (char *)room + r * bytes, bytes);
        }
        if (l->normed) memcpy(x, room, rows * bytes);
    } else if (l->before) {
        norm(x, l->before, to, rows, 1, hidden, hidden, l->before_eps, halves, threads);
    } else {
        memcpy(to, x, rows * bytes);
    }
}

/* `count` layers one after the other, over x [rows, hidden], which is overwritten: the rows of `courses` courses, one after the other.
 * beside [rows, hidden], or null: what a layer with `of_stream` reads, too. cos, sin as `turn` takes them. Returns 0, or 1 without memory. */
int blocks(const layer *layers, long count, const course *first_course, long courses, void *x, const void *beside, const void *cos,
           const void *sin, long angles, int halves, int threads)
{
    long rows = 0, each = size(halves), a = 0, b = 0, d = 0, e = 0;
    for (const course *c = first_course; c < first_course + courses; c++) rows += c->rows;
    for (const layer *l = layers; l < layers + count; l++) {
        long turned = (l->heads + l->kv_heads) * l->dim;
        a = most(a, most(turned, most(l->qkv.in, l->o.out)));
        b = most(b, most(most(l->gate_up.out, l->qkv.out), l->o.out));
        d = most(d, most(turned, l->down.in));
        const product *products[] = {&l->qkv, &l->o, &l->gate_up, &l->down};
        for (int i = 0; i < 4; i++) e = most(e, room_of(products[i]->bits, products[i]->in, halves, rows));
    }
    uint32_t *room = malloc(rows * (4 * e + each * (a + b + d)));
    char *first = (char *)(room + rows * e), *second = first + rows * each * a, *third = second + rows * each * b;
    if (!room) return 1;
    int failed = 0;
    for (const layer *l = layers; l < layers + count; l++) {
        long hidden = l->o.out, turned = l->heads + l->kv_heads, row = l->qkv.out, at = 0; /* at: the course's first row */
        enter(l, x, beside, first, second, rows, halves, threads);
        failed |= multiply(&l->qkv, first, room, second, rows, halves, threads);
        if (l->of_heads) norm(second, l->of_heads, first, rows, turned, l->dim, row, l->heads_eps, halves, threads);
        const char *turning = l->of_heads ? first : second;
        turn(turning, cos, sin, third, rows, turned, l->dim, l->of_heads ? turned * l->dim : row, angles, halves, threads);
        for (const course *c = first_course; c < first_course + courses; at += c->rows, c++) {
            long key = each * l->kv_heads * l->dim, number = l - layers;
            char *query = third + each * at * turned * l->dim, *here = second + each * at * row;
            char *keys = c->own ? (char *)c->own + 2 * number * c->room * key : l->keys;
            char *values = c->own ? keys + c->room * key : l->values;
            for (long i = 0; i < c->writes; i++) {
                memcpy(keys + c->write_to[i] * key, query + each * (c->write_from[i] * turned + l->heads) * l->dim, key);
                memcpy(values + c->write_to[i] * key, here + each * (c->write_from[i] * row + turned * l->dim), key);
            }
            attention asked = {query, keys, values, 0, first + each * at * l->heads * l->dim, turned * l->dim, l->kv_heads,
                               l->heads / l->kv_heads, l->dim, l->dim, l->window, l->scaling, halves};
            failed |= attend(c, &asked, threads);
        }
        failed |= multiply(&l->o, first, room, second, rows, halves, threads);
        add(x, second, rows * hidden, halves);
        norm(x, l->after, first, rows, 1, hidden, hidden, l->after_eps, halves, threads);
        failed |= multiply(&l->gate_up, first, room, second, rows, halves, threads);
        gate(second, third, rows, l->gate_up.out / 2, halves, threads);
        failed |= multiply(&l->down, third, room, first, rows, halves, threads);
        add(x, first, rows * hidden, halves);
    }
    free(room);
    return failed;
}
