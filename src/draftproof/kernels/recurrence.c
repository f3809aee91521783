/* Layers with recurrent states, behind a short convolution: linear attention by the gated delta rule (Yang et al., arXiv 2412.06464), state
 * spaces (Mamba-2: Dao & Gu, arXiv 2405.21060), and such a convolution alone (LFM2: arXiv 2511.23404). Compiled and called by ../recurrences.py; models/state_layers.py has the twin.
 *
 *     q, k, v = silu(convolution of the last reach + 1 rows)
 *     DELTA    q, k of length 1, q then divided by the root of its numbers; kept = e^(-decay softplus(kept + shift))
 *              S ← kept S;  S ← S + k ⊗ (v − Sᵀk) sigmoid(written);  norm(Sᵀq) silu(gate), head by head
 *     SPACE    written = softplus(written + shift), kept = e^(-decay written)
 *              S ← kept S + k ⊗ v written;  norm((Sᵀq + skip v) silu(gate)) share, of groups of heads
 *     SHORT    convolution(v before) gate
 *
 * S is a head's state, [key_dim, value_dim]. A state cannot be cut back, so it takes in nothing that may still fall: what a pass scores it
 * goes through in memory of a thread's own, and it takes in what stood as the next pass comes by, while it is being read anyway. A text's
 * rows meet in the same order and alone whatever was guessed, so no bit depends on it.
 */
#include <math.h>
#include <stdlib.h>

#include "lanes.h"

#define STRIPE 32    /* columns of a state that lie together, by rows: they need no others, and stay in the first cache; the last of a
                      * state may have half as many; see models/states.py */
#define ELEMENTS 16  /* rows of a text that are made ready at a time */

/* A row behind its convolution, of one head: its query, key and value are in `ready`. */
typedef struct {
    float kept, written;
} gates;

/* Where a head works: the state as guesses leave it, rows made ready [ELEMENTS, 2 key_dim + value_dim] and what they see. */
typedef struct {
    float *state, *ready, *seen;
    gates gates[ELEMENTS];
} desk;

static long channels_of(const recurrence *d) { return 2 * d->key_heads * d->key_dim + d->value_heads * d->value_dim; }

/* Numbers of a row in the history: what goes through the convolution, and how much is written and kept. */
static long width_of(const recurrence *d)
{
    return channels_of(d) + d->value_heads * (d->rule == DELTA ? 2 : d->rule == SPACE);
}

/* Numbers of what the first product makes before gates. */
static long before_gates(const recurrence *d) { return d->rule == DELTA ? channels_of(d) : width_of(d); }

static long numbers_of(const recurrence *d) /* of a desk */
{
    return UP(d->key_dim * d->value_dim + ELEMENTS * (2 * d->key_dim + 2 * d->value_dim), LANES);
}

/* Memory that such a layer needs, in numbers of a row and, for its desks, in bytes: the greater of that and what is there. */
void recurrence_needs(const run *p, const layer *l, long *inner, long *room)
{
    const recurrence *d = l->recurrence;
    *inner = most(*inner, d->rule == SPACE ? 4 / size(p->halves) * d->value_heads * d->value_dim : 2 * d->value_heads); /* of SPACE float32 */
    *room = most(*room, 4 * p->threads * numbers_of(d));
    if (d->rule == DELTA) *room = most(*room, room_for(&d->written_kept, p->rows, p->halves, p->threads));
}

/* The i-th of the rows that a line leads through: those before the first one that the states lack, those owed, those of the pass. */
static const char *row_of(const run *p, const layer *l, const walk *w, long line, long i)
{
    const recurrence *d = l->recurrence;
    long row = size(p->halves) * width_of(d);
    const char *history = w->history + d->number * w->places * row;
    if (i < d->reach) return history + i * row;
    i -= d->reach;
    if (i < w->owed) return history + (d->reach + w->place[i]) * row;
    return p->written + (w->line_row[w->line_start[line] + i - w->owed] * l->qkv.out + d->first) * size(p->halves);
}

/* How much of each head the i-th of them writes and keeps. */
static const char *shares_of(const run *p, const layer *l, const walk *w, long line, long i)
{
    const recurrence *d = l->recurrence;
    long each = size(p->halves), passed = i - d->reach - w->owed;
    if (d->rule != DELTA || passed < 0) return row_of(p, l, w, line, i) + each * channels_of(d);
    return p->inner + each * w->line_row[w->line_start[line] + passed] * 2 * d->value_heads;
}

