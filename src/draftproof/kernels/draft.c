/* A draft of one sequence by an EAGLE-3 head in one call: a chain, or a tree that grows level by level. Compiled and called by
 * ../native.py; drafters/recurrent.py and grow.py say how a draft comes about, in lines that are the twins: the same numbers, to the bit.
 *
 * A level's head is a tenth of a millisecond; finding and calling forty small operations takes four times as long.
 */
#include <math.h>
#include <stdlib.h>

#include "lanes.h"

#define SURE 64.0f /* the gap of a token that has no rival */

/* embedding [vocabulary, hidden]; ids [size]: the tokens of the output's columns, or null: themselves; angles [positions, 2, dim]: cos, and
 * sin as `turn` takes it. normed: the stream itself goes on as its norm. */
typedef struct {
    const layer *layers;
    product output;
    const void *norm, *embedding, *angles;
    const int64_t *ids;
    long count, hidden, size, dim;
    float eps;
    int normed, halves;
} head;

/* What is asked for, and what comes of it, in candidates [depth, widest, k]. keys [depth, 2], or null: no noise, and, of a chain, logits
 * as they are; ends: tokens behind which nothing grows; chances: log [k, gap_bins, share_bins], bins ending at edges, or null: a chain;
 * own [layers, 2, room, kv_heads, dim]: entries, `held` of which stand in pages of `page`; the text's next one has this `position`.
 * spots [depth, widest]: which candidate of the level above a slot is. */
typedef struct {
    const uint32_t *keys;
    const int64_t *ends;
    const float *chances, *gap_edges, *share_edges;
    void *own;
    int64_t *tokens, *spots;
    float *values, *shares, *gaps, *worth;
    long depth, widest, k, nodes, position, held, room, page, end_count, gap_bins, share_bins;
    float temperature;
} growth;

/* Memory for a level's rows [widest]. sight, next: what a slot sees of all entries. */
typedef struct {
    char *x, *y, *z, *logits;
    float *law, *reach;
    uint32_t *room, *keys;
    int64_t *numbers;
    uint8_t *sight, *next;
} desk;

/* Of `slots` streams x: the best candidates of a level. Returns 0, or 1 if a logit is no number. */
static int look(const head *h, const growth *g, const desk *d, long level, long slots, int threads)
{
    long first = level * g->widest * g->k, last = first + slots * g->k;
    int lawful = g->keys || g->chances;
    if (!h->normed) norm(d->x, h->norm, d->y, slots, 1, h->hidden, h->hidden, h->eps, h->halves, threads);
    int wrong = multiply(&h->output, h->normed ? d->x : d->y, d->room, d->logits, slots, h->halves, threads);
    widen(d->logits, 0, slots * h->size, h->halves, d->law, slots * h->size);
    for (long i = 0; !lawful && i < slots * h->size; i++) wrong |= !(d->law[i] < INFINITY);
    if (lawful) wrong |= law(d->law, d->law, slots, h->size, g->temperature, 0, threads);
    for (long s = 0; g->keys && s < slots; s++) memcpy(d->keys + 2 * s, g->keys + 2 * level, 8);
    wrong |= best(d->law, slots, h->size, g->keys ? d->keys : 0, h->ids, g->k, g->values + first, g->tokens + first, threads);
    for (long i = first; g->chances && i < last; i++) g->shares[i] = d->law[(i - first) / g->k * h->size + g->tokens[i]];
    for (long i = first; h->ids && i < last; i++) g->tokens[i] = h->ids[g->tokens[i]];
    return wrong;
}

static long bin_of(float value, const float *edges, long bins)
{
    long bin = 0;
    while (bin < bins - 1 && edges[bin] < value) bin++;
    return bin;
}

/* grow.py's gaps_of and Odds.of: the worth of a level's candidates. reach [slots]: log chance that the walk comes there. */
static void judge(const growth *g, long level, long slots, const float *reach)
{
    for (long s = 0; s < slots; s++) {
        long first = (level * g->widest + s) * g->k;
        const float *value = g->values + first;
        for (long j = 0; j < g->k; j++) {
            float gap = j ? value[0] - value[j] : g->k > 1 ? value[0] - value[1] : SURE;
            if (gap != gap) gap = INFINITY;
            long row = j * g->gap_bins + bin_of(gap, g->gap_edges, g->gap_bins);
            float chance = g->chances[row * g->share_bins + bin_of(g->shares[first + j], g->share_edges, g->share_bins)];
            g->gaps[first + j] = gap;
            g->worth[first + j] = value[j] == -INFINITY ? -INFINITY : reach[s] + chance;
        }
    }
}

static int ends(const growth *g, int64_t token)
{
    for (long i = 0; i < g->end_count; i++)
        if (g->ends[i] == token) return 1;
    return 0;
}

/* Which candidates of a level are extended: their spots, and in reach what these are worth. Returns how many; 0: no deeper node could enter
 * the tree, which has `nodes`. */
