/* What Gemma 3n has beside Llama's block. Compiled and called by block.c and forward.c; models/streams.py has the twin.
 *
 * AltUp (Baykal et al., arXiv 2301.13310): STREAMS stand beside each other, and layers compute with the first. Each is predicted as a sum
 * of all before a layer, and corrected behind it by what that changed of the first; by how much, a small router says. LAuReL (Menghani
 * et al., arXiv 2411.07501): a product of low rank beside attention. Gates below most of their row are none (You et al., arXiv 2506.06644).
 */
#include <math.h>

#include "lanes.h"

#define OTHERS (STREAMS - 1)

/* LANES numbers of n from the c-th on, or as many as there are. */
static inline floats some(const char *from, long c, long n, int halves)
{
    if (c + LANES <= n) return load_lanes(from, c, halves);
    floats found = {0};
    for (long i = 0; i < n - c; i++) found[i] = load(from, c + i, halves);
    return found;
}

static inline void put(char *to, long c, long n, floats value, int halves)
{
    if (c + LANES <= n) store_lanes(to, c, value, halves);
    else for (long i = 0; i < n - c; i++) store(to, c + i, value[i], halves);
}

static char *others_of(const run *p, long r, long bytes) { return p->streams + OTHERS * r * bytes; }

static float dot(const float *a, const float *b) { return a[0] * b[0] + a[1] * b[1] + a[2] * b[2] + a[3] * b[3]; }

/* tanh(router(norm(x) * share)) [STREAMS], rounded after each step, through `room` [n]. */
static void modalities(const altup *a, const char *x, char *room, long n, int halves, float *to)
{
    norm_of_row(x, &a->of_router, room, 1, n, halves);
    enlarge(room, a->share, room, n, halves);
    for (long s = 0; s < STREAMS; s++) {
        const char *weight = (const char *)a->router + size(halves) * s * n;
        floats sums = {0}, twice = {0};
        for (long c = 0; c < n; c += LANES) sums += some(room, c, n, halves) * some(weight, c, n, halves);
        twice += 2 * kept(total(sums), halves);
        to[s] = kept(2 * sigmoid(twice)[0] - 1, halves);
    }
}

/* Every stream and a sum of all in its place; the first one aside, too. */
void predict(const member *me, const run *p, const layer *l)
{
    long n = l->o.out, bytes = size(p->halves) * n;
    MINE(r, p->rows) {
        char *at[STREAMS] = {p->x + r * bytes};
        float seen[STREAMS], by[STREAMS * STREAMS];
        for (int s = 1; s < STREAMS; s++) at[s] = others_of(p, r, bytes) + (s - 1) * bytes;
        modalities(l->altup, at[0], p->inner + r * bytes, n, p->halves, seen);
        for (int i = 0; i < STREAMS * STREAMS; i++) by[i] = kept(dot(l->altup->predict + i * STREAMS, seen), p->halves);
        for (long c = 0; c < n; c += LANES) {
            floats from[STREAMS];
            for (int s = 0; s < STREAMS; s++) from[s] = some(at[s], c, n, p->halves);
            for (int s = 0; s < STREAMS; s++) {
                floats sum = {0};
                for (int k = 0; k < STREAMS; k++) sum += by[s * STREAMS + k] * from[k];
                put(at[s], c, n, kept_lanes(sum, p->halves) + from[s], p->halves);
            }
        }
        memcpy(p->aside + 2 * r * bytes, at[0], bytes);
    }
}

/* x + norm(right(left(x))) of the rows in `read`, aside. */
void stay(const member *me, const run *p, const layer *l)
{
    long n = l->o.out, bytes = size(p->halves) * n;
    multiplied(me, &l->altup->left, p->read, p->room, p->inner, p->rows, p->halves, 0);
    multiplied(me, &l->altup->right, p->inner, p->room, p->written, p->rows, p->halves, 0);
    MINE(r, p->rows) {
        char *to = p->aside + (2 * r + 1) * bytes;
        norm_of_row(p->written + r * bytes, &l->altup->of_laurel, to, 1, n, p->halves);
        plus_row(to, p->read + r * bytes, n, p->halves);
    }
    join(me);
}

/* The mean of x and what stands aside, times the root of 2. */
void rejoin(const member *me, const run *p, const layer *l, long rows)
{
    long n = l->o.out, bytes = size(p->halves) * n;
    MINE(r, rows) {
        plus_row(p->x + r * bytes, p->aside + (2 * r + 1) * bytes, n, p->halves);
        enlarge(p->x + r * bytes, 0.70710678f, p->x + r * bytes, n, p->halves);
    }
}

/* Of the rows in `written`, x [n] less the mean of it and `cut` times its deviation, where that is more than 0. */
void cut_off(const member *me, const run *p, const layer *l, long rows)
{
    long n = l->down.in, halves = p->halves;
    MINE(r, rows) {
        char *x = p->written + size(halves) * r * l->gate_up.out;
        floats sums = {0}, squares = {0}, least = {0};
        for (long c = 0; c < n; c += LANES) sums += some(x, c, n, halves);
        float mean = total(sums) / n;
        long c = 0;
        for (; c + LANES <= n; c += LANES) squares += (load_lanes(x, c, halves) - mean) * (load_lanes(x, c, halves) - mean);
        for (int j = 0; c + j < n; j++) squares[j] += (load(x, c + j, halves) - mean) * (load(x, c + j, halves) - mean);
        least += kept(kept(mean, halves) + kept(kept(sqrtf(total(squares) / n), halves) * l->altup->cut, halves), halves);
        for (c = 0; c < n; c += LANES) {
            floats over = some(x, c, n, halves) - least;
            put(x, c, n, either(over <= 0, (floats){0}, over), halves); /* what is no number stays so */
        }
    }
    join(me);
}