/* to [n] of the rows' numbers from `channel` on. */
static void convolve(const recurrence *d, const char *const *rows, long channel, long n, float *to, int halves)
{
    const float *taps = d->taps + channel;
    long channels = channels_of(d);
    for (long c = 0; c < n; c += LANES) {
        floats sum = {0};
        for (long j = 0; j <= d->reach; j++) sum += load_lanes(rows[j], channel + c, halves) * *(const floats *)(taps + j * channels + c);
        if (d->bias) sum += *(const floats *)(d->bias + channel + c);
        sum = kept_lanes(sum, halves);
        *(floats *)(to + c) = d->rule == SHORT ? sum : kept_lanes(sum * sigmoid(sum), halves);
    }
}

/* x [n] of length 1, times `factor`. */
static void unit(float *x, long n, float factor)
{
    floats squares = {0};
    for (long c = 0; c < n; c += LANES) squares += *(floats *)(x + c) * *(floats *)(x + c);
    float by = 1 / sqrtf(total(squares) + 1e-6f);
    for (long c = 0; c < n; c += LANES) *(floats *)(x + c) = *(floats *)(x + c) * by * factor;
}

static float softplus(float x) { return x > 20 ? x : log1pf(expf(x)); }

/* An element of a line, of a head of values: its row and those before it. */
static void make_ready(const run *p, const layer *l, const walk *w, long line, long element, long head, float *to, gates *gates)
{
    const recurrence *d = l->recurrence;
    const char *rows[d->reach + 1];
    long key = d->key_heads ? head / (d->value_heads / d->key_heads) * d->key_dim : 0, keys = d->key_heads * d->key_dim, halves = p->halves;
    for (long j = 0; j <= d->reach; j++) rows[j] = row_of(p, l, w, line, element + j);
    convolve(d, rows, key, d->key_dim, to, halves);
    convolve(d, rows, keys + key, d->key_dim, to + d->key_dim, halves);
    convolve(d, rows, 2 * keys + head * d->value_dim, d->value_dim, to + 2 * d->key_dim, halves);
    if (d->rule == SHORT) return;
    const char *shares = shares_of(p, l, w, line, element + d->reach);
    float first = load(shares, head, halves);
    if (d->rule == SPACE) {
        float written = kept(softplus(kept(first + d->shift[head], halves)), halves);
        gates->written = written < d->floor ? d->floor : written > d->top ? d->top : written;
        gates->kept = expf(-d->decay[head] * gates->written);
        return;
    }
    unit(to, d->key_dim, 1 / sqrtf(d->key_dim));
    unit(to + d->key_dim, d->key_dim, 1);
    floats written = {first};
    gates->written = kept(sigmoid(written)[0], halves);
    gates->kept = expf(-d->decay[head] * softplus(load(shares, head + d->value_heads, halves) + d->shift[head]));
}

/* A stripe of a state, [key_dim, VECTORS * LANES], goes on by a row, and the row sees it. */
#define STEP(NAME, VECTORS)                                                                                              \
    static void NAME(int rule, float *state, const float *query, const float *key, const float *value, const gates *by, long dim,        \
                     float *seen)                                                                                        \
    {                                                                                                                    \
        floats known[2][VECTORS] = {0}, sum[2][VECTORS] = {0};                                                           \
        for (long i = 0; rule == DELTA && i < dim; i += 2)                                                               \
            UNROLL for (int j = 0; j < 2; j++)                                                                           \
                UNROLL for (int v = 0; v < VECTORS; v++) known[j][v] += *(floats *)(state + ((i + j) * VECTORS + v) * LANES) * key[i + j]; \
        UNROLL for (int v = 0; v < VECTORS; v++)                                                                         \
            known[0][v] = (*(const floats *)(value + v * LANES) - by->kept * (known[0][v] + known[1][v])) * by->written; \
        for (long i = 0; i < dim; i += 2)                                                                                \
            UNROLL for (int j = 0; j < 2; j++)                                                                           \
                UNROLL for (int v = 0; v < VECTORS; v++) {                                                               \
                    floats *at = (floats *)(state + ((i + j) * VECTORS + v) * LANES);                                    \
                    floats next = *at * by->kept + known[0][v] * key[i + j];                                             \
                    *at = next;                                                                                          \
                    sum[j][v] += next * query[i + j];                                                                    \
                }                                                                                                        \
        UNROLL for (int v = 0; v < VECTORS; v++) *(floats *)(seen + v * LANES) = sum[0][v] + sum[1][v];                  \
    }
