/* Llama's block, and its small operations; fused.py's own lines are their twins. Compiled and called by ../native.py.
 *
 * Numbers are rounded where torch rounds them: after every product, sum and function, in the tensors' own type.
 */
#include <math.h>
#include <stdlib.h>

#include "lanes.h"

#define FEW 8192 /* numbers that one thread finishes before a second has woken */

/* y [n] = (x - mean) / deviation * weight + bias (Ba et al., arXiv 1607.06450), rounded once. */
static void centred_row(const char *from, const float *weight, const float *bias, float eps, char *to, long n, int halves)
{
    floats sums = {0}, squares = {0};
    long c = 0;
    for (; c + LANES <= n; c += LANES) sums += load_lanes(from, c, halves);
    for (int j = 0; c + j < n; j++) sums[j] += load(from, c + j, halves);
    float mean = total(sums) / n;
    for (c = 0; c + LANES <= n; c += LANES) squares += (load_lanes(from, c, halves) - mean) * (load_lanes(from, c, halves) - mean);
    for (int j = 0; c + j < n; j++) squares[j] += (load(from, c + j, halves) - mean) * (load(from, c + j, halves) - mean);
    float factor = 1 / sqrtf(total(squares) / n + eps);
    for (c = 0; c + LANES <= n; c += LANES)
        store_lanes(to, c, (load_lanes(from, c, halves) - mean) * factor * load_lanes(weight, c, 0) + load_lanes(bias, c, 0), halves);
    for (; c < n; c++) store(to, c, (load(from, c, halves) - mean) * factor * weight[c] + bias[c], halves);
}

/* y [inner, n] = x / rms(x) * weight over n (Zhang & Sennrich, arXiv 1910.07467), weight [inner, n]; or, with a bias, centred. Squares add
 * over lanes, then over these. */
void norm_of_row(const char *from, const scale *by, char *to, long inner, long n, int halves)
{
    int early = halves && !by->late;
    for (long i = 0; i < inner; i++, from += size(halves) * n, to += size(halves) * n) {
        if (by->bias) {
            centred_row(from, (const float *)by->weight + i * n, by->bias + i * n, by->eps, to, n, halves);
            continue;
        }
        floats squares = {0};
        long c = 0;
        for (; c + LANES <= n; c += LANES) squares += load_lanes(from, c, halves) * load_lanes(from, c, halves);
        for (int j = 0; c + j < n; j++) squares[j] += load(from, c + j, halves) * load(from, c + j, halves);
        float factor = 1 / sqrtf(total(squares) / n + by->eps);
        for (c = 0; c + LANES <= n; c += LANES)
            store_lanes(to, c, kept_lanes(load_lanes(from, c, halves) * factor, early) * load_lanes(by->weight, i * n + c, early), halves);
        for (; c < n; c++) store(to, c, kept(load(from, c, halves) * factor, early) * load(by->weight, i * n + c, early), halves);
    }
}

/* Of x's outer rows, which are `stride` numbers apart: y [outer, inner, n]. */
void norm(const void *x, const scale *by, void *y, long outer, long inner, long n, long stride, int halves, int threads)
{
    long each = size(halves);
#pragma omp parallel for num_threads(threads) if (outer * inner * n > FEW)
    for (long o = 0; o < outer; o++)
        norm_of_row((const char *)x + each * o * stride, by, (char *)y + each * o * inner * n, inner, n, halves);
}

/* y [heads, dim]: of x's heads the first `turned` numbers turned by a position's angles (Su et al., arXiv 2104.09864): cos, and sin,
 * negative in its first half; sharp: they are float32, and what they make is rounded once. */
