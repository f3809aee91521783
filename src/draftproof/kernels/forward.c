/* The whole pass of a model of Llama's blocks in one call: ids → logits, and the outputs of chosen layers. Compiled and called by
 * ../native.py; FusedPass.compute is the twin: the same numbers, to the bit.
 *
 * Beside the blocks there is little to do, but a small operation that is called by itself finds the caches cold.
 */
#include <stdlib.h>

#include "lanes.h"

/* embedding [vocabulary, hidden]; angles [positions, 2, dim]: cos, and sin as `turn` takes it. */
typedef struct {
    const layer *layers;
    product output;
    const void *norm, *embedding, *angles;
    long count, hidden, vocabulary, dim;
    float eps;
    int halves;
} model;

/* What is asked of a pass: ids [rows]; taps [tap_count], rising: layers whose outputs go to tapped [rows, tap_count, hidden]; keep [kept]:
 * rows whose logits are wanted, or null: all; logits [kept, output.out]. */
typedef struct {
    const int64_t *ids, *taps, *keep;
    void *tapped, *logits;
    long tap_count, kept;
} wish;

/* The layers over x [rows, hidden], in stretches that end with a tap. Returns 0, or 1 without memory. */
static int climb(const model *m, const course *c, const wish *w, char *x, const char *angles, int threads)
{
    long bytes = size(m->halves) * m->hidden, ran = 0;
    const char *sines = angles + size(m->halves) * m->dim;
    int failed = 0;
    for (long t = 0; t <= w->tap_count; t++) {
        long end = t < w->tap_count ? w->taps[t] + 1 : m->count;
        if (ran < end) failed |= blocks(m->layers + ran, end - ran, c, 1, x, 0, angles, sines, 2 * m->dim, m->halves, threads);
        for (long r = 0; t < w->tap_count && r < c->rows; r++)
            memcpy((char *)w->tapped + (r * w->tap_count + t) * bytes, x + r * bytes, bytes);
        ran = end;
    }
    return failed;
}

/* Returns 0, 1 without memory, or 2, and has done nothing, if an id is none of the vocabulary's. */
int forward(const model *m, const course *c, const wish *w, int threads)
{
    long bytes = size(m->halves) * m->hidden, turned = size(m->halves) * 2 * m->dim;
    for (long r = 0; r < c->rows; r++)
        if (w->ids[r] < 0 || w->ids[r] >= m->vocabulary) return 2;
    long streams = UP(c->rows * bytes, 64), angles = UP(c->rows * turned, 64), normed = UP(w->kept * bytes, 64);
    char *x = aligned_alloc(64, streams + angles + normed), *turns = x + streams, *y = turns + angles;
    if (!x) return 1;
    for (long r = 0; r < c->rows; r++) {
        memcpy(x + r * bytes, (const char *)m->embedding + w->ids[r] * bytes, bytes);
        memcpy(turns + r * turned, (const char *)m->angles + c->position[r] * turned, turned);
    }
    int failed = climb(m, c, w, x, turns, threads);
    if (!w->keep) norm(x, m->norm, y, c->rows, 1, m->hidden, m->hidden, m->eps, m->halves, threads);
    for (long i = 0; w->keep && i < w->kept; i++)
        norm(x + w->keep[i] * bytes, m->norm, y + i * bytes, 1, 1, m->hidden, m->hidden, m->eps, m->halves, threads);
    failed |= multiply(&m->output, y, w->logits, w->kept, m->halves, threads);
    free(x);
    return failed;
}
