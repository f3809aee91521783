/* Layers with recurrent states, behind a short convolution: linear attention by the gated delta rule (Yang et al., arXiv 2412.06464), state
 * spaces (Mamba-2: Dao & Gu, arXiv 2405.21060), and such a convolution alone (LFM2: arXiv 2511.23404). Compiled and called by
 * ../recurrences.py; models/state_layers.py has the twin.
 *
 *     q, k, v = silu(convolution of the last reach + 1 rows)
 *     DELTA    q, k of length 1, q then divided by the root of its numbers; kept = e^(-decay softplus(kept + shift)), a number of a head or,
 *              diagonal, of each row of S (Kimi Linear: arXiv 2510.26692); there it may be e^(floor sigmoid(decay (kept + shift)))
 *              S ← kept S;  S ← S + k ⊗ (v − Sᵀk) sigmoid(written) share;  norm(Sᵀq) silu(gate) or sigmoid(gate), head by head
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

/* Where a head works: the state as guesses leave it, rows made ready [ELEMENTS, ready_of] and what they see. */
typedef struct {
    float *state, *ready, *seen;
    gates gates[ELEMENTS];
} desk;

/* Where numbers of the pass's rows stand: those of the first one, and how many bytes further on those of each next. */
typedef struct {
    const char *at;
    long apart;
} strip;

/* A layer on a pass, and what products made of its rows: what goes through the convolution, how much of each head is written, and kept, and
 * gates. */
typedef struct {
    const run *p;
    const layer *l;
    strip channels, written, kept, gates;
} scene;

static long channels_of(const recurrence *d) { return 2 * d->key_heads * d->key_dim + d->value_heads * d->value_dim; }

/* Numbers of a row that say how much is written, and kept. */
static long writes_of(const recurrence *d) { return d->rule == SHORT ? 0 : d->value_heads; }
static long keeps_of(const recurrence *d) { return d->value_heads * d->keeps; }

/* Numbers of a row in the history: what goes through the convolution, and these. */
static long width_of(const recurrence *d) { return channels_of(d) + writes_of(d) + keeps_of(d); }

/* Numbers of a row made ready: query, key and value and, of a diagonal, how much is kept, and the key times that. */
static long ready_of(const recurrence *d) { return (d->keeps > 1 ? 4 : 2) * d->key_dim + d->value_dim; }

static long numbers_of(const recurrence *d) /* of a desk */
{
    return UP(d->key_dim * d->value_dim + ELEMENTS * (ready_of(d) + d->value_dim), LANES);
}

/* Of products of low rank, in `inner`, one behind the other: what `written_kept` made, how much is kept, gates, and what these two are made
 * of, each [rows, …]. Bytes before the i-th of them. */
static long before(const recurrence *d, long i, long rows, int halves)
{
    const long parts[] = {d->written_kept.out, d->decays.out, d->gates.out, d->decays.in, d->gates.in};
    long bytes = 0;
    while (i--) bytes += UP(rows * size(halves) * parts[i], 64);
    return bytes;
}

/* Memory that such a layer needs, in numbers of a row and, for its desks and products, in bytes: the greater of that and what is there. */
void recurrence_needs(const run *p, const layer *l, long *inner, long *room)
{
    const recurrence *d = l->recurrence;
    const product *products[] = {&d->written_kept, &d->decays, &d->gates};
    long each = size(p->halves), beside = writes_of(d) + keeps_of(d);
    if (d->rule == SPACE) beside = 4 / each * d->value_heads * d->value_dim; /* float32 */
    if (d->gates.out) beside = UP(before(d, 5, p->rows, p->halves), p->rows * each) / (p->rows * each);
    *inner = most(*inner, beside);
    *room = most(*room, 4 * p->threads * numbers_of(d));
    for (int i = 0; i < 3; i++)
        if (products[i]->out) *room = most(*room, room_for(products[i], p->rows, p->halves, p->threads));
}

