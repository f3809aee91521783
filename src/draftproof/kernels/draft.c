/* A draft of one sequence by an EAGLE-3 head in one call: a chain, or a tree that grows level by level. Compiled and called by
 * ../native.py; drafters/recurrent.py and grow.py say how a draft comes about, in lines that are the twins: the same numbers, to the bit.
 *
 * A level's head is a tenth of a millisecond; finding and calling forty small operations takes four times as long.
 */
#include <math.h>
#include <stdlib.h>

#include "lanes.h"

#define SURE 64.0f /* the gap of a token that has no rival */

/* fuse: what the target's hidden states pass through; before: norms before it, [parts, fuse.in / parts]. embedding
 * [vocabulary, hidden]; ids [size]: the tokens of the output's columns, or null: themselves; angles [positions, 2, dim]: cos, and sin as
 * `turn` takes it. normed: the stream itself goes on as its norm. */
typedef struct {
    const layer *layers;
    product output, fuse;
    scale before, norm;
    const void *embedding, *angles;
    const int64_t *ids;
    long count, hidden, size, dim, parts;
    int normed, halves;
} head;

/* What is asked for, and what comes of it, in candidates [depth, widest, k]. features [fed, fuse.in]: of the text's last entries, which are
 * not there yet, and text [fed]: their tokens; keys [depth, 2], or null: no noise, and, of a chain, logits as they are; ends: tokens behind
 * which nothing grows; chances: log [k, gap_bins, share_bins], bins ending at edges, or null: a chain; own [layers, 2, room, kv_heads,
 * dim]: entries, of which the text has `held`, those to be fed among them, in pages of `page`; the text's next one has this `position`.
 * slots [depth]: of each level made; spots [depth, widest]: which candidate of the level above a slot is. Of a tree, the worthiest of all
 * candidates, `kept` of them, at most `nodes`: what they are worth, their numbers, those of the candidates above them (-1: none), their
 * tokens, and scores, see grow.py. */
typedef struct {
    const void *features;
    const int64_t *text, *ends;
    const uint32_t *keys;
    const float *chances, *gap_edges, *share_edges;
    void *own;
    int64_t *tokens, *spots, *slots, *number, *above, *named;
    float *values, *shares, *gaps, *worth, *most, *score;
    long fed, depth, widest, k, nodes, position, held, room, page, end_count, gap_bins, share_bins, levels, kept;
    filters narrowed; /* at temperature 1 */
    float temperature;
} growth;

/* Memory for the rows of a level, or those that are fed. sight, next: what a slot sees of all entries. */
typedef struct {
    char *x, *y, *z, *read, *logits;
    float *law, *reach;
    uint32_t *keys;
    int64_t *numbers;
    uint8_t *sight, *next;
} desk;