void turn_row(const char *from, const void *cos, const void *sin, char *to, long heads, long dim, long turned, int sharp, int halves)
{
    int early = halves && !sharp;
    long all = size(halves) * dim, first = size(halves) * turned;
    for (long h = 0; h < heads; h++, from += all, to += all) {
        for (long side = 0; side < 2; side++) {
            long d = side * turned / 2, end = d + turned / 2, other = turned / 2 - d;
            for (; d + LANES <= end; d += LANES, other += LANES) {
                floats along = kept_lanes(load_lanes(from, d, halves) * load_lanes(cos, d, early), early);
                floats across = kept_lanes(load_lanes(from, other, halves) * load_lanes(sin, d, early), early);
                store_lanes(to, d, along + across, halves);
            }
            for (; d < end; d++, other++) {
                float along = kept(load(from, d, halves) * load(cos, d, early), early);
                store(to, d, along + kept(load(from, other, halves) * load(sin, d, early), early), halves);
            }
        }
        memcpy(to + first, from + first, all - first);
    }
}

/* Of x's rows, which are `stride` numbers apart, and cos's and sin's, which are `angles` apart: y [rows, heads, dim]. */
void turn(const void *x, const void *cos, const void *sin, void *y, long rows, long heads, long dim, long turned, long stride, long angles,
          int sharp, int halves, int threads)
{
    long each = size(halves), apart = size(halves && !sharp) * angles;
#pragma omp parallel for num_threads(threads) if (rows * heads * dim > FEW)
    for (long r = 0; r < rows; r++)
        turn_row((const char *)x + each * r * stride, (const char *)cos + r * apart, (const char *)sin + r * apart,
                 (char *)y + each * r * heads * dim, heads, dim, turned, sharp, halves);
}

/* silu, or the approximation of gelu by a hyperbolic tangent (Hendrycks & Gimpel, arXiv 1606.08415), which is a sigmoid. */
static inline floats act(floats x, int gelu) { return x * sigmoid(gelu ? 1.5957691216f * (x + 0.044715f * x * x * x) : x); }

/* gelu itself, x times the normal law's share below x: of the tail beyond |x| a fit of e^(z^2) erfc(z) in 1 / (1 + z / 2), z = |x| / sqrt 2,
 * within 2e-6 of each value. */
static inline floats whole_gelu(floats x)
{
    floats z = (floats)((words)x & 0x7fffffffu) * 0.70710678f, t = 1 / (0.5f * z + 1);
    floats tail = ((0.0882060751f * t - 0.356743902f) * t + 0.38923198f) * t + 0.037885759f;
    tail = (((tail * t + 0.281505495f) * t + 0.277581841f) * t + 0.282331437f) * t;
    tail *= 0.5f * exponential(-z * z);
    return x * either(x < 0, tail, 1 - tail);
}

/* Any function of an MLP's: SILU … of lanes.h. */
static inline floats function(floats x, int which)
{
    if (which == GELU) return whole_gelu(x);
    if (which == SIGMOID) return sigmoid(x);
    if (which == SOFTPLUS) return softplus(x);
    if (which == RELU) return either(x <= 0, (floats){0}, x);
    if (which == RELU_SQUARED) return either(x <= 0, (floats){0}, x * x); /* what is no number stays so */
    return act(x, which);
}

/* y [to) = act(x) * x, n further on: numbers from `from` on of a row. */
static inline __attribute__((always_inline)) void gate_row(const char *x, char *y, long n, long from, long to, int which, int halves)
{
    long c = from;
    for (; c + LANES <= to; c += LANES)
        store_lanes(y, c, kept_lanes(function(load_lanes(x, c, halves), which), halves) * load_lanes(x, n + c, halves), halves);
    for (; c < to; c++) {
        floats value = {load(x, c, halves)};
        store(y, c, kept(function(value, which)[0], halves) * load(x, n + c, halves), halves);
    }
}

/* The same without what stands n further on. */
static void act_row(const char *x, char *y, long from, long to, int which, int halves)
{
    long c = from;
    for (; c + LANES <= to; c += LANES) store_lanes(y, c, function(load_lanes(x, c, halves), which), halves);
    for (; c < to; c++) {
        floats value = {load(x, c, halves)};
        store(y, c, function(value, which)[0], halves);
    }
}

