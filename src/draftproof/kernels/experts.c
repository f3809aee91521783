/* A mixture of experts: rows go to the few experts that a router chose for each of them, and what comes back is added by weight. Compiled
 * and called by ../native.py; models/experts.py has the twin.
 *
 * A row is added in the order of its own choices, and its products do not feel what other rows chose: its bits are its own.
 */
#include <math.h>
#include <stdlib.h>

#include "lanes.h"

/* Bytes of memory for so many rows; memory: it, or null. */
long journey_for(journey *j, const mixture *m, long rows, int halves, int threads, char *memory)
{
    const product *up = m->gate_up, *down = m->down;
    long all = rows * m->chosen, each = size(halves), counts = 8 * (m->count + 1), bytes = 0;
    long room = most(room_for_each(up, m->count, rows, all, halves, threads), room_for_each(down, m->count, rows, all, halves, threads));
    long sizes[] = {8 * all, 8 * all, counts, counts, 4 * all, each * all * up->in, each * all * up->out, each * all * down->in, room};
    void **parts[] = {(void **)&j->chosen, (void **)&j->place, (void **)&j->of, (void **)&j->start, (void **)&j->weights,
                      (void **)&j->read, (void **)&j->written, (void **)&j->inner, &j->room};
    for (int i = 0; i < 9; bytes += UP(sizes[i++], 64))
        if (memory) *parts[i] = memory + bytes;
    return bytes;
}

/* Sort the rows' choices by expert. */
static void depart(const mixture *m, journey *j, long all)
{
    int64_t *before = j->of;
    memset(before, 0, 8 * (m->count + 1));
    for (long i = 0; i < all; i++)
        if (j->chosen[i] >= 0 && j->chosen[i] < m->count) before[j->chosen[i] + 1]++;
    for (long e = 0; e < m->count; e++) before[e + 1] += before[e];
    for (long i = 0; i < all; i++) j->place[i] = j->chosen[i] >= 0 && j->chosen[i] < m->count ? before[j->chosen[i]]++ : -1;
    j->count = 0; /* each expert's end stands now where its beginning stood */
    for (long e = 0, start = 0; e < m->count; e++) {
        long end = before[e];
        if (end == start) continue;
        j->of[j->count] = e, j->start[j->count++] = start;
        start = end;
        j->start[j->count] = end;
    }
}

/* A row's sum over its choices, in their order. */
static void come_back(const mixture *m, const journey *j, long r, void *y, int halves, int adding)
{
    long hidden = m->down->out, to = r * hidden, c = 0;
    const int64_t *place = j->place + r * m->chosen;
    const float *weight = j->weights + r * m->chosen;
    for (; c + LANES <= hidden; c += LANES) {
        floats sum = {0};
        for (long i = 0; i < m->chosen; i++)
            if (place[i] >= 0) sum += load_lanes(j->read, place[i] * hidden + c, halves) * weight[i];
        store_lanes(y, to + c, adding ? load_lanes(y, to + c, halves) + kept_lanes(sum, halves) : sum, halves);
    }
    for (; c < hidden; c++) {
        float sum = 0;
        for (long i = 0; i < m->chosen; i++)
            if (place[i] >= 0) sum += load(j->read, place[i] * hidden + c, halves) * weight[i];
        store(y, to + c, adding ? load(y, to + c, halves) + kept(sum, halves) : sum, halves);
    }
}

/* `placed`, if it is among the k best so far. */
static inline long ranked(float score, long number, long k, long count, float *scores, int64_t *numbers)
{
    return count < k || score > scores[count - 1] ? placed(score, number, k, count, scores, numbers) : count;
}

/* law [count]: what experts weigh by their logits, which it holds; behind it there is room for a vector. */
static void weigh(float *law, long count, int by_sigmoid)
{
    float top = -INFINITY, all = 0;
    if (by_sigmoid) {
        for (long e = 0; e < count; e += LANES) *(floats *)(law + e) = sigmoid(*(const floats *)(law + e));
        return;
    }
    for (long e = 0; e < count; e++) top = law[e] > top ? law[e] : top;
    for (long e = 0; e < count; e += LANES) *(floats *)(law + e) = exponential(*(const floats *)(law + e) - top);
    for (long e = 0; e < count; e++) all += law[e];
    for (long e = 0; e < count; e++) law[e] /= all;
}

/* Leave the experts [count] of groups that a row does not choose no worth. */
static void keep_groups(const mixture *m, float *worth, long count)
{
    long each = count / m->groups, found = 0;
    float best[m->within], leading[m->leading];
    int64_t group[m->within], at[m->leading];
    for (long g = 0; g < m->groups; g++) {
        long many = 0;
        float sum = 0;
        for (long e = 0; e < each; e++) many = ranked(worth[g * each + e], e, m->leading, many, leading, at);
        for (long i = 0; i < many; i++) sum += leading[i];
        found = ranked(sum, g, m->within, found, best, group);
    }
    for (long g = 0; g < m->groups; g++) {
        int open = 0;
        for (long i = 0; i < found; i++) open |= group[i] == g;
        for (long e = 0; !open && e < each; e++) worth[g * each + e] = -INFINITY;
    }
}

/* Choose `own` of the experts [count], one after the other, each the best of those that are left; its weight is its softmax among those of
 * them whose logits are not further below its own than m->near times the larger of what both are in size. Rounded as torch does it. */