/* Of `slots` streams x: the best candidates of a level. Returns 0, or 1 if a logit is no number. */
static int look(const head *h, const growth *g, const desk *d, long level, long slots, int threads)
{
    long first = level * g->widest * g->k, last = first + slots * g->k;
    int lawful = g->keys || g->chances;
    if (!h->normed) norm(d->x, &h->norm, d->y, slots, 1, h->hidden, h->hidden, h->halves, threads);
    int wrong = multiply(&h->output, h->normed ? d->x : d->y, d->logits, slots, h->halves, threads);
    if (lawful) {
        wrong |= law(d->logits, d->law, slots, h->size, g->temperature, h->halves, threads);
        if (!wrong) narrow(d->law, slots, h->size, &g->narrowed, threads);
    } else {
        widen(d->logits, 0, slots * h->size, h->halves, d->law, slots * h->size);
        for (long i = 0; i < slots * h->size; i++) wrong |= !(d->law[i] < INFINITY);
    }
    for (long s = 0; g->keys && s < slots; s++) memcpy(d->keys + 2 * s, g->keys + 2 * level, 8);
    wrong |= best(d->law, slots, h->size, g->keys ? d->keys : 0, h->ids, g->k, g->values + first, g->tokens + first, threads);
    wrong |= g->values[first] == -INFINITY;
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
static long extended(const growth *g, long level, float *reach)
{
    int64_t *spots = g->spots + (level + 1) * g->widest;
    const float *worth = g->worth + level * g->widest * g->k;
    long count = 0, worthier = 0, all = 0;
    for (long i = 0; i < g->slots[level] * g->k; i++) {
        float value = ends(g, g->tokens[level * g->widest * g->k + i]) ? -INFINITY : worth[i];
        if (count < g->widest || value > reach[g->widest - 1]) count = placed(value, i, g->widest, count, reach, spots);
    }
    for (long above = 0; above <= level; above++)
        for (long i = 0; i < g->slots[above] * g->k; i++, all++) worthier += g->worth[above * g->widest * g->k + i] >= reach[0];
    return worthier >= g->nodes || (all < g->nodes && reach[0] == -INFINITY) ? 0 : count;
}

/* The worthiest of all candidates, equals in order of place, as grow.py's `finish` has them. */
static void keep(growth *g)
{
    g->kept = 0;
    for (long level = 0; level < g->levels; level++)
        for (long i = 0; i < g->slots[level] * g->k; i++) {
            long at = level * g->widest * g->k + i;
            if (g->worth[at] == -INFINITY || (g->kept == g->nodes && g->worth[at] <= g->most[g->nodes - 1])) continue;
            g->kept = placed(g->worth[at], at, g->nodes, g->kept, g->most, g->number);
        }
    for (long i = 0; i < g->kept; i++) {
        long at = g->number[i], slot = at / g->k, level = slot / g->widest;
        float score = g->gaps[at] < SURE ? g->gaps[at] : SURE;
        g->above[i] = level ? (level - 1) * g->widest * g->k + g->spots[slot] : -1;
        g->named[i] = g->tokens[at];
        g->score[i] = at % g->k ? -score : score;
    }
}

/* The head's layers over new entries of the streams x, with embeddings z beside them: `rows` entries behind `start`, of the text's positions
 * from `at` on; or, with a sight [rows, start + rows] of each, all of that position. Returns 0, or 1 without memory. */
static int pass(const head *h, const growth *g, desk *d, long rows, long start, long at, const uint8_t *sight, int threads)
{
    long end = start + rows, pages = (end + g->page - 1) / g->page, angles = 2 * h->dim;
    int64_t *position = d->numbers, *place = position + rows, *row = place + rows, *page = row + rows;
    const int64_t of_rows[2] = {0, rows}, of_pages[2] = {0, pages}, none = 0;
    for (long r = 0; r < rows; r++) position[r] = sight ? end - 1 : start + r, place[r] = start + r, row[r] = r;
    for (long i = 0; i < pages; i++) page[i] = i;
    const course c = {rows, 1, rows, g->page, position, of_rows, of_pages, row, page, &none, place, row, g->own, g->room, sight, end};
    const char *cos = (const char *)h->angles + size(h->halves) * at * angles, *sin = cos + size(h->halves) * h->dim;
    int failed = blocks(h->layers, h->count, &c, 1, d->x, d->z, cos, sin, sight ? 0 : angles, 0, h->halves, threads, 0, 0, 0, 0);
    if (h->normed) {
        char *streams = d->x;
        norm(d->x, &h->norm, d->y, rows, 1, h->hidden, h->hidden, h->halves, threads);
        d->x = d->y, d->y = streams;
    }
    return failed;
}

/* The text's entries that are not there yet, by what the target left; the last one's stream comes to stand in `last`. Returns 0, or 1 without
 * memory. */
static int feed(const head *h, const growth *g, desk *d, void *last, int threads)
{
    long bytes = size(h->halves) * h->hidden, part = h->fuse.in / h->parts;
    if (h->before.weight) norm(g->features, &h->before, d->read, g->fed, h->parts, part, h->fuse.in, h->halves, threads);
    int failed = multiply(&h->fuse, h->before.weight ? d->read : g->features, d->x, g->fed, h->halves, threads);
    for (long r = 0; r < g->fed; r++) memcpy(d->z + r * bytes, (const char *)h->embedding + g->text[r] * bytes, bytes);
    failed |= pass(h, g, d, g->fed, g->held - g->fed, g->position - g->fed, 0, threads);
    memcpy(last, d->x + (g->fed - 1) * bytes, bytes);
    return failed;
}

/* The head's step over `slots` extended candidates, children of the streams x. `entries` were guessed before them. Returns 0, or 1 without
 * memory. */
static int step(const head *h, const growth *g, desk *d, long level, long slots, long entries, int threads)
{
    long bytes = size(h->halves) * h->hidden, start = g->held + entries, end = start + slots;
    for (long s = 0; s < slots; s++) {
        long spot = g->spots[(level + 1) * g->widest + s], parent = spot / g->k;
        memcpy(d->y + s * bytes, d->x + parent * bytes, bytes);
        memcpy(d->z + s * bytes, (const char *)h->embedding + g->tokens[level * g->widest * g->k + spot] * bytes, bytes);
        if (!g->chances) continue;
        memcpy(d->next + s * end, d->sight + parent * start, start);
        memset(d->next + s * end + start, 0, slots);
        d->next[s * end + start + s] = 1;
    }
    uint8_t *before = d->sight;
    char *streams = d->x;
    d->sight = d->next, d->next = before, d->x = d->y, d->y = streams;
    return pass(h, g, d, slots, start, g->position + level, g->chances ? d->sight : 0, threads);
}

/* Room for all of a desk; its own address is the memory's, to be freed. */
static char *furnish(const head *h, const growth *g, desk *d)
{
    long wide = g->widest, rows = most(wide, g->fed), stream = UP(rows * h->hidden * 4, 64), logits = UP(wide * h->size * 4, 64);
    long normed = h->before.weight ? UP(g->fed * h->fuse.in * 4, 64) : 0, seen = g->held + wide * g->depth, sight = UP(wide * seen, 64);
    long numbers = UP(8 * (3 * rows + seen / g->page + 1), 64);
    char *all = aligned_alloc(64, UP(3 * stream + normed + 2 * logits + 2 * sight + numbers + 12 * wide, 64)), *at = all;
    if (!all) return 0;
    d->x = at, at += stream, d->y = at, at += stream, d->z = at, at += stream;
    d->read = at, at += normed;
    d->logits = at, at += logits, d->law = (float *)at, at += logits;
    d->sight = (uint8_t *)at, at += sight, d->next = (uint8_t *)at, at += sight;
    d->numbers = (int64_t *)at, at += numbers;
    d->keys = (uint32_t *)at, d->reach = (float *)(at + 8 * wide);
    return all;
}

/* Levels of candidates after the stream `last` [hidden], which is made here if anything is fed. Returns 0, -1 without memory, or -2 if a
 * logit is no number. */
long draft(const head *h, growth *g, void *last, int threads)
{
    desk d;
    char *all = furnish(h, g, &d);
    long entries = 0, failed = 0;
    if (!all) return -1;
    if (g->fed && feed(h, g, &d, last, threads)) failed = -1;
    memcpy(d.x, last, size(h->halves) * h->hidden);
    memset(d.sight, 1, g->held);
    *g->slots = 1, *d.reach = 0, *g->spots = 0;
    for (long level = 0; !failed; level++) {
        g->levels = level + 1;
        if (look(h, g, &d, level, g->slots[level], threads)) failed = -2;
        if (failed) break;
        if (g->chances) judge(g, level, g->slots[level], d.reach);
        if (level + 1 == g->depth) break;
        long wide = g->chances ? extended(g, level, d.reach) : !ends(g, g->tokens[level * g->widest * g->k]);
        if (!wide) break;
        if (!g->chances) g->spots[level + 1] = 0;
        g->slots[level + 1] = wide;
        if (step(h, g, &d, level, wide, entries, threads)) failed = -1;
        entries += wide;
    }
    if (g->chances && !failed) keep(g);
    free(all);
    return failed;
}