/* y [rows, n] = act(x[:, :n]) * x[:, n:], x [rows, 2 n], or, `alone`, act(x), x [rows, n]; by a team: a row's parts begin with whole
 * vectors. */
void gated(const member *me, const void *x, void *y, long rows, long n, int alone, int which, int halves)
{
    long parts = rows % me->of ? me->of : 1, vectors = n / LANES, each = size(halves);
    MINE(i, rows * parts) {
        long r = i / parts, part = i % parts, from = part * vectors / parts * LANES;
        long to = part + 1 == parts ? n : (part + 1) * vectors / parts * LANES;
        char *at = (char *)y + each * r * n;
        if (alone) act_row((const char *)x + each * r * n, at, from, to, which, halves);
        else if (which == SILU) gate_row((const char *)x + 2 * each * r * n, at, n, from, to, SILU, halves); /* in a loop of its own */
        else gate_row((const char *)x + 2 * each * r * n, at, n, from, to, which, halves);
    }
}

/* xIELU (Huang & Schlag, arXiv 2411.13010): bends [4] are the alphas of what is above and below 0, beta, and a number just below 0, above
 * which e^x counts as at it. Rounded after each step, as torch does it. */
static inline floats xielu(floats x, const float *bends, int halves)
{
    floats low = either(x < bends[3], x, x * 0 + bends[3]), square = low * low;
    floats near = ((((low / 40320 + 1 / 5040.f) * low + 1 / 720.f) * low + 1 / 120.f) * low + 1 / 24.f) * low + 1 / 6.f;
    near = low + square * (near * low + 0.5f); /* e^x - 1 */
    floats below = kept_lanes(either(low < -0.5f, exponential(low) - 1, near), halves);
    below = kept_lanes(kept_lanes(below - x, halves) * bends[1], halves);
    return either(x > 0, kept_lanes(kept_lanes(x * bends[0], halves) * x, halves), below) + kept_lanes(x * bends[2], halves);
}

/* y [rows, n] = xielu(x), by a team as `gated`. */
static void bent(const member *me, const void *x, void *y, long rows, long n, const float *bends, int halves)
{
    long parts = rows % me->of ? me->of : 1, vectors = n / LANES;
    MINE(i, rows * parts) {
        long at = i / parts * n, part = i % parts, c = part * vectors / parts * LANES;
        long to = part + 1 == parts ? n : (part + 1) * vectors / parts * LANES;
        for (; c + LANES <= to; c += LANES) store_lanes(y, at + c, xielu(load_lanes(x, at + c, halves), bends, halves), halves);
        for (; c < to; c++) {
            floats value = {load(x, at + c, halves)};
            store(y, at + c, xielu(value, bends, halves)[0], halves);
        }
    }
}

void bend(const void *x, void *y, long rows, long n, const float *bends, int halves, int threads)
{
    TOGETHER(threads, rows * n > FEW, bent(me, x, y, rows, n, bends, halves));
}

/* What becomes of gates and ups, where a number that is none stays so. */
static inline floats between_limits(floats gate, floats up, float alpha, float limit, int halves)
{
    floats top = {0};
    top += limit;
    gate = either(gate > top, top, gate);
    up = either(up > top, top, either(up < -top, -top, up));
    gate = kept_lanes(gate * kept_lanes(sigmoid(kept_lanes(gate * alpha, halves)), halves), halves);
    return kept_lanes(up + 1, halves) * gate;
}

/* The even and the odd of numbers from the 2 at-th on. */
static inline void in_turn(const void *x, long at, floats both[2], int halves)
{
    if (halves) {
        words pairs = *(const words *)((const uint16_t *)x + 2 * at);
        both[0] = (floats)(pairs << 16), both[1] = (floats)(pairs & 0xffff0000u);
        return;
    }
    floats front = load_lanes(x, 2 * at, 0), back = load_lanes(x, 2 * at + LANES, 0);
    both[0] = __builtin_shuffle(front, back, 2 * AT), both[1] = __builtin_shuffle(front, back, 2 * AT + 1);
}