/* Every stream and its share of what the layer has changed of the first; and in `read` that one, taken times what `side` reads it by. */
void correct(const member *me, const run *p, const layer *l, long rows)
{
    const altup *a = l->altup;
    long n = l->o.out, bytes = size(p->halves) * n;
    MINE(r, rows) {
        char *x = p->x + r * bytes, *predicted = p->aside + 2 * r * bytes, *others = others_of(p, r, bytes), *read = p->read + r * bytes;
        float seen[STREAMS], by[STREAMS];
        modalities(a, x, p->inner + r * bytes, n, p->halves, seen);
        for (int s = 0; s < STREAMS; s++) by[s] = kept(kept(dot(a->correct + s * STREAMS, seen), p->halves) + 1, p->halves);
        for (long c = 0; c < n; c += LANES) {
            floats before = some(predicted, c, n, p->halves), changed = kept_lanes(some(x, c, n, p->halves) - before, p->halves);
            floats own = kept_lanes(kept_lanes(changed * by[0], p->halves) + before, p->halves);
            put(x, c, n, own, p->halves);
            put(read, c, n, own * some(a->by, c, n, p->halves), p->halves);
            for (int s = 1; s < STREAMS; s++, others += bytes)
                put(others, c, n, kept_lanes(changed * by[s], p->halves) + some(others, c, n, p->halves), p->halves);
            others -= OTHERS * bytes;
        }
    }
    join(me);
}

/* What a layer adds last, in `written`, normed: to the others. */
void add_to_others(const member *me, const run *p, const layer *l, long rows)
{
    long n = l->o.out, bytes = size(p->halves) * n;
    MINE(r, rows) {
        char *made = p->written + r * bytes;
        norm_of_row(made, &l->side->of_side, made, 1, n, p->halves);
        for (int s = 0; s < OTHERS; s++) plus_row(others_of(p, r, bytes) + s * bytes, made, n, p->halves);
    }
    join(me);
}

/* Bring a wanted row to the front: of the streams beside the first, and of what stands aside. */
void come_along(const run *p, long from, long to, long bytes)
{
    memmove(others_of(p, to, bytes), others_of(p, from, bytes), OTHERS * bytes);
    memmove(p->aside + 2 * to * bytes, p->aside + 2 * from * bytes, 2 * bytes);
}

/* Memory that such a layer needs, in numbers of a row, and for its products in bytes: the greater of that and what is there. */
void altup_needs(const run *p, const layer *l, long *inner, long *room)
{
    const product *left = &l->altup->left, *right = &l->altup->right;
    *inner = most(*inner, most(left->in, left->out));
    *room = most(*room, most(room_for(left, p->rows, p->halves, p->threads), room_for(right, p->rows, p->halves, p->threads)));
}

/* What products at both ends need, in bytes. */
long ends_need(const altup_ends *e, long rows, int halves, int threads)
{
    long room = 0;
    for (int s = 0; s < OTHERS; s++) {
        room = most(room, room_for(&e->enter[s], rows, halves, threads));
        room = most(room, room_for(&e->leave[s], rows, halves, threads));
    }
    return room;
}

/* The root of x's mean square, at least that of `least`. */
static float magnitude(const char *x, float least, long n, int halves)
{
    floats sums = {0};
    for (long c = 0; c < n; c += LANES) sums += kept_lanes(some(x, c, n, halves) * some(x, c, n, halves), halves);
    float mean = kept(total(sums) / n, halves);
    return kept(sqrtf(mean < least ? least : mean), halves);
}

/* y [n] = x, made as large as `like` is. */
static void as_large(const char *x, const char *like, char *y, long n, int halves)
{
    float own = magnitude(x, kept(1e-5f, halves), n, halves), target = magnitude(like, 0, n, halves);
    for (long c = 0; c < n; c += LANES) put(y, c, n, kept_lanes(some(x, c, n, halves) * target, halves) / own, halves);
}

/* The streams beside the first, of the embedded rows in x. */
void branch(const member *me, const run *p, const altup_ends *e, void *room)
{
    long n = e->enter[0].out, bytes = size(p->halves) * n;
    for (int s = 0; s < OTHERS; s++) {
        multiplied(me, &e->enter[s], p->x, room, p->written, p->rows, p->halves, 0);
        MINE(r, p->rows) as_large(p->written + r * bytes, p->x + r * bytes, others_of(p, r, bytes) + s * bytes, n, p->halves);
        join(me);
    }
}

/* x = the mean of what becomes of all streams, of the rows `keep` [kept], or of so many. */
void merge(const member *me, const run *p, const altup_ends *e, void *room, const int64_t *keep, long kept)
{
    long n = e->leave[0].out, bytes = size(p->halves) * n;
#define ROW (keep ? keep[i] : i)
    for (int s = 0; s < OTHERS; s++) {
        MINE(i, kept) memcpy(p->read + i * bytes, others_of(p, ROW, bytes) + s * bytes, bytes);
        join(me);
        multiplied(me, &e->leave[s], p->read, room, p->written, kept, p->halves, 0);
        MINE(i, kept) as_large(p->written + i * bytes, p->x + ROW * bytes, others_of(p, ROW, bytes) + s * bytes, n, p->halves);
        join(me);
    }
    MINE(i, kept) {
        char *x = p->x + ROW * bytes, *others = others_of(p, ROW, bytes);
        for (long c = 0; c < n; c += LANES) {
            floats sum = some(x, c, n, p->halves);
            for (int s = 0; s < OTHERS; s++) sum += some(others + s * bytes, c, n, p->halves);
            put(x, c, n, sum / STREAMS, p->halves);
        }
    }
#undef ROW
}