STEP(step, STRIPE / LANES)
STEP(step_of_half, STRIPE / 2 / LANES)

/* What a row sees of a head, normed and gated, where the last product reads it; of a SPACE gated, in `inner`, where it is normed. */
static void finish(const run *p, const layer *l, const float *value, const float *seen, long row, long head)
{
    const recurrence *d = l->recurrence;
    long n = d->value_dim, each = size(p->halves), sight = d->value_heads * n;
    const char *gate = p->written + each * (row * l->qkv.out + d->first + before_gates(d) + head * n);
    char *to = p->read + each * ((row + 1) * l->o.in - sight + head * n);
    float *ahead = (float *)p->inner + row * sight + head * n;
    for (long c = 0; d->rule == DELTA && c < n; c += LANES) store_lanes(to, c, *(const floats *)(seen + c), p->halves);
    if (d->rule == DELTA) norm_of_row(to, &d->of_sight, to, 1, n, p->halves);
    for (long c = 0; c < n; c += LANES) {
        floats open = load_lanes(gate, c, p->halves), by = open * sigmoid(open);
        if (d->rule == SHORT) store_lanes(to, c, *(const floats *)(value + c) * open, p->halves);
        else if (d->rule == DELTA) store_lanes(to, c, load_lanes(to, c, p->halves) * by, p->halves);
        else *(floats *)(ahead + c) = (*(const floats *)(seen + c) + *(const floats *)(value + c) * d->skip[head]) * by;
    }
}

/* A row of a SPACE, which stands in `inner`, normed by groups if it is at all, where the last product reads it. */
static void norm_groups(const run *p, const layer *l, long row)
{
    const recurrence *d = l->recurrence;
    long sight = d->value_heads * d->value_dim, n = sight / d->groups;
    float *from = (float *)p->inner + row * sight;
    char *to = p->read + size(p->halves) * ((row + 1) * l->o.in - sight);
    for (long g = 0; d->of_sight.weight && g < d->groups; g++) {
        scale of_group = d->of_sight;
        of_group.weight = (const float *)of_group.weight + g * n;
        norm_of_row((const char *)(from + g * n), &of_group, (char *)(from + g * n), 1, n, 0);
    }
    for (long c = 0; c < sight; c += LANES) store_lanes(to, c, *(floats *)(from + c) * d->share, p->halves);
}

/* A text's way through one head of a layer. */
static void go(const run *p, const layer *l, const walk *w, long head, desk *at)
{
    const recurrence *d = l->recurrence;
    long dim = d->key_dim, ready = 2 * dim + d->value_dim;
    float *memory = w->memory + (d->number * d->value_heads + head) * dim * d->value_dim;
    for (long line = 0; line < w->lines; line++) {
        long end = w->owed + w->line_start[line + 1] - w->line_start[line];
        for (long first = line ? w->taken : 0; first < end; first += ELEMENTS) {
            long many = least(ELEMENTS, end - first);
            for (long i = 0; i < many; i++) make_ready(p, l, w, line, first + i, head, at->ready + i * ready, at->gates + i);
            for (long c = 0; d->rule != SHORT && c < d->value_dim; c += STRIPE)
                for (long i = 0; i < many; i++) {
                    const float *query = at->ready + i * ready;
                    float *held = memory + c * dim, *guessed = at->state + c * dim, *state = first + i < w->taken ? held : guessed;
                    const float *key = query + dim, *value = key + dim + c;
                    long wide = least(STRIPE, d->value_dim - c);
                    if (first + i == w->taken) memcpy(guessed, held, 4 * dim * wide);
                    if (wide == STRIPE) step(d->rule, state, query, key, value, at->gates + i, dim, at->seen + i * d->value_dim + c);
                    else step_of_half(d->rule, state, query, key, value, at->gates + i, dim, at->seen + i * d->value_dim + c);
                }
            for (long i = most(0, w->owed - first); i < many; i++)
                finish(p, l, at->ready + i * ready + 2 * dim, at->seen + i * d->value_dim,
                       w->line_row[w->line_start[line] + first + i - w->owed], head);
        }
    }
}

