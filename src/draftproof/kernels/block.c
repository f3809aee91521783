/* Llama's block, and its small operations; fused.py's own lines are their twins. Compiled and called by ../native.py.
 *
 * Numbers are rounded where torch rounds them: after every product, sum and function, in the tensors' own type.
 */
#include <math.h>
#include <stdlib.h>

#include "lanes.h"

#define FEW 8192 /* numbers that one thread finishes before a second has woken */

/* y [inner, n] = x / rms(x) * weight over n (Zhang & Sennrich, arXiv 1910.07467), weight [inner, n]. Squares add over lanes, then over
 * these. */
void norm_of_row(const char *from, const void *weight, char *to, long inner, long n, float eps, int halves)
{
    for (long i = 0; i < inner; i++, from += size(halves) * n, to += size(halves) * n) {
        floats squares = {0};
        long c = 0;
        for (; c + LANES <= n; c += LANES) squares += load_lanes(from, c, halves) * load_lanes(from, c, halves);
        for (int j = 0; c + j < n; j++) squares[j] += load(from, c + j, halves) * load(from, c + j, halves);
        float scale = 1 / sqrtf(total(squares) / n + eps);
        for (c = 0; c + LANES <= n; c += LANES)
            store_lanes(to, c, kept_lanes(load_lanes(from, c, halves) * scale, halves) * load_lanes(weight, i * n + c, halves), halves);
        for (; c < n; c++) store(to, c, kept(load(from, c, halves) * scale, halves) * load(weight, i * n + c, halves), halves);
    }
}

/* Of x's outer rows, which are `stride` numbers apart: y [outer, inner, n]. */
void norm(const void *x, const void *weight, void *y, long outer, long inner, long n, long stride, float eps, int halves, int threads)
{
    long each = size(halves);
#pragma omp parallel for num_threads(threads) if (outer * inner * n > FEW)
    for (long o = 0; o < outer; o++)
        norm_of_row((const char *)x + each * o * stride, weight, (char *)y + each * o * inner * n, inner, n, eps, halves);
}

/* y [heads, dim]: x turned by a position's angles (Su et al., arXiv 2104.09864): cos, and sin, negative in its first half. */
static void turn_row(const char *from, const void *cos, const void *sin, char *to, long heads, long dim, int halves)
{
    for (long h = 0; h < heads; h++, from += size(halves) * dim, to += size(halves) * dim)
        for (long side = 0; side < 2; side++) {
            long d = side * dim / 2, end = d + dim / 2, other = dim / 2 - d;
            for (; d + LANES <= end; d += LANES, other += LANES) {
                floats along = kept_lanes(load_lanes(from, d, halves) * load_lanes(cos, d, halves), halves);
                floats across = kept_lanes(load_lanes(from, other, halves) * load_lanes(sin, d, halves), halves);
                store_lanes(to, d, along + across, halves);
            }
            for (; d < end; d++, other++) {
                float along = kept(load(from, d, halves) * load(cos, d, halves), halves);
                store(to, d, along + kept(load(from, other, halves) * load(sin, d, halves), halves), halves);
            }
        }
}

/* Of x's rows, which are `stride` numbers apart, and cos's and sin's, which are `angles` apart: y [rows, heads, dim]. */
void turn(const void *x, const void *cos, const void *sin, void *y, long rows, long heads, long dim, long stride, long angles, int halves,
          int threads)
{
    long each = size(halves);
#pragma omp parallel for num_threads(threads) if (rows * heads * dim > FEW)
    for (long r = 0; r < rows; r++)
        turn_row((const char *)x + each * r * stride, (const char *)cos + each * r * angles, (const char *)sin + each * r * angles,
                 (char *)y + each * r * heads * dim, heads, dim, halves);
}

static inline floats sigmoid(floats x) /* 1 / (1 + e^-x), by the exponential of what is not positive */
{
    integers negative = x < 0;
    floats e = exponential((floats)((words)x | 0x80000000u)), over = {0};
    over += 1;
    floats top = (floats)(((integers)e & negative) | ((integers)over & ~negative));
    return top / (1 + e);
}

static inline floats silu(floats x) { return x * sigmoid(x); }

