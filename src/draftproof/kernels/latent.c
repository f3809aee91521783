/* Attention whose keys and values are made of a latent (multi-head latent attention, DeepSeek-V2, arXiv 2405.04434). Compiled and called
 * by ../native.py; models/latent.py has the twin.
 *
 * A layer's first product makes, of each row, its queries, or the latent that these are made of; the latent of its keys and values; and
 * the part of its key that is turned, if any is, which all heads share. What is kept is what attention reads: whole keys and values.
 */
#include "lanes.h"

/* Memory that such a layer needs, in numbers of a row, and for its products in bytes: the greater of that and what is there. */
void latent_needs(const run *p, const layer *l, long *read, long *written, long *inner, long *room)
{
    const product *queries = &l->latent->queries, *rest = &l->latent->keys_values;
    long line = 64 / size(p->halves);
    *read = most(*read, queries->in + rest->in + line);
    *written = most(*written, queries->out + rest->out + line);
    *inner = most(*inner, l->heads * l->dim + l->latent->shared + l->openings + 2 * line);
    *room = most(*room, most(room_for(queries, p->rows, p->halves, p->threads), room_for(rest, p->rows, p->halves, p->threads)));
}

/* A row's whole key, at a place of the storage: of each head what all share, and its own. */
static void join_key(const layer *l, const char *shared, const char *own, char *key, int halves)
{
    long common = size(halves) * l->latent->shared, rest = size(halves) * l->dim - common;
    char head[2 * SPAN]; /* of one that is rounded */
    for (long h = 0; h < l->kv_heads; h++, own += rest, key += kept_bytes(l->dim, halves, l->rounded)) {
        char *to = l->rounded ? head : key;
        memcpy(to, shared, common);
        memcpy(to + common, own, rest);
        if (l->rounded) keep_heads(head, 1, l->dim, halves, 1, key);
    }
}

/* `look_back` of such a layer: of what the first product left in `written` queries go to `inner`, keys and values to the storage, and what
 * rows see to `read`. */
void look_back_through(const member *me, const run *p, const layer *l)
{
    const product *queries = &l->latent->queries, *rest = &l->latent->keys_values;
    long each = size(p->halves), asked = each * l->heads * l->dim, common = each * l->latent->shared, at = 0;
    long openings = each * l->openings, first = each * (l->qkv.out - rest->in) - common - openings;
    long deep = l->latent->value_dim, value = each * l->kv_heads * deep;
    long angle = size(p->halves && !p->sharp), rope = rope_of(p, l), made = each * rest->out;
    char *latents = p->read + UP(p->rows * each * queries->in, 64), *shared = p->inner + UP(p->rows * asked, 64);
    char *opened = shared + UP(p->rows * common, 64);
    char *heads = queries->out ? p->written + UP(p->rows * made, 64) : 0;
#define TURNED_BY(r, FROM, TO, HEADS, DIM)                                                                               \
    turn_row(FROM, p->cos + angle * (r) * p->angles + rope, p->sin + angle * (r) * p->angles + rope, TO, HEADS, DIM, l->turned, p->sharp, \
             p->halves)

    MINE(r, p->rows) {
        const char *from = p->written + r * each * l->qkv.out, *latent = from + first;
        if (heads) norm_of_row(from, &l->latent->of_queries, p->read + r * first, 1, queries->in, p->halves);
        else TURNED_BY(r, from, p->inner + r * asked, l->heads, l->dim);
        norm_of_row(latent, &l->latent->of_latent, latents + r * each * rest->in, 1, rest->in, p->halves);
        TURNED_BY(r, latent + each * rest->in, shared + r * common, 1, l->latent->shared);
        memcpy(opened + r * openings, latent + each * rest->in + common, openings);
    }
    join(me);
    multiplied(me, rest, latents, p->room, p->written, p->rows, p->halves, 0);
    if (heads) {
        multiplied(me, queries, p->read, p->room, heads, p->rows, p->halves, 0);
        MINE(r, p->rows) TURNED_BY(r, heads + r * asked, p->inner + r * asked, l->heads, l->dim);
    }
    if (l->stretched) MINE(r, p->rows) enlarge(p->inner + r * asked, stretch_of(p, r), p->inner + r * asked, l->heads * l->dim, p->halves);
    for (const course *c = p->first; c < p->first + p->courses; at += c->rows, c++) {
        const attention question = {p->inner + at * asked, l->keys, l->values, l->sinks, p->read + at * each * l->heads * deep,
                                    l->heads * l->dim, l->kv_heads, l->heads / l->kv_heads, l->dim, deep, l->window, l->scaling, l->cap,
                                    p->halves, 0, l->rounded};
        MINE(i, c->writes) {
            long to = c->write_to[i] * l->kv_heads;
            const char *own = p->written + (at + c->write_from[i]) * made;
            join_key(l, shared + (at + c->write_from[i]) * common, own, (char *)l->keys + to * kept_bytes(l->dim, p->halves, l->rounded),
                     p->halves);
            keep_heads(own + made - value, l->kv_heads, deep, p->halves, l->rounded,
                       (char *)l->values + to * kept_bytes(deep, p->halves, l->rounded));
        }
        join(me);
        attended(me, c, &question, p->failed);
    }
    if (openings) {
        MINE(r, p->rows) open_parts(opened + r * openings, p->read + each * r * l->heads * deep, l->openings, l->heads * deep / l->openings,
                                    l->opened_by, p->halves);
        join(me);
    }
}