/* A row of the pass in the history: what the first product made of numbers [from, beside), and the one beside it of [beside, to). */
static void keep_row(const run *p, const layer *l, long row, long from, long beside, long to, char *place)
{
    const recurrence *d = l->recurrence;
    long each = size(p->halves);
    memcpy(place, p->written + each * (row * l->qkv.out + d->first + from), each * (beside - from));
    memcpy(place + each * (beside - from), p->inner + each * (row * 2 * d->value_heads + beside - channels_of(d)), each * (to - beside));
}

/* Keep what the states will lack: numbers [from, to) of rows. No place is written before it was read. */
static void remember(const run *p, const layer *l, const walk *w, long from, long to)
{
    const recurrence *d = l->recurrence;
    long each = size(p->halves), row = each * width_of(d), at = 0, beside = least(most(before_gates(d), from), to);
    char *history = w->history + d->number * w->places * row + each * from;
    for (long i = w->taken; i < w->taken + d->reach; i++) {
        if (i < d->reach + w->owed) memmove(history + at++ * row, row_of(p, l, w, 0, i) + each * from, each * (to - from));
        else keep_row(p, l, w->line_row[i - d->reach - w->owed], from, beside, to, history + at++ * row);
    }
    for (long i = w->taken; i < w->owed; i++)
        memmove(history + at++ * row, row_of(p, l, w, 0, d->reach + i) + each * from, each * (to - from));
    for (long r = w->first + most(0, w->taken - w->owed); r < w->first + w->rows; r++)
        keep_row(p, l, r, from, beside, to, history + at++ * row);
}

/* A row's values of SHORT, times what stands behind the gates. */
static void meet(const run *p, const layer *l, long row)
{
    long n = channels_of(l->recurrence);
    char *values = p->written + size(p->halves) * row * l->qkv.out;
    for (long c = 0; c < n; c += LANES)
        store_lanes(values, c, load_lanes(values, c, p->halves) * load_lanes(values, 2 * n + c, p->halves), p->halves);
}

/* What all rows see, in `read`, of what products left in `written` and, of DELTA, in `inner`. */
static void go_all(const member *me, const run *p, const layer *l)
{
    const recurrence *d = l->recurrence;
    float *room = (float *)p->room + me->index * numbers_of(d);
    desk at = {room, room + d->key_dim * d->value_dim, 0};
    at.seen = at.ready + ELEMENTS * (2 * d->key_dim + d->value_dim);
    const course *c = p->first; /* passes with states have one */
    long width = width_of(d);
    if (d->rule == SHORT) {
        MINE(r, p->rows) meet(p, l, r);
        join(me);
    }
    MINE(i, c->walk_count * d->value_heads) go(p, l, c->walks + i / d->value_heads, i % d->value_heads, &at);
    join(me);
    if (d->rule == SPACE) MINE(r, p->rows) norm_groups(p, l, r);
    for (const walk *w = c->walks; w < c->walks + c->walk_count; w++) remember(p, l, w, share(me, width, 0), share(me, width, 1));
    join(me);
}

/* The same of what the first product read, in `read`, and left in `written`. */
void recall(const member *me, const run *p, const layer *l)
{
    const recurrence *d = l->recurrence;
    if (d->rule == DELTA) multiplied(me, &d->written_kept, p->read, p->room, p->inner, p->rows, p->halves, 0);
    go_all(me, p, l);
}

/* What rows see, read [rows, value_heads, value_dim], of what the first product made, written [rows, out], and the one beside it, beside
 * [rows, …], or null, by a team of its own. Returns 0, or 1 without memory. */
int recalled(const recurrence *d, long out, const course *c, void *written, void *beside, void *read, int halves, int threads)
{
    layer l = {.qkv.out = out, .o.in = d->value_heads * d->value_dim, .recurrence = d};
    run p = {.first = c, .courses = 1, .rows = c->rows, .read = read, .written = written, .halves = halves, .threads = threads};
    long inner = 0, room = 0;
    recurrence_needs(&p, &l, &inner, &room);
    room = UP(room, 64);
    char *all = aligned_alloc(64, room + UP(size(halves) * p.rows * inner, 64));
    if (!all) return 1;
    p.room = all, p.inner = beside ? beside : all + room;
    TOGETHER(threads, threads > 1, go_all(me, &p, &l));
    free(all);
    return 0;
}