static long extended(const growth *g, long level, const long *slots, float *reach)
{
    int64_t *spots = g->spots + (level + 1) * g->widest;
    const float *worth = g->worth + level * g->widest * g->k;
    long count = 0, worthier = 0, all = 0;
    for (long i = 0; i < slots[level] * g->k; i++) {
        float value = ends(g, g->tokens[level * g->widest * g->k + i]) ? -INFINITY : worth[i];
        if (count < g->widest || value > reach[g->widest - 1]) count = placed(value, i, g->widest, count, reach, spots);
    }
    for (long above = 0; above <= level; above++)
        for (long i = 0; i < slots[above] * g->k; i++, all++) worthier += g->worth[above * g->widest * g->k + i] >= reach[0];
    return worthier >= g->nodes || (all < g->nodes && reach[0] == -INFINITY) ? 0 : count;
}

/* The head's step over `slots` extended candidates, children of the streams x. `entries` were guessed before them. Returns 0, or 1 without
 * memory. */
static int step(const head *h, const growth *g, desk *d, long level, long slots, long entries, int threads)
{
    long bytes = size(h->halves) * h->hidden, start = g->held + entries, end = start + slots, pages = (end + g->page - 1) / g->page;
    int64_t *position = d->numbers, *place = position + g->widest, *row = place + g->widest, *page = row + g->widest;
    const int64_t rows[2] = {0, slots}, of_pages[2] = {0, pages}, none = 0;
    for (long s = 0; s < slots; s++) {
        long spot = g->spots[(level + 1) * g->widest + s], parent = spot / g->k;
        memcpy(d->y + s * bytes, d->x + parent * bytes, bytes);
        memcpy(d->z + s * bytes, (const char *)h->embedding + g->tokens[level * g->widest * g->k + spot] * bytes, bytes);
        position[s] = g->chances ? end - 1 : start, place[s] = start + s, row[s] = s;
        if (!g->chances) continue;
        memcpy(d->next + s * end, d->sight + parent * start, start);
        memset(d->next + s * end + start, 0, slots);
        d->next[s * end + start + s] = 1;
    }
    for (long i = 0; i < pages; i++) page[i] = i;
    const course c = {slots, 1, slots, g->page, position, rows, of_pages, row, page, &none, place, row, g->own, g->room,
                      g->chances ? d->next : 0, end};
    const char *cos = (const char *)h->angles + size(h->halves) * (g->position + level) * 2 * h->dim;
    uint8_t *before = d->sight;
    char *streams = d->x;
    d->sight = d->next, d->next = before, d->x = d->y, d->y = streams;
    int failed = blocks(h->layers, h->count, &c, 1, d->x, d->z, cos, cos + size(h->halves) * h->dim, 0, h->halves, threads);
    if (h->normed) {
        norm(d->x, h->norm, d->y, slots, 1, h->hidden, h->hidden, h->eps, h->halves, threads);
        streams = d->x, d->x = d->y, d->y = streams;
    }
    return failed;
}

/* Room for all of a desk; its own address is the memory's, to be freed. */
static char *furnish(const head *h, const growth *g, desk *d)
{
    long wide = g->widest, stream = UP(wide * h->hidden * 4, 64), logits = UP(wide * h->size * 4, 64), seen = g->held + wide * g->depth;
    long words = UP(4 * wide * room_of(h->output.bits, h->hidden, h->halves, wide), 64), sight = UP(wide * seen, 64);
    long numbers = 8 * (3 * wide + seen / g->page + 1);
    char *all = aligned_alloc(64, UP(3 * stream + 2 * logits + words + 2 * sight + UP(numbers, 64) + 12 * wide, 64)), *at = all;
    if (!all) return 0;
    d->x = at, at += stream, d->y = at, at += stream, d->z = at, at += stream;
    d->logits = at, at += logits, d->law = (float *)at, at += logits;
    d->room = (uint32_t *)at, at += words;
    d->sight = (uint8_t *)at, at += sight, d->next = (uint8_t *)at, at += sight;
    d->numbers = (int64_t *)at, at += UP(numbers, 64);
    d->keys = (uint32_t *)at, d->reach = (float *)(at + 8 * wide);
    return all;
}

/* Levels of candidates after the stream `last` [hidden]; slots [depth]: of each level. Returns how many there are, -1 without memory, or -2
 * if a logit is no number. */
long draft(const head *h, const growth *g, const void *last, long *slots, int threads)
{
    desk d;
    char *all = furnish(h, g, &d);
    long level = 0, entries = 0, failed = 0;
    if (!all) return -1;
    memcpy(d.x, last, size(h->halves) * h->hidden);
    memset(d.sight, 1, g->held);
    *slots = 1, *d.reach = 0, *g->spots = 0;
    for (;; level++) {
        if (look(h, g, &d, level, slots[level], threads)) failed = -2;
        if (failed) break;
        if (g->chances) judge(g, level, slots[level], d.reach);
        if (level + 1 == g->depth) break;
        long wide = g->chances ? extended(g, level, slots, d.reach) : !ends(g, g->tokens[level * g->widest * g->k]);
        if (!wide) break;
        if (!g->chances) g->spots[level + 1] = 0;
        slots[level + 1] = wide;
        if (step(h, g, &d, level, wide, entries, threads)) failed = -1;
        if (failed) break;
        entries += wide;
    }
    free(all);
    return failed ? failed : level + 1;
}