/* y [rows, n] = (up + 1) * gate * sigmoid(alpha * gate), gate up to limit and up between -limit and limit, which stand in turn in
 * x [rows, 2 n]; by a team. */
void limited(const member *me, const void *x, void *y, long rows, long n, float alpha, float limit, int halves)
{
    MINE(r, rows)
        for (long c = 0; c < n; c += LANES) {
            long at = r * n + c, whole = c + LANES <= n;
            floats both[2] = {0};
            if (whole) in_turn(x, at, both, halves);
            for (long i = 0; !whole && i < 2 * (n - c); i++) both[i % 2][i / 2] = load(x, 2 * at + i, halves);
            floats value = between_limits(both[0], both[1], alpha, limit, halves);
            if (whole) store_lanes(y, at, value, halves);
            for (long i = 0; !whole && i < n - c; i++) store(y, at + i, value[i], halves);
        }
}

void gate(const void *x, void *y, long rows, long n, int alone, int which, int halves, int threads)
{
    TOGETHER(threads, rows * n > FEW, gated(me, x, y, rows, n, alone, which, halves));
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

void norm_or_copy(const char *from, const scale *by, char *to, long n, int halves)
{
    if (by->weight) norm_of_row(from, by, to, 1, n, halves);
    else memcpy(to, from, size(halves) * n);
}

/* What the first product of a layer reads, of rows x and `beside` [hidden], in `to`. */
static void enter_row(const layer *l, char *x, const char *beside, char *to, int halves)
{
    long hidden = l->o.out, bytes = size(halves) * hidden;
    if (l->of_stream.weight) {
        norm_of_row(beside, &l->before, to, 1, hidden, halves);
        norm_of_row(x, &l->of_stream, to + bytes, 1, hidden, halves);
        if (l->normed) memcpy(x, to + bytes, bytes);
    } else {
        norm_or_copy(x, &l->before, to, hidden, halves);
    }
}

/* A row's heads, queries and keys, normed. */
static void norm_heads(const layer *l, char *heads, int halves)
{
    long queries = l->heads * l->dim;
    if (!l->as_one) {
        norm_of_row(heads, &l->of_heads, heads, turned_heads(l) + (l->values_normed ? l->kv_heads : 0), l->dim, halves);
        return;
    }
    scale of_keys = l->of_heads;
    of_keys.weight = (const char *)of_keys.weight + size(halves && !of_keys.late) * queries;
    norm_of_row(heads, &l->of_heads, heads, 1, queries, halves);
    norm_of_row(heads + size(halves) * queries, &of_keys, heads + size(halves) * queries, 1, l->kv_heads * l->dim, halves);
}

/* What a layer's attention is asked, of the rows of a course that begin with row `at`. */
static attention question(const run *p, const layer *l, const course *c, long number, long at)
{
    long each = size(p->halves), turned = turned_heads(l) * l->dim, store = each * c->room * l->kv_heads * l->dim; /* its own is not rounded */
    char *keys = c->own ? (char *)c->own + 2 * number * store : l->keys, *values = c->own ? keys + store : l->values;
    return (attention){p->inner + each * at * turned, keys, values, l->sinks, p->read + each * at * l->o.in, turned, l->kv_heads,
                       l->heads / l->kv_heads, l->dim, l->value_dim, l->window, l->scaling, l->cap, p->halves, l->o.in, l->rounded && !c->own};
}

/* y [parts, n] *= which(x [parts]), or, of parts of one number, y [parts] */
void open_parts(const char *x, char *y, long parts, long n, int which, int halves)
{
    long c = 0;
    for (; n == 1 && c + LANES <= parts; c += LANES)
        store_lanes(y, c, load_lanes(y, c, halves) * kept_lanes(function(load_lanes(x, c, halves), which), halves), halves);
    for (; c < parts; c++) {
        floats value = {load(x, c, halves)};
        float by = kept(function(value, which)[0], halves);
        for (long i = c * n; i < (c + 1) * n; i++) store(y, i, load(y, i, halves) * by, halves);
    }
}

/* The heads of all rows, which stand in `written`: normed and turned in `inner`, keys and values in the storage, what rows see in `read`. */
static void look_back(const member *me, const run *p, const layer *l, long number)
{
    long each = size(p->halves), turned = turned_heads(l), row = each * l->qkv.out, at = 0;
    long angle = size(p->halves && !p->sharp), rope = rope_of(p, l);
    MINE(r, p->rows) {
        char *heads = p->written + r * row;
        long angles = angle * r * p->angles + rope;
        char *ready = p->inner + each * r * turned * l->dim;
        if (l->of_heads.weight && !l->turned_first) norm_heads(l, heads, p->halves);
        turn_row(heads, p->cos + angles, p->sin + angles, ready, turned, l->dim, l->turned, p->sharp, p->halves);
        if (l->stretched) enlarge(ready, stretch_of(p, r), ready, l->heads * l->dim, p->halves);
        if (l->of_heads.weight && l->turned_first) norm_heads(l, ready, p->halves);
    }
    join(me);
    for (const course *c = p->first; c < p->first + p->courses; at += c->rows, c++) {
        const attention asked = question(p, l, c, number, at);
        MINE(i, l->borrows ? 0 : c->writes) {
            long from = at + c->write_from[i], to = c->write_to[i] * l->kv_heads;
            keep_heads(p->inner + each * (from * turned + l->heads) * l->dim, l->kv_heads, l->dim, p->halves, asked.rounded,
                       (char *)asked.keys + to * kept_bytes(l->dim, p->halves, asked.rounded));
            keep_heads(p->written + from * row + each * turned * l->dim, l->kv_heads, l->value_dim, p->halves, asked.rounded,
                       (char *)asked.values + to * kept_bytes(l->value_dim, p->halves, asked.rounded));
        }
        join(me);
        attended(me, c, &asked, p->failed);
    }
    if (l->openings) {
        long sight = l->heads * l->value_dim, behind = each * (turned * l->dim + l->kv_heads * l->value_dim);
        MINE(r, p->rows)
            open_parts(p->written + r * row + behind, p->read + each * r * sight, l->openings, sight / l->openings, l->opened_by,
                       p->halves);
        join(me);
    }
}

/* Bring the rows that are wanted to the front: of the streams, of what they saw, and of what stands aside. */
static void come_forward(const member *me, const run *p, const layer *l)
{
    long stream = size(p->halves) * l->o.out, sight = size(p->halves) * l->o.in;
    for (long i = 0; me->index == 0 && i < p->kept; i++) {
        memmove(p->x + i * stream, p->x + p->keep[i] * stream, stream);
        memmove(p->read + i * sight, p->read + p->keep[i] * sight, sight);
        if (l->parallel) memmove(p->aside + i * stream, p->aside + p->keep[i] * stream, stream);
        if (l->altup) come_along(p, p->keep[i], i, stream);
    }
    join(me);
}

/* y [n] = x * factor */
void enlarge(const char *x, float factor, char *y, long n, int halves)
{
    long c = 0;
    for (; c + LANES <= n; c += LANES) store_lanes(y, c, load_lanes(x, c, halves) * factor, halves);
    for (; c < n; c++) store(y, c, load(x, c, halves) * factor, halves);
}

/* x [n] += other */
void plus_row(char *x, const char *other, long n, int halves)
{
    long c = 0;
    for (; c + LANES <= n; c += LANES) store_lanes(x, c, load_lanes(x, c, halves) + load_lanes(other, c, halves), halves);
    for (; c < n; c++) store(x, c, load(x, c, halves) + load(other, c, halves), halves);
}

/* x += what a block made in `written`, normed, and its share taken: in a loop of its own, as one would not round it before the sum. Where a
 * layer settles, the sum is normed in its place. */
static void arrive(const member *me, const run *p, const layer *l, const scale *by, long rows)
{
    long hidden = l->o.out, bytes = size(p->halves) * hidden;
    MINE(r, rows) {
        char *made = p->written + r * bytes;
        if (by->weight && !l->settles) norm_of_row(made, by, made, 1, hidden, p->halves);
        if (l->share != 1) enlarge(made, l->share, made, hidden, p->halves);
        plus_row(p->x + r * bytes, made, hidden, p->halves);
        if (by->weight && l->settles) norm_of_row(p->x + r * bytes, by, p->x + r * bytes, 1, hidden, p->halves);
    }
    join(me);
}

/* x += what a block's last product makes of rows `from`. */
static void give(const member *me, const run *p, const layer *l, const product *last, const char *from, const scale *by, long rows)
{
    int as_is = !by->weight && l->share == 1;
    multiplied(me, last, from, p->room, as_is ? p->x : p->written, rows, p->halves, as_is);
    if (!as_is) arrive(me, p, l, by, rows);
}

/* What an MLP makes of the rows in `read` before its last product, in `inner`. */
static void think(const member *me, const run *p, const layer *l, long rows)
{
    multiplied(me, &l->gate_up, p->read, p->room, p->written, rows, p->halves, 0);
    if (l->altup && l->altup->cuts) cut_off(me, p, l, rows);
    if (l->bends) bent(me, p->written, p->inner, rows, l->down.in, l->bends, p->halves);
    else gated(me, p->written, p->inner, rows, l->down.in, l->gate_up.out == l->down.in, l->act, p->halves);
    join(me);
}

/* What an MLP beside experts makes of the rows in `read`, normed, aside; what the router then reads in `inner`, and experts in `read`. */
static void stand_abreast(const member *me, const run *p, const layer *l, long rows)
{
    const abreast *a = l->abreast;
    long hidden = l->o.out, bytes = size(p->halves) * hidden;
    think(me, p, l, rows);
    multiplied(me, &l->down, p->inner, p->room, p->aside, rows, p->halves, 0);
    MINE(r, rows) {
        char *x = p->x + r * bytes, *made = p->aside + r * bytes, *asked = p->inner + r * bytes;
        norm_of_row(made, &a->of_mlp, made, 1, hidden, p->halves);
        norm_of_row(x, &a->of_router, asked, 1, hidden, p->halves);
        enlarge(asked, a->share, asked, hidden, p->halves);
        norm_of_row(x, &a->before, p->read + r * bytes, 1, hidden, p->halves);
    }
    join(me);
}

/* What experts made in `written`, normed, and what stands aside. */
static void come_together(const member *me, const run *p, const layer *l, long rows)
{
    long hidden = l->o.out, bytes = size(p->halves) * hidden;
    MINE(r, rows) {
        char *made = p->written + r * bytes;
        norm_of_row(made, &l->abreast->of_experts, made, 1, hidden, p->halves);
        plus_row(made, p->aside + r * bytes, hidden, p->halves);
    }
}

/* x += what experts make of the rows in `read`. */
static void consult(const member *me, const run *p, const layer *l, long rows)
{
    const mixture *m = l->experts;
    int as_is = !l->of_mlp.weight && l->share == 1 && !l->abreast, halves = p->halves && !m->wide;
    long hidden = l->o.out, times = m->router.in / hidden; /* of a float32 router, whose weight is a sum of so many */
    const char *from = p->read;
    if (l->abreast) {
        stand_abreast(me, p, l, rows);
        from = p->inner;
    } else if (halves != p->halves || times > 1) {
        MINE(i, rows * times) widen(p->read, i / times * hidden, hidden, p->halves, (float *)p->inner + i * hidden, hidden);
        join(me);
        from = p->inner;
    }
    multiplied(me, &m->router, from, p->room, p->written, rows, halves, 0);
    routed(me, m, p->written, p->journey, rows, halves, p->halves);
    through_experts(me, m, p->read, p->journey, as_is ? p->x : p->written, rows, p->halves, as_is);
    if (l->abreast) come_together(me, p, l, rows);
    if (!as_is) arrive(me, p, l, &l->of_mlp, rows);
}

/* x += what a layer makes of what stands beside its rows. */
static void stand_by(const member *me, const run *p, const layer *l, long number, long rows)
{
    long n = l->side->gate.out, each = size(p->halves);
    multiplied(me, &l->side->gate, l->altup ? p->read : p->x, p->room, p->written, rows, p->halves, 0);
    MINE(r, rows) {
        long row = rows < p->rows ? p->keep[r] : p->row_of ? p->row_of[r] : r;
        const char *beside = p->sides + row * p->side_stride + number * n * each;
        char *gate = p->written + r * n * each, *to = p->inner + r * n * each;
        act_row(gate, to, 0, n, l->act, p->halves);
        long c = 0;
        for (; c + LANES <= n; c += LANES) store_lanes(to, c, load_lanes(to, c, p->halves) * load_lanes(beside, c, p->halves), p->halves);
        for (; c < n; c++) store(to, c, load(to, c, p->halves) * load(beside, c, p->halves), p->halves);
    }
    join(me);
    if (!l->altup) {
        give(me, p, l, &l->side->last, p->inner, &l->side->of_side, rows);
        return;
    }
    multiplied(me, &l->side->last, p->inner, p->room, p->written, rows, p->halves, 0);
    add_to_others(me, p, l, rows);
}

/* A layer, which is the pass's so many'th, over x. */
void through(const member *me, const run *p, const layer *l, long number)
{
    int few = p->keep && number == p->last;
    long hidden = l->o.out, each = size(p->halves), bytes = each * hidden, entered = each * l->qkv.in;
    long rows = few ? p->kept : p->rows;
    if (l->altup) predict(me, p, l);
    MINE(r, l->qkv.out ? p->rows : 0) {
        if (l->parallel) norm_or_copy(p->x + r * bytes, &l->after, p->aside + r * bytes, hidden, p->halves);
        enter_row(l, p->x + r * bytes, p->beside ? p->beside + r * bytes : 0, p->read + r * entered, p->halves);
    }
    join(me);
    if (l->altup) stay(me, p, l);
    if (l->qkv.out) {
        multiplied(me, &l->qkv, p->read, p->room, p->written, p->rows, p->halves, 0);
        if (l->latent) look_back_through(me, p, l);
        else if (l->kv_heads) look_back(me, p, l, number);
        if (l->recurrence) recall(me, p, l);
    }
    if (few) come_forward(me, p, l);
    if (l->qkv.out) give(me, p, l, &l->o, p->read, &l->of_attention, rows);
    if (l->altup) rejoin(me, p, l, rows);
    if (l->experts || l->gate_up.out) {
        MINE(r, rows) {
            if (l->parallel) memcpy(p->read + r * bytes, p->aside + r * bytes, bytes);
            else norm_or_copy(p->x + r * bytes, &l->after, p->read + r * bytes, hidden, p->halves);
        }
        join(me);
    }
    if (l->experts) {
        consult(me, p, l, rows);
    } else if (l->gate_up.out) {
        think(me, p, l, rows);
        give(me, p, l, &l->down, p->inner, &l->of_mlp, rows);
    }
    if (l->altup) correct(me, p, l, rows);
    if (l->side) stand_by(me, p, l, number, rows);
    if (l->factor && l->factor != 1) {
        MINE(r, rows) enlarge(p->x + r * bytes, l->factor, p->x + r * bytes, hidden, p->halves);
        join(me);
    }
}

/* Memory for a run of these layers; its own address, to be freed. */
char *equip(run *p, const layer *layers, long count)
{
    const mixture *experts = 0;
    long read = 0, written = 0, inner = 0, room = 0, aside = 0, each = size(p->halves), at = 0;
    for (const layer *l = layers; l < layers + count; l++) {
        const product *behind = l->experts ? &l->experts->router : &l->gate_up, *products[] = {&l->qkv, &l->o, behind, &l->down};
        long wide = l->experts && l->experts->wide ? 4 / each : 1; /* float32 beside others */
        read = most(read, most(l->qkv.in, most(l->o.in, l->o.out)));
        written = most(written, most(most(wide * behind->out, l->o.out), l->qkv.out));
        inner = most(inner, most((l->heads + l->kv_heads) * l->dim, l->experts ? wide * behind->in : l->down.in));
        for (int i = 0; i < (l->experts ? 3 : 4); i++)
            if (products[i]->in)
                room = most(room, room_for(products[i], p->rows, p->halves && (wide == 1 || products[i] != behind), p->threads));
        if (l->latent) latent_needs(p, l, &read, &written, &inner, &room);
        if (l->recurrence) recurrence_needs(p, l, &inner, &room);
        if (l->altup) altup_needs(p, l, &inner, &room);
        if (l->side) {
            written = most(written, l->side->gate.out), inner = most(inner, l->side->gate.out);
            room = most(room, room_for(&l->side->gate, p->rows, p->halves, p->threads));
            room = most(room, room_for(&l->side->last, p->rows, p->halves, p->threads));
        }
        if (l->abreast) {
            written = most(written, l->gate_up.out), inner = most(inner, most(l->down.in, l->o.out));
            room = most(room, room_for(&l->gate_up, p->rows, p->halves, p->threads));
            room = most(room, room_for(&l->down, p->rows, p->halves, p->threads));
        }
        experts = l->experts ? l->experts : experts;
        aside = l->altup ? 2 * l->o.out : l->parallel || l->abreast ? l->o.out : aside;
    }
    long journey = experts ? journey_for(p->journey, experts, p->rows, p->halves, p->threads, 0) : 0;
    long sizes[] = {UP(p->rows * each * read, 64), UP(p->rows * each * written, 64), UP(p->rows * each * inner, 64), UP(room, 64),
                    UP(p->rows * each * aside, 64)};
    char *all = aligned_alloc(64, sizes[0] + sizes[1] + sizes[2] + sizes[3] + sizes[4] + journey);
    char **parts[] = {&p->read, &p->written, &p->inner, &p->room, &p->aside};
    for (int i = 0; i < 5; at += sizes[i++]) *parts[i] = all + at;
    if (all && experts) journey_for(p->journey, experts, p->rows, p->halves, p->threads, all + at);
    return all;
}

/* `count` layers one after the other, the first of them its model's `first_number`th, over x, which is overwritten. Returns 0, or 1 without
 * memory. */
int blocks(const layer *layers, long count, const course *first_course, long courses, void *x, const void *beside, const void *cos,
           const void *sin, long angles, int sharp, int halves, int threads, const void *sides, long side_stride, long first_number,
           void *streams)
{
    int failed = 0;
    journey journey;
    run p = {first_course, courses, 0, angles, x, beside, cos, sin, sharp, halves, threads, &failed, .journey = &journey, .sides = sides,
             .side_stride = side_stride, .streams = streams};
    for (const course *c = first_course; c < first_course + courses; c++) p.rows += c->rows;
    char *all = equip(&p, layers, count);
    if (!all) return 1;
    TOGETHER(threads, worth_a_team(layers, p.rows),
             for (long number = 0; number < count; number++) through(me, &p, layers + number, first_number + number));
    free(all);
    return failed;
}