static void pick(const mixture *m, const float *logits, long count, long own, int64_t *chosen, float *weight, int halves)
{
    char taken[count];
    memset(taken, 0, count);
    for (long i = 0; i < own; i++) {
        float top = -INFINITY, all = 0, far = kept(m->near, halves);
        for (long e = 0; e < count; e++)
            if (!taken[e] && (logits[e] > top || top == -INFINITY)) top = logits[e], chosen[i] = e;
        for (long e = 0; e < count; e++) {
            float large = fabsf(logits[e]), below = kept(top - logits[e], halves);
            if (!taken[e] && !(kept(below / (large > top ? large : top), halves) > far)) all += expf(logits[e] - top);
        }
        weight[i] = 1 / all;
        taken[chosen[i]] = 1;
    }
}

/* Of rows' logits the experts, the worthiest first and of equals the one that comes first, those that all share behind them, and their
 * weights, by a team. halves: of logits; stream: of what the experts read. */
void routed(const member *me, const mixture *m, const void *logits, journey *j, long rows, int halves, int stream)
{
    long count = m->count - m->shared, own = m->chosen - m->shared;
    float law[count + LANES], worth[count + 1], best[own + 1];
    MINE(r, rows) {
        float *weight = j->weights + r * m->chosen, sum = 0;
        int64_t *chosen = j->chosen + r * m->chosen;
        long found = 0, at = r * m->router.out;
        widen(logits, at, count, halves, law, count);
        if (m->near) pick(m, law, count, own, chosen, weight, halves);
        memcpy(worth, law, 4 * count);
        weigh(law, count, m->by_sigmoid);
        for (long e = 0; e < count; e++) worth[e] = (m->by_logits ? worth[e] : law[e]) + (m->bias ? m->bias[e] : 0);
        if (m->within < m->groups) keep_groups(m, worth, count);
        for (long e = 0; !m->near && e < count; e++) found = ranked(worth[e], e, own, found, best, chosen);
        for (long i = 0; i < own; i++) weight[i] = m->near ? weight[i] : law[chosen[i]], sum += weight[i];
        for (long i = 0; i < own; i++) {
            float part = (m->normed ? weight[i] / (sum + m->beside) : weight[i]) * m->factor;
            weight[i] = kept(m->scales ? part * m->scales[chosen[i]] : part, stream && m->kept);
        }
        floats gate = {m->gated ? load(logits, at + count, halves) : 0};
        for (long i = own; i < m->chosen; i++)
            chosen[i] = count + i - own, weight[i] = m->gated ? kept(sigmoid(gate)[0], stream && m->kept) : m->always;
    }
    join(me);
}

/* A team's y [rows, hidden]: what the chosen experts make of x [rows, hidden], by weight; or, adding, += it. */
void through_experts(const member *me, const mixture *m, const void *x, journey *j, void *y, long rows, int halves, int adding)
{
    long all = rows * m->chosen, bytes = size(halves) * m->gate_up->in;
    if (me->index == 0) depart(m, j, all);
    join(me);
    const portions which = {j->of, j->start, j->count};
    long there = j->count ? j->start[j->count] : 0;
    MINE(i, all) {
        const char *row = (const char *)x + i / m->chosen * bytes;
        char *to = j->read + j->place[i] * bytes;
        if (j->place[i] < 0) continue;
        if (!m->before) memcpy(to, row, bytes);
        else enlarge(row, j->weights[i], to, m->gate_up->in, halves), j->weights[i] = 1;
    }
    join(me);
    multiplied_each(me, m->gate_up, &which, j->read, rows, j->room, j->written, halves);
    if (m->limit > 0) limited(me, j->written, j->inner, there, m->down->in, m->alpha, m->limit, halves);
    else gated(me, j->written, j->inner, there, m->down->in, m->gate_up->out == m->down->in, m->act, halves);
    join(me);
    multiplied_each(me, m->down, &which, j->inner, rows, j->room, j->read, halves);
    MINE(r, rows) come_back(m, j, r, y, halves, adding);
    join(me);
}

/* `through_experts` of rows whose experts and weights [rows, chosen] others chose. Returns 0, or 1 without memory. */
int mix(const mixture *m, const void *x, const int64_t *chosen, const float *weights, void *y, long rows, int halves, int threads)
{
    journey j = {0};
    long bytes = journey_for(&j, m, rows, halves, threads, 0);
    char *memory = aligned_alloc(64, bytes);
    if (!memory) return 1;
    journey_for(&j, m, rows, halves, threads, memory);
    memcpy(j.chosen, chosen, 8 * rows * m->chosen);
    memcpy(j.weights, weights, 4 * rows * m->chosen);
    TOGETHER(threads, rows * m->chosen * m->down->out * m->down->in > SMALL, through_experts(me, m, x, &j, y, rows, halves, 0));
    free(memory);
    return 0;
}

/* The experts and weights [rows, chosen] that logits [rows, router.out] choose. */
void route(const mixture *m, const void *logits, int64_t *chosen, float *weights, long rows, int halves, int stream)
{
    journey j = {.chosen = chosen, .weights = weights};
    TOGETHER(1, 0, routed(me, m, logits, &j, rows, halves, stream));
}