/* low: with products of low rank, in this call. */
static scene scene_of(const run *p, const layer *l, int low)
{
    const recurrence *d = l->recurrence;
    long each = size(p->halves), row = each * l->qkv.out, beside = each * (low ? d->written_kept.out : writes_of(d) + keeps_of(d));
    const char *made = p->written + each * d->first, *behind = made + each * channels_of(d);
    if (d->rule != DELTA) return (scene){p, l, {made, row}, {behind, row}, {0}, {behind + each * writes_of(d), row}};
    scene s = {p, l, {made, row}, {p->inner, beside}, {p->inner + each * d->value_heads, beside}, {behind, row}};
    if (low) {
        s.kept = (strip){p->inner + before(d, 1, p->rows, p->halves), each * keeps_of(d)};
        s.gates = (strip){p->inner + before(d, 2, p->rows, p->halves), each * d->gates.out};
    }
    return s;
}

/* The i-th of the rows that a line leads through: those before the first one that the states lack, those owed, those of the pass; numbers
 * that stand at `of` and, in the history, behind so many. */
static const char *row_of(const scene *s, const walk *w, long line, long i, strip of, long behind)
{
    const recurrence *d = s->l->recurrence;
    long each = size(s->p->halves), row = each * width_of(d);
    const char *history = w->history + d->number * w->places * row + each * behind;
    if (i < d->reach) return history + i * row;
    i -= d->reach;
    if (i < w->owed) return history + (d->reach + w->place[i]) * row;
    return of.at + w->line_row[w->line_start[line] + i - w->owed] * of.apart;
}