/* y [to) = silu(x) * x, n further on: numbers from `from` on of a row. */
static void gate_row(const char *x, char *y, long n, long from, long to, int halves)
{
    long c = from;
    for (; c + LANES <= to; c += LANES)
        store_lanes(y, c, kept_lanes(silu(load_lanes(x, c, halves)), halves) * load_lanes(x, n + c, halves), halves);
    for (; c < to; c++) {
        floats value = {load(x, c, halves)};
        store(y, c, kept(silu(value)[0], halves) * load(x, n + c, halves), halves);
    }
}

/* y [rows, n] = silu(x[:, :n]) * x[:, n:], x [rows, 2 n], by a team: a row's parts begin with whole vectors. */
void gated(const member *me, const void *x, void *y, long rows, long n, int halves)
{
    long parts = rows % me->of ? me->of : 1, vectors = n / LANES, each = size(halves);
    MINE(i, rows * parts) {
        long r = i / parts, part = i % parts, to = part + 1 == parts ? n : (part + 1) * vectors / parts * LANES;
        gate_row((const char *)x + 2 * each * r * n, (char *)y + each * r * n, n, part * vectors / parts * LANES, to, halves);
    }
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

void gate(const void *x, void *y, long rows, long n, int halves, int threads)
{
    TOGETHER(threads, rows * n > FEW, gated(me, x, y, rows, n, halves));
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

/* What the first product of a layer reads, of rows x and `beside` [hidden], in `to`. */
static void enter_row(const layer *l, char *x, const char *beside, char *to, int halves)
{
    long hidden = l->o.out, bytes = size(halves) * hidden;
    if (l->of_stream) {
        norm_of_row(beside, l->before, to, 1, hidden, l->before_eps, halves);
        norm_of_row(x, l->of_stream, to + bytes, 1, hidden, l->before_eps, halves);
        if (l->normed) memcpy(x, to + bytes, bytes);
    } else if (l->before) {
        norm_of_row(x, l->before, to, 1, hidden, l->before_eps, halves);
    } else {
        memcpy(to, x, bytes);
    }
}

/* What a layer's attention is asked, of the rows of a course that begin with row `at`. */
static attention question(const run *p, const layer *l, const course *c, long number, long at)
{
    long each = size(p->halves), turned = (l->heads + l->kv_heads) * l->dim, store = each * c->room * l->kv_heads * l->dim;
    char *keys = c->own ? (char *)c->own + 2 * number * store : l->keys, *values = c->own ? keys + store : l->values;
    return (attention){p->inner + each * at * turned, keys, values, 0, p->read + each * at * l->heads * l->dim, turned, l->kv_heads,
                       l->heads / l->kv_heads, l->dim, l->dim, l->window, l->scaling, p->halves};
}

/* The heads of all rows, which stand in `written`: normed and turned in `inner`, keys and values in the storage, what rows see in `read`. */
static void look_back(const member *me, const run *p, const layer *l, long number)
{
    long each = size(p->halves), turned = l->heads + l->kv_heads, row = each * l->qkv.out, key = each * l->kv_heads * l->dim, at = 0;
    MINE(r, p->rows) {
        char *heads = p->written + r * row;
        if (l->of_heads) norm_of_row(heads, l->of_heads, heads, turned, l->dim, l->heads_eps, p->halves);
        turn_row(heads, p->cos + each * r * p->angles, p->sin + each * r * p->angles, p->inner + each * r * turned * l->dim, turned, l->dim,
                 p->halves);
    }
    join(me);
    for (const course *c = p->first; c < p->first + p->courses; at += c->rows, c++) {
        const attention asked = question(p, l, c, number, at);
        MINE(i, c->writes) {
            long from = at + c->write_from[i];
            memcpy((char *)asked.keys + c->write_to[i] * key, p->inner + each * (from * turned + l->heads) * l->dim, key);
            memcpy((char *)asked.values + c->write_to[i] * key, p->written + from * row + each * turned * l->dim, key);
        }
        join(me);
        attended(me, c, &asked, p->failed);
    }
}

/* Bring the rows that are wanted to the front: of the streams, and of what they saw. */
static void come_forward(const member *me, const run *p, const layer *l)
{
    long stream = size(p->halves) * l->o.out, sight = size(p->halves) * l->o.in;
    for (long i = 0; me->index == 0 && i < p->kept; i++) {
        memmove(p->x + i * stream, p->x + p->keep[i] * stream, stream);
        memmove(p->read + i * sight, p->read + p->keep[i] * sight, sight);
    }
    join(me);
}

/* A layer, which is the pass's so many'th, over x. */
void through(const member *me, const run *p, const layer *l, long number)
{
    int few = p->keep && number == p->last;
    long hidden = l->o.out, each = size(p->halves), bytes = each * hidden, entered = each * l->qkv.in;
    long rows = few ? p->kept : p->rows;
    MINE(r, p->rows) enter_row(l, p->x + r * bytes, p->beside ? p->beside + r * bytes : 0, p->read + r * entered, p->halves);
    join(me);
    multiplied(me, &l->qkv, p->read, p->room, p->written, p->rows, p->halves, 0);
    look_back(me, p, l, number);
    if (few) come_forward(me, p, l);
    multiplied(me, &l->o, p->read, p->room, p->x, rows, p->halves, 1);
    MINE(r, rows) norm_of_row(p->x + r * bytes, l->after, p->read + r * bytes, 1, hidden, l->after_eps, p->halves);
    join(me);
    if (l->experts) {
        multiplied(me, &l->experts->router, p->read, p->room, p->written, rows, p->halves, 0);
        routed(me, l->experts, p->written, p->journey, rows, p->halves);
        through_experts(me, l->experts, p->read, p->journey, p->x, rows, p->halves, 1);
        return;
    }
    multiplied(me, &l->gate_up, p->read, p->room, p->written, rows, p->halves, 0);
    gated(me, p->written, p->inner, rows, l->gate_up.out / 2, p->halves);
    join(me);
    multiplied(me, &l->down, p->inner, p->room, p->x, rows, p->halves, 1);
}

/* Memory for a run of these layers; its own address, to be freed. */
char *equip(run *p, const layer *layers, long count)
{
    const mixture *experts = 0;
    long read = 0, written = 0, inner = 0, room = 0, each = size(p->halves), at = 0;
    for (const layer *l = layers; l < layers + count; l++) {
        const product *behind = l->experts ? &l->experts->router : &l->gate_up, *products[] = {&l->qkv, &l->o, behind, &l->down};
        read = most(read, most(l->qkv.in, most(l->o.in, l->o.out)));
        written = most(written, most(behind->out, l->qkv.out));
        inner = most(inner, most((l->heads + l->kv_heads) * l->dim, l->down.in));
        for (int i = 0; i < (l->experts ? 3 : 4); i++) room = most(room, room_for(products[i], p->rows, p->halves, p->threads));
        experts = l->experts ? l->experts : experts;
    }
    long journey = experts ? journey_for(p->journey, experts, p->rows, p->halves, p->threads, 0) : 0;
    long sizes[] = {UP(p->rows * each * read, 64), UP(p->rows * each * written, 64), UP(p->rows * each * inner, 64), UP(room, 64)};
    char *all = aligned_alloc(64, sizes[0] + sizes[1] + sizes[2] + sizes[3] + journey), **parts[] = {&p->read, &p->written, &p->inner, &p->room};
    for (int i = 0; i < 4; at += sizes[i++]) *parts[i] = all + at;
    if (all && experts) journey_for(p->journey, experts, p->rows, p->halves, p->threads, all + at);
    return all;
}

/* `count` layers one after the other, over x, which is overwritten. Returns 0, or 1 without memory. */
int blocks(const layer *layers, long count, const course *first_course, long courses, void *x, const void *beside, const void *cos,
           const void *sin, long angles, int halves, int threads)
{
    int failed = 0;
    journey journey;
    run p = {first_course, courses, 0, angles, x, beside, cos, sin, halves, threads, &failed, .journey = &journey};
    for (const course *c = first_course; c < first_course + courses; c++) p.rows += c->rows;
    char *all = equip(&p, layers, count);
    if (!all) return 1;
    TOGETHER(threads, worth_a_team(layers, p.rows),
             for (long number = 0; number < count; number++) through(me, &p, layers + number, number));
    free(all);
    return failed;
}
