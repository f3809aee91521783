/* The whole pass of a model of Llama's blocks in one call: ids → logits, and the outputs of chosen layers. Compiled and called by
 * ../native.py; FusedPass.compute is the twin: the same numbers, to the bit.
 *
 * Beside the blocks there is little to do, but a small operation that is called by itself finds the caches cold.
 */
#include <stdlib.h>

#include "lanes.h"

/* embedding [vocabulary, hidden], taken times `factor`; angles [positions, turns]: of each rope cos, and sin as `turn` takes it, of `turned`
 * numbers each; sharp: they are float32. positions [places, hidden]: what is added to rows by theirs, or null. entered: the norm of what
 * enters, if there is one. */
typedef struct {
    const layer *layers;
    product output;
    scale norm;
    const void *embedding, *angles;
    long count, hidden, vocabulary, turns, turned;
    float factor;
    int sharp, halves;
    const void *positions;
    long places;
    const altup_ends *ends; /* of a model whose layers have several streams, or null */
    scale entered;
} model;

/* What is asked of a pass: ids [rows]; taps [tap_count], rising: layers whose outputs go to tapped [rows, tap_count, hidden]; keep [kept]:
 * rows whose logits are wanted, or null: all; logits [kept, output.out]. */
typedef struct {
    const int64_t *ids, *taps, *keep;
    void *tapped, *logits;
    long tap_count, kept;
    const void *sides; /* what stands beside rows, [rows, …] of so many bytes each, for layers with a `side`, or null */
    long side_stride;
    const course *rest; /* of the kept rows alone, or null: layers from the `lent`th on, which write no keys, are run for these */
    long lent;
} wish;

/* Bring the rows that are wanted to the front: of the streams, and of what they are turned by. */
static void leave_others(const member *me, const run *p, const wish *w, long bytes, long turns)
{
    char *all = (char *)p->cos; /* where `forward` put them */
    for (long i = 0; me->index == 0 && i < w->kept; i++) {
        memmove(p->x + i * bytes, p->x + w->keep[i] * bytes, bytes);
        memmove(all + i * turns, all + w->keep[i] * turns, turns);
        if (p->streams) come_along(p, w->keep[i], i, bytes);
    }
    join(me);
}

/* A team's pass over the streams in p, the normed ones of the rows whose logits are wanted in y. */
static void pass(const member *me, const model *m, const run *p, const wish *w, char *y, void *room)
{
    long bytes = size(m->halves) * m->hidden;
    run rest = *p;
    const run *now = p;
    rest.first = w->rest, rest.rows = w->kept, rest.keep = 0, rest.row_of = w->keep;
    if (m->ends) branch(me, p, m->ends, room);
    for (long number = 0, tap = 0; number < m->count; number++) {
        if (w->rest && number == w->lent) {
            leave_others(me, p, w, bytes, size(m->halves && !m->sharp) * m->turns);
            now = &rest;
        }
        through(me, now, m->layers + number, number);
        if (tap == w->tap_count || w->taps[tap] != number) continue;
        MINE(r, p->rows) memcpy((char *)w->tapped + (r * w->tap_count + tap) * bytes, p->x + r * bytes, bytes);
        tap++;
    }
    if (m->ends) merge(me, p, m->ends, room, p->keep ? 0 : w->keep, w->kept);
    MINE(i, w->kept) norm_or_copy(p->x + (w->keep && !p->keep ? w->keep[i] : i) * bytes, &m->norm, y + i * bytes, m->hidden, m->halves);
    join(me);
    multiplied(me, &m->output, y, room, w->logits, w->kept, m->halves, 0);
}

/* Returns 0, 1 without memory, or 2, and has done nothing, if an id is none of the vocabulary's. */
int forward(const model *m, const course *c, const wish *w, int threads)
{
    long bytes = size(m->halves) * m->hidden, angle = size(m->halves && !m->sharp), turned = angle * m->turns, rows = c->rows;
    for (long r = 0; r < rows; r++)
        if (w->ids[r] < 0 || w->ids[r] >= m->vocabulary) return 2;
    long streams = UP(rows * bytes, 64), angles = UP(rows * turned, 64), normed = UP(w->kept * bytes, 64);
    long others = m->ends ? (STREAMS - 1) * streams : 0, room = room_for(&m->output, w->kept, m->halves, threads);
    if (m->ends) room = most(room, ends_need(m->ends, rows, m->halves, threads));
    char *x = aligned_alloc(64, streams + angles + normed + others + UP(room, 64));
    char *turns = x + streams, *y = turns + angles;
    int failed = 0;
    journey journey;
    run p = {c, 1, rows, m->turns, x, 0, turns, turns + angle * m->turned, m->sharp, m->halves, threads, &failed, 0, 0, 0, 0,
             w->tap_count && w->taps[w->tap_count - 1] == m->count - 1 ? 0 : w->keep, w->kept, m->count - 1, &journey};
    p.sides = w->sides, p.side_stride = w->side_stride, p.streams = others ? y + normed : 0;
    char *all = x ? equip(&p, m->layers, m->count) : 0;
    for (long r = 0; all && r < rows; r++) {
        enlarge((const char *)m->embedding + w->ids[r] * bytes, m->factor, x + r * bytes, m->hidden, m->halves);
        long place = c->position[r] < m->places ? c->position[r] : m->places - 1; /* a row that nobody reads may stand behind them */
        if (m->positions) plus_row(x + r * bytes, (const char *)m->positions + place * bytes, m->hidden, m->halves);
        if (m->entered.weight) norm_of_row(x + r * bytes, &m->entered, x + r * bytes, 1, m->hidden, m->halves);
        memcpy(turns + r * turned, (const char *)m->angles + c->position[r] * turned, turned);
    }
    if (all) TOGETHER(threads, worth_a_team(m->layers, rows), pass(me, m, &p, w, y, y + normed + others));
    free(all);
    free(x);
    return !all || failed;
}