/* to [n] of the rows' numbers from `channel` on. */
static void convolve(const recurrence *d, const char *const *rows, long channel, long n, float *to, int halves)
{
    const float *taps = d->taps + channel;
    long channels = channels_of(d);
    int early = halves && !d->sharp;
    for (long c = 0; c < n; c += LANES) {
        floats sum = {0};
        for (long j = 0; j <= d->reach; j++) sum += load_lanes(rows[j], channel + c, halves) * *(const floats *)(taps + j * channels + c);
        if (d->bias) sum += *(const floats *)(d->bias + channel + c);
        sum = kept_lanes(sum, early);
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

static float softplus_of(float x) { return x > 20 ? x : log1pf(expf(x)); }

/* Of each number of a head's keys how much is kept, and behind these the key times that, in `to`. */
static void keep_rows(const recurrence *d, const char *told, long head, const float *key, float *to, int halves)
{
    for (long c = 0; c < d->key_dim; c += LANES) {
        long at = head * d->key_dim + c;
        floats open = load_lanes(told, at, halves) + *(const floats *)(d->shift + at);
        floats power = d->floor ? d->floor * sigmoid(open * d->decay[head]) : -d->decay[head] * softplus(open);
        floats kept = exponential(kept_lanes(power, halves && d->coarse));
        *(floats *)(to + c) = kept;
        *(floats *)(to + d->key_dim + c) = kept * *(const floats *)(key + c);
    }
}

/* An element of a line, of a head of values: its row and those before it. */
static void make_ready(const scene *s, const walk *w, long line, long element, long head, float *to, gates *gates)
{
    const recurrence *d = s->l->recurrence;
    const char *rows[d->reach + 1];
    long key = d->key_heads ? head / (d->value_heads / d->key_heads) * d->key_dim : 0, keys = d->key_heads * d->key_dim;
    long halves = s->p->halves, last = element + d->reach, channels = channels_of(d);
    for (long j = 0; j <= d->reach; j++) rows[j] = row_of(s, w, line, element + j, s->channels, 0);
    convolve(d, rows, key, d->key_dim, to, halves);
    convolve(d, rows, keys + key, d->key_dim, to + d->key_dim, halves);
    convolve(d, rows, 2 * keys + head * d->value_dim, d->value_dim, to + 2 * d->key_dim, halves);
    if (d->rule == SHORT) return;
    float first = load(row_of(s, w, line, last, s->written, channels), head, halves);
    if (d->rule == SPACE) {
        float written = kept(softplus_of(kept(first + d->shift[head], halves)), halves);
        gates->written = written < d->floor ? d->floor : written > d->top ? d->top : written;
        gates->kept = expf(-d->decay[head] * gates->written);
        return;
    }
    unit(to, d->key_dim, 1 / sqrtf(d->key_dim));
    unit(to + d->key_dim, d->key_dim, 1);
    floats written = {first};
    gates->written = kept(sigmoid(written)[0], halves) * d->share;
    const char *told = row_of(s, w, line, last, s->kept, channels + d->value_heads);
    if (d->keeps > 1) keep_rows(d, told, head, to + d->key_dim, to + 2 * d->key_dim + d->value_dim, halves);
    else gates->kept = expf(-d->decay[head] * softplus_of(load(told, head, halves) + d->shift[head]));
}

/* A stripe of a state, [key_dim, VECTORS * LANES], goes on by a row, and the row sees it. DIAGONAL: kept is what `keep_rows` made. */
#define STEP(NAME, VECTORS, DIAGONAL)                                                                                    \
    static void NAME(int rule, float *state, const float *query, const float *key, const float *value, const gates *by,                  \
                     const float *kept, long dim, float *seen)                                                           \
    {                                                                                                                    \
        floats known[2][VECTORS] = {0}, sum[2][VECTORS] = {0};                                                           \
        const float *asked = DIAGONAL ? kept + dim : key;                                                                \
        for (long i = 0; rule == DELTA && i < dim; i += 2)                                                               \
            UNROLL for (int j = 0; j < 2; j++)                                                                           \
                UNROLL for (int v = 0; v < VECTORS; v++)                                                                 \
                    known[j][v] += *(floats *)(state + ((i + j) * VECTORS + v) * LANES) * asked[i + j];                  \
        UNROLL for (int v = 0; v < VECTORS; v++)                                                                         \
            known[0][v] =                                                                                                \
                (*(const floats *)(value + v * LANES) - (DIAGONAL ? 1 : by->kept) * (known[0][v] + known[1][v])) * by->written;          \
        for (long i = 0; i < dim; i += 2)                                                                                \
            UNROLL for (int j = 0; j < 2; j++)                                                                           \
                UNROLL for (int v = 0; v < VECTORS; v++) {                                                               \
                    floats *at = (floats *)(state + ((i + j) * VECTORS + v) * LANES);                                    \
                    floats next = *at * (DIAGONAL ? kept[i + j] : by->kept) + known[0][v] * key[i + j];                  \
                    *at = next;                                                                                          \
                    sum[j][v] += next * query[i + j];                                                                    \
                }                                                                                                        \
        UNROLL for (int v = 0; v < VECTORS; v++) *(floats *)(seen + v * LANES) = sum[0][v] + sum[1][v];                  \
    }
STEP(step, STRIPE / LANES, 0)
STEP(step_of_half, STRIPE / 2 / LANES, 0)
STEP(step_by_rows, STRIPE / LANES, 1)
STEP(step_of_half_by_rows, STRIPE / 2 / LANES, 1)

/* What a row sees of a head, normed and gated, where the last product reads it; of a SPACE gated, in `inner`, where it is normed. A late norm
 * of DELTA is rounded behind the gates. */
static void finish(const scene *s, const float *value, float *seen, long row, long head)
{
    const run *p = s->p;
    const layer *l = s->l;
    const recurrence *d = l->recurrence;
    long n = d->value_dim, each = size(p->halves), sight = d->value_heads * n, late = d->of_sight.late;
    const char *gate = s->gates.at + row * s->gates.apart + each * head * n;
    char *to = p->read + each * ((row + 1) * l->o.in - sight + head * n);
    float *ahead = (float *)p->inner + row * sight + head * n;
    for (long c = 0; d->rule == DELTA && c < n; c += LANES) {
        if (late) *(floats *)(seen + c) = kept_lanes(*(floats *)(seen + c), p->halves);
        else store_lanes(to, c, *(floats *)(seen + c), p->halves);
    }
    if (d->rule == DELTA && late) norm_of_row((char *)seen, &d->of_sight, (char *)seen, 1, n, 0);
    else if (d->rule == DELTA) norm_of_row(to, &d->of_sight, to, 1, n, p->halves);
    for (long c = 0; c < n; c += LANES) {
        floats open = load_lanes(gate, c, p->halves), by = d->opened_by == SIGMOID ? sigmoid(open) : open * sigmoid(open);
        if (d->rule == SHORT) store_lanes(to, c, *(const floats *)(value + c) * open, p->halves);
        else if (d->rule == DELTA) store_lanes(to, c, (late ? *(floats *)(seen + c) : load_lanes(to, c, p->halves)) * by, p->halves);
        else *(floats *)(ahead + c) = (*(floats *)(seen + c) + *(const floats *)(value + c) * d->skip[head]) * by;
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
static void go(const scene *s, const walk *w, long head, desk *at)
{
    const recurrence *d = s->l->recurrence;
    long dim = d->key_dim, ready = ready_of(d), by_rows = d->keeps > 1;
    float *memory = w->memory + (d->number * d->value_heads + head) * dim * d->value_dim;
    for (long line = 0; line < w->lines; line++) {
        long end = w->owed + w->line_start[line + 1] - w->line_start[line];
        for (long first = line ? w->taken : 0; first < end; first += ELEMENTS) {
            long many = least(ELEMENTS, end - first);
            for (long i = 0; i < many; i++) make_ready(s, w, line, first + i, head, at->ready + i * ready, at->gates + i);
            for (long c = 0; d->rule != SHORT && c < d->value_dim; c += STRIPE)
                for (long i = 0; i < many; i++) {
                    const float *query = at->ready + i * ready;
                    float *held = memory + c * dim, *guessed = at->state + c * dim, *state = first + i < w->taken ? held : guessed;
                    const float *key = query + dim, *value = key + dim + c, *kept = key + dim + d->value_dim;
                    long wide = least(STRIPE, d->value_dim - c);
                    __typeof__(&step) of_half = by_rows ? step_of_half_by_rows : step_of_half;
                    __typeof__(&step) go_on = wide < STRIPE ? of_half : by_rows ? step_by_rows : step;
                    if (first + i == w->taken) memcpy(guessed, held, 4 * dim * wide);
                    go_on(d->rule, state, query, key, value, at->gates + i, kept, dim, at->seen + i * d->value_dim + c);
                }
            for (long i = most(0, w->owed - first); i < many; i++)
                finish(s, at->ready + i * ready + 2 * dim, at->seen + i * d->value_dim,
                       w->line_row[w->line_start[line] + first + i - w->owed], head);
        }
    }
}

/* Numbers [from, to) of a row of the pass, as the history has them. */
static void keep_row(const scene *s, long row, long from, long to, char *place)
{
    const recurrence *d = s->l->recurrence;
    const strip *parts[] = {&s->channels, &s->written, &s->kept};
    long each = size(s->p->halves), behind = channels_of(d) + writes_of(d), starts[] = {0, channels_of(d), behind, width_of(d)};
    for (int i = 0; i < 3; i++) {
        long first = most(from, starts[i]), end = least(to, starts[i + 1]);
        if (first < end)
            memcpy(place + each * (first - from), parts[i]->at + row * parts[i]->apart + each * (first - starts[i]), each * (end - first));
    }
}

/* Keep what the states will lack: numbers [from, to) of rows. No place is written before it was read. */
static void remember(const scene *s, const walk *w, long from, long to)
{
    const recurrence *d = s->l->recurrence;
    long each = size(s->p->halves), row = each * width_of(d), at = 0, wide = each * (to - from);
    char *history = w->history + d->number * w->places * row + each * from;
    for (long i = w->taken; i < w->taken + d->reach; i++) {
        if (i < d->reach + w->owed) memmove(history + at++ * row, row_of(s, w, 0, i, s->channels, from), wide);
        else keep_row(s, w->line_row[i - d->reach - w->owed], from, to, history + at++ * row);
    }
    for (long i = w->taken; i < w->owed; i++) memmove(history + at++ * row, row_of(s, w, 0, d->reach + i, s->channels, from), wide);
    for (long r = w->first + most(0, w->taken - w->owed); r < w->first + w->rows; r++) keep_row(s, r, from, to, history + at++ * row);
}

/* A row's values of SHORT, times what stands behind the gates. */
static void meet(const run *p, const layer *l, long row)
{
    long n = channels_of(l->recurrence);
    char *values = p->written + size(p->halves) * row * l->qkv.out;
    for (long c = 0; c < n; c += LANES)
        store_lanes(values, c, load_lanes(values, c, p->halves) * load_lanes(values, 2 * n + c, p->halves), p->halves);
}

/* What all rows see, in `read`. */
static void go_all(const member *me, const scene *s)
{
    const run *p = s->p;
    const recurrence *d = s->l->recurrence;
    float *room = (float *)p->room + me->index * numbers_of(d);
    desk at = {room, room + d->key_dim * d->value_dim, 0};
    at.seen = at.ready + ELEMENTS * ready_of(d);
    const course *c = p->first; /* passes with states have one */
    long width = width_of(d);
    if (d->rule == SHORT) {
        MINE(r, p->rows) meet(p, s->l, r);
        join(me);
    }
    MINE(i, c->walk_count * d->value_heads) go(s, c->walks + i / d->value_heads, i % d->value_heads, &at);
    join(me);
    if (d->rule == SPACE) MINE(r, p->rows) norm_groups(p, s->l, r);
    for (const walk *w = c->walks; w < c->walks + c->walk_count; w++) remember(s, w, share(me, width, 0), share(me, width, 1));
    join(me);
}

/* What products of low rank make of what the first ones made. */
static void rise(const member *me, const scene *s)
{
    const run *p = s->p;
    const recurrence *d = s->l->recurrence;
    long each = size(p->halves), told = each * d->decays.in, opened = each * d->gates.in;
    char *of_decays = p->inner + before(d, 3, p->rows, p->halves), *of_gates = p->inner + before(d, 4, p->rows, p->halves);
    MINE(r, p->rows) {
        memcpy(of_decays + r * told, s->written.at + r * s->written.apart + each * d->value_heads, told);
        memcpy(of_gates + r * opened, s->channels.at + r * s->channels.apart + each * channels_of(d), opened);
    }
    join(me);
    multiplied(me, &d->decays, of_decays, p->room, (char *)s->kept.at, p->rows, p->halves, 0);
    multiplied(me, &d->gates, of_gates, p->room, (char *)s->gates.at, p->rows, p->halves, 0);
}

/* The same of what the first product read, in `read`, and left in `written`. */
void recall(const member *me, const run *p, const layer *l)
{
    const recurrence *d = l->recurrence;
    const scene s = scene_of(p, l, d->gates.out != 0);
    if (d->rule == DELTA) multiplied(me, &d->written_kept, p->read, p->room, p->inner, p->rows, p->halves, 0);
    if (d->gates.out) rise(me, &s);
    go_all(me, &s);
}

/* What rows see, read [rows, value_heads, value_dim], of what the first product made, written [rows, out], and those beside it, beside
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
    const scene s = scene_of(&p, &l, 0);
    TOGETHER(threads, threads > 1, go_all(me, &s));
    free(all);
    return 0;
}
