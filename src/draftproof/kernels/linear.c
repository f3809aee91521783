/* y = x Wᵀ + b for few rows x, at the speed of memory: how rows meet panels, and the panels of a bfloat16 matrix. Those of whole numbers
 * are integers.c's. Compiled and called by ../native.py.
 *
 * W [out, in] lies in panels of WIDE outputs. A panel holds, for each pair of columns, WIDE words of 32 bits: the even column's
 * bfloat16 in the lower half, the odd column's in the upper half. A shift or a mask makes a float32 of each; where x is bfloat16 and the
 * processor multiplies pairs well, it takes them as they are (and numbers below 2^-126 as zeros).
 *
 * Every output is one chain of additions over the columns in order, in float32, whatever the number of rows: a row's bits do not depend
 * on its neighbours. Rows share one reading of a panel, as many as the accumulators leave registers for.
 */
#include <stdlib.h>

#include "lanes.h"

#define AHEAD(PANELS) ((PANELS) == 1 ? 1024 : 256) /* words that singles fetch ahead, measured: 4 KB of one stream, 1 KB of each of two */

#define MANY 7
#define LARGE (1 << 20) /* weights whose last quarter of panels goes to whichever thread is there: less than that ends before they differ */
#define SECOND_CACHE (1 << 20) /* bytes of it that rows may have, measured where it has 2 MB */
#define FEWEST 128 /* rows in tiles, if there are so many, that a reading of all panels is for */
#define FEWEST_OPENED 48 /* rows that a panel is opened for anew, if they fill that cache */
#define OPENED_FOR_TILES 2048 /* here the second, beside the rows: fewer leave their sums to memory more often */

#if REGISTERS == 32
#define MOST 12
#define EACH(KIND, NAME) UP_TO_12(KIND, NAME, 1)
#define MOST_OF_TWO 6
#define EACH_OF_TWO(KIND, NAME) UP_TO_6(KIND, NAME, 2)
#else
#define MOST 6
#define EACH(KIND, NAME) UP_TO_6(KIND, NAME, 1)
#define MOST_OF_TWO 2 /* three would leave sums on the stack: measured, slower than four of one */
#define EACH_OF_TWO(KIND, NAME) UP_TO_2(KIND, NAME, 2)
#endif

/* part [ROWS, WIDE * PANELS] += x [ROWS, 2 * pairs] times PANELS adjoining panels. */
#define SINGLES(NAME, ROWS, PANELS)                                                                                      \
    KERNEL(NAME##_##ROWS##_##PANELS)                                                                                     \
    {                                                                                                                    \
        panel += first * WIDE;                                                                                           \
        const float *x = rows;                                                                                           \
        floats sum[ROWS][2 * PANELS];                                                                                    \
        words w[2 * PANELS];                                                                                             \
        TAKE(ROWS, 2 * PANELS)                                                                                           \
        for (long p = 0; p < count; p++) {                                                                               \
            FETCH(PANELS);                                                                                               \
            UNROLL for (int v = 0; v < 2 * PANELS; v++) w[v] = WORDS(v) << 16;                                           \
            UNROLL for (int r = 0; r < ROWS; r++)                                                                        \
                UNROLL for (int v = 0; v < 2 * PANELS; v++) sum[r][v] += (floats)w[v] * x[r * stride + 2 * p];           \
            UNROLL for (int v = 0; v < 2 * PANELS; v++) w[v] = WORDS(v) & 0xffff0000u;                                   \
            UNROLL for (int r = 0; r < ROWS; r++)                                                                        \
                UNROLL for (int v = 0; v < 2 * PANELS; v++) sum[r][v] += (floats)w[v] * x[r * stride + 2 * p + 1];       \
        }                                                                                                                \
        GIVE(ROWS, 2 * PANELS)                                                                                           \
    }
/* The same with x in pairs of bfloat16. Nothing is fetched ahead: processors that come here do it better by themselves. */
#define PAIRS(NAME, ROWS, PANELS)                                                                                        \
    KERNEL(NAME##_##ROWS##_##PANELS)                                                                                     \
    {                                                                                                                    \
        panel += first * WIDE;                                                                                           \
        const pair *x = rows;                                                                                            \
        floats sum[ROWS][2 * PANELS];                                                                                    \
        words w[2 * PANELS];                                                                                             \
        TAKE(ROWS, 2 * PANELS)                                                                                           \
        for (long p = 0; p < count; p++) {                                                                               \
            UNROLL for (int v = 0; v < 2 * PANELS; v++) w[v] = WORDS(v);                                                 \
            UNROLL for (int r = 0; r < ROWS; r++)                                                                        \
                UNROLL for (int v = 0; v < 2 * PANELS; v++) sum[r][v] = plus_pairs(sum[r][v], w[v], x[r * stride + p]);  \
        }                                                                                                                \
        GIVE(ROWS, 2 * PANELS)                                                                                           \
    }
#define FETCH(PANELS) for (int q = 0; q < PANELS; q++) fetch(panel + q * apart + p * WIDE + AHEAD(PANELS))
#define WORDS(V) *(const words *)(panel + (V) / 2 * apart + p * WIDE + (V) % 2 * LANES)

LIST(singles, SINGLES, EACH)
LIST(singles_of_two, SINGLES, EACH_OF_TWO)
#if TAKES_PAIRS
LIST(pairs, PAIRS, EACH)

static void as_pairs(const void *x, long first, long in, int halves, void *to) { (void)halves, fill(x, first, in, to, in + in % 2); }
#endif

static void as_singles(const void *x, long first, long in, int halves, void *to) { widen(x, first, in, halves, to, in + in % 2); }

/* Whether a row's numbers become whole ones, too, whatever they were. */
static int is_whole(int bits) { return bits == 8 || bits == 4; }

static form form_of(int bits, long in, int halves)
{
    long length = (in + 1) / 2;
    if (bits < 0) return bits == EIGHT_FLOATS ? form_of_narrow(bits, in, halves) : form_of_whole(bits, in);
    if ((halves || is_whole(bits)) && takes_tiles()) return form_of_tiles(bits, in);
    if (bits == 12) return form_of_narrow(bits, in, halves);
    if (is_whole(bits)) return form_of_whole(bits, in);
#if TAKES_PAIRS
    if (halves) /* one stream: measured */
        return (form){.most = MOST, .length = length, .columns = 2, .words = length * WIDE, .apart = 1, .stride = length,
                      .as_is = in % 2 == 0, .block = BLOCK, .prepare = as_pairs, .one = pairs};
#endif
    int as_is = !halves && in % 2 == 0;
    return (form){.most = MOST, .most_of_two = MOST_OF_TWO, .length = length, .columns = 2, .words = length * WIDE, .apart = 2,
                  .stride = 2 * length + (as_is ? 0 : GAP), .as_is = as_is, .prepare = as_singles, .one = singles, .two = singles_of_two};
}

long wide(void) { return WIDE; }

/* Of an output, the column c and the next. */
static uint32_t word_of(const uint16_t *weight, long out, long in, long o, long c)
{
    return entry_of(weight, out, in, o, c) | (uint32_t)entry_of(weight, out, in, o, c + 1) << 16;
}

/* weight [out, in] → panels [ceil(out / WIDE), ceil(in / 2), WIDE]; what is beyond the matrix is zero. */
void arrange(const uint16_t *weight, uint32_t *panels, long out, long in, int threads)
{
    long count = (out + WIDE - 1) / WIDE, length = (in + 1) / 2;
#pragma omp parallel for num_threads(threads)
    for (long a = 0; a < count; a++)
        for (long p = 0; p < length; p++)
            for (long i = 0; i < WIDE; i++) panels[(a * length + p) * WIDE + i] = word_of(weight, out, in, a * WIDE + i, 2 * p);
}

static long blocks_of(const form *f, long block) { return f->length ? (f->length + block - 1) / block : 0; }

/* Words of a row's block. */
static long stride_of(const form *f, long block) { return block < f->length && f->apart ? block * f->apart + GAP : f->stride; }

/* Words of each row that `prepare` makes, where the kernels do not take rows as they are. */
static long prepared(const form *f, long block)
{
    return block == f->length && f->as_is ? 0 : blocks_of(f, block) * stride_of(f, block);
}

/* Whether many rows are multiplied in tiles. */
static int is_tiled(const product *p, long rows, int halves) { return halves && takes_tiles() && stand_in_tiles(p, rows); }

/* Whether rows stand in whole numbers as tiles read them. */
static int in_bytes(const product *p) { return is_whole(p->bits) && takes_tiles() && p->in; }

/* Whether a block of all rows meets a panel before the next one does: tiles would else wait for the second cache. */
static int is_cut(const product *p, long rows) { return in_bytes(p) && rows > MOST_SHARING; }

/* Whether panels are opened once for all rows. */
static int is_opened(const form *f, long rows) { return f->opened && f->length && rows > f->direct; }

/* Steps of a block of rows, which lie as [blocks, rows, block]; of few rows all. */
static long block_of(const form *f, long rows)
{
    if (is_opened(f, rows)) return least(f->at_once, f->length);
    return f->block && (rows >= MANY || !f->apart) ? least(f->block, f->length) : f->length;
}

/* Whether all rows meet a panel before they meet the next, of which there is a part for each thread to open, or to sum up. */
static int is_shared(const product *p, const form *f, long rows, int halves)
{
    return is_opened(f, rows) || is_tiled(p, rows, halves) || is_cut(p, rows);
}

/* Words that a thread needs for itself: to open a panel, tiles in linear.c's words, and, of all, to sum up. */
static long room_to_open(const product *p, const form *f, long rows, int halves)
{
    return is_opened(f, rows) ? f->at_once * f->lines * WIDE : is_tiled(p, rows, halves) ? OPENED_FOR_TILES / 2 * WIDE : 0;
}

static long own_room(const product *p, const form *f, long rows, int halves)
{
    return room_to_open(p, f, rows, halves) + UP(rows, MOST_SHARING) * WIDE;
}

/* Words of all rows as they are multiplied. */
static long arranged(const product *p, const form *f, long rows, int halves)
{
    return UP(is_tiled(p, rows, halves) ? words_in_tiles(rows, p->in) : rows * prepared(f, block_of(f, rows)), 16);
}

/* How many rows are multiplied by all panels before others are: where panels read them all, in tiles or opened, it is so quickly that it
 * has to be from the second cache. */
static long together(const product *p, const form *f, long rows, int halves)
{
    int opened = is_opened(f, rows);
    long fewest = opened ? FEWEST_OPENED : FEWEST;
    if (rows <= fewest || !(opened || is_tiled(p, rows, halves) || in_bytes(p))) return rows;
    int wide = opened && (p->bits == 12 || p->bits == EIGHT_FLOATS);
    long fit = SECOND_CACHE / ((wide ? 4 : 2) * p->in), parts = (rows - 1) / most(fit, fewest) + 1;
    return UP((rows - 1) / parts + 1, opened ? 1 : MOST_SHARING);
}

/* Bytes of memory that `multiplied` needs. */
long room_for(const product *p, long rows, int halves, int threads)
{
    form f = form_of(p->bits, p->in, halves);
    rows = together(p, &f, rows, halves);
    long own = is_shared(p, &f, rows, halves) ? own_room(p, &f, rows, halves) : 0;
    return UP(4 * (arranged(p, &f, rows, halves) + threads * own), 64);
}

/* The steps and the bias of products without: in a branch the product and the sum below would be one instruction in some copies of the
 * loop and two, which round twice, in others. */
static const float ones[2 * WIDE] = {[0 ... 2 * WIDE - 1] = 1}, zeros[2 * WIDE];

/* y [rows, from, from + count) = part [rows, width], a panel's sums; or, adding, += what that would be. */
static void hand_out(const product *p, const float *part, long rows, long width, void *y, long row, long from, int halves, int adding)
{
    long count = least(p->out - from, width);
    const float *steps = p->steps ? p->steps + from : ones, *bias = p->bias ? p->bias + from : zeros;
    for (long i = 0; i < rows; i++, part += width) {
        long at = (row + i) * p->out + from, c = 0;
        for (; c + LANES <= count; c += LANES) {
            floats value = *(const floats *)(part + c) * *(const floats *)(steps + c) + *(const floats *)(bias + c);
            if (adding) value = load_lanes(y, at + c, halves) + kept_lanes(value, halves);
            store_lanes(y, at + c, value, halves);
        }
        for (; c < count; c++) {
            float value = part[c] * steps[c] + bias[c];
            store(y, at + c, adding ? load(y, at + c, halves) + kept(value, halves) : value, halves);
        }
    }
}

/* The spare blocks of a panel from `first` on; none if no panel has any. */
static spares beside(const product *p, long panel, long first)
{
    if (!p->spare_at) return (spares){0, 0};
    spares found = {p->spare_at + p->spare_start[panel] + panel, p->spare + p->spare_start[panel] * 2 * WIDE};
    for (; *found.at < first; found.at++) found.words += 2 * WIDE;
    return found;
}

/* Rows of x as the kernels take them: [blocks, rows, block], `stride` words from one to the next; whole rows are one block. */
typedef struct {
    const uint32_t *from;
    long rows, block, blocks, stride;
} sheaf;

/* The b-th block of row r of x, in its place of what will be read. */
static void prepare(const product *p, const form *f, const void *x, const sheaf *to, long r, long b, int halves)
{
    long columns = to->blocks > 1 ? to->block * f->columns : p->in;
    f->prepare(x, r * p->in + b * columns, least(columns, p->in - b * columns), halves,
               (uint32_t *)to->from + (b * to->rows + r) * to->stride);
}

/* part [rows, WIDE] = x times panel a, of which a block at a time is opened once for all rows, in `open`. */
static void multiply_opened(const product *p, const form *f, const sheaf *x, long a, uint32_t *open, float *part)
{
    const uint32_t *panel = p->panels + a * f->words;
    spares left = beside(p, a, 0);
    long step = f->words / f->length;
    memset(part, 0, 4 * x->rows * WIDE);
    for (long b = 0; b < x->blocks; b++) {
        long s = b * x->block, n = least(x->block, f->length - s);
        f->open(panel, s, n, &left, open);
        for (long r = 0, many; r < x->rows; r += many) {
            many = sharing(x->rows - r, MOST_OPENED);
            spares next = {0, panel + (s + n) * step + r * (n * step / x->rows)};
            f->opened[many - 1](open, many * step / (f->lines * x->rows), 0, x->from + (b * x->rows + r) * x->stride, many, x->stride, n,
                                part + r * WIDE, &next);
        }
    }
}

/* part [rows, WIDE] = x times panel a, block by block. */
static void multiply_cut(const product *p, const form *f, const sheaf *x, long a, float *part)
{
    memset(part, 0, 4 * x->rows * WIDE);
    for (long b = 0; b < x->blocks; b++)
        for (long r = 0, many; r < x->rows; r += many) {
            many = sharing(x->rows - r, f->most);
            f->one[many - 1](p->panels + a * f->words, 0, b * x->block, x->from + (b * x->rows + r) * x->stride, many, x->stride,
                             least(x->block, f->length - b * x->block), part + r * WIDE, 0);
        }
}

/* A panel, or two adjoining ones, from the a-th on, times all rows, as many at a time as share a reading. */
static void multiply_panels(const product *p, const form *f, const sheaf *x, long a, long adjoining, void *y, int halves, int adding)
{
    _Alignas(64) float part[MOST_SHARING * WIDE]; /* of so many rows and one panel, or half of them and two */
    for (long r = 0, many; r < x->rows; r += many) {
        many = sharing(x->rows - r, f->most);
        memset(part, 0, 4 * many * adjoining * WIDE);
        for (long b = 0; b < x->blocks; b++) {
            spares left[2];
            for (long q = 0; q < adjoining; q++) left[q] = beside(p, a + q, b * x->block * f->columns / 4);
            (adjoining == 2 ? f->two : f->one)[many - 1](p->panels + a * f->words, f->words, b * x->block,
                                                         x->from + (b * x->rows + r) * x->stride, many, x->stride,
                                                         least(x->block, f->length - b * x->block), part, p->spare_at ? left : 0);
        }
        hand_out(p, part, many, adjoining * WIDE, y, r, a * WIDE, halves, adding);
    }
}

/* How many of so many pieces of a product are one's own share of work; the others go to whoever has time. */
static long shared_out(long weights, long pieces) { return pieces - (weights > LARGE ? pieces / 4 : 0); }

/* A team's part of y, of panels that all rows meet at once. own: a thread's memory. */
static void multiply_all(const member *me, const product *p, const form *f, const sheaf *x, uint32_t *own, void *y, int halves, int adding)
{
    long count = (p->out + WIDE - 1) / WIDE, rows = x->rows;
    float *part = (float *)(own + room_to_open(p, f, rows, halves));
    MOSTLY_MINE(a, count, shared_out(p->in * p->out, count)) {
        if (is_opened(f, rows)) multiply_opened(p, f, x, a, own, part);
        else if (is_tiled(p, rows, halves))
            multiply_in_tiles(p, f, p->panels + a * f->words, beside(p, a, 0), x->from, rows, OPENED_FOR_TILES, own, part);
        else multiply_cut(p, f, x, a, part);
        hand_out(p, part, rows, WIDE, y, 0, a * WIDE, halves, adding);
    }
}

/* `multiplied` of rows that lie in the second cache together. */
static void multiply_rows(const member *me, const product *p, const form *f, const void *x, void *room, void *y, long rows, int halves,
                          int adding)
{
    long count = (p->out + WIDE - 1) / WIDE, step = rows <= f->most_of_two ? 2 : 1, block = block_of(f, rows);
    long blocks = blocks_of(f, block), stride = stride_of(f, block);
    long words = arranged(p, f, rows, halves);
    const sheaf whole = {words ? room : x, rows, block, blocks, stride};
    if (is_tiled(p, rows, halves)) arrange_in_tiles(me, x, rows, p->in, room);
    else if (in_bytes(p)) arrange_whole(me, f, p->bits, x, rows, p->in, halves, room);
    else if (words) {
        MINE(i, rows * blocks) prepare(p, f, x, &whole, i / blocks, i % blocks, halves);
    }
    if (words) join(me);
    if (is_shared(p, f, rows, halves)) {
        multiply_all(me, p, f, &whole, (uint32_t *)room + words + me->index * own_room(p, f, rows, halves), y, halves, adding);
    } else {
        long pieces = (count + step - 1) / step, own = shared_out(p->in * p->out, pieces);
        MOSTLY_MINE(i, pieces, own) multiply_panels(p, f, &whole, i * step, least(step, count - i * step), y, halves, adding);
    }
    leave_tiles();
    join(me);
}

/* A team's y [rows, out] = x [rows, in] Wᵀ + b, or, adding, += it; both float32 or, with halves, both bfloat16. room: memory. All join at
 * the end. */
void multiplied(const member *me, const product *p, const void *x, void *room, void *y, long rows, int halves, int adding)
{
    const form f = form_of(p->bits, p->in, halves);
    long part = together(p, &f, rows, halves), each = size(halves);
    const char *from = x;
    char *to = y;
    for (long at = 0; at < rows; at += part, from += each * part * p->in, to += each * part * p->out)
        multiply_rows(me, p, &f, from, room, to, least(part, rows - at), halves, adding);
}

/* y [rows, out] = x [rows, in] Wᵀ + b. Returns 0, or 1 without memory. */
int multiply(const product *p, const void *x, void *y, long rows, int halves, int threads)
{
    long bytes = room_for(p, rows, halves, threads);
    void *room = bytes ? aligned_alloc(64, bytes) : 0;
    if (bytes && !room) return 1;
    TOGETHER(threads, rows * p->out * p->in > SMALL, multiplied(me, p, x, room, y, rows, halves, 0));
    free(room);
    return 0;
}

/* Of a portion the rows as the kernels take them, and the pieces of work that it is: none where all its rows meet a panel at once. */
typedef struct {
    const product *p;
    form f;
    const char *x;
    char *y;
    sheaf rows;
    long step, pieces;
} task;

/* words: of each row, in room. */
static task task_of(const product *products, const portions *all, long i, const char *x, uint32_t *room, long words, char *y, int halves)
{
    task t = {products + all->of[i]};
    const product *p = t.p;
    long first = all->start[i], rows = all->start[i + 1] - first, each = size(halves);
    t.f = form_of(p->bits, p->in, halves), t.x = x + each * first * p->in, t.y = y + each * first * p->out;
    long block = block_of(&t.f, rows);
    t.rows = (sheaf){prepared(&t.f, block) ? room + first * words : (const uint32_t *)t.x, rows, block, blocks_of(&t.f, block),
                     stride_of(&t.f, block)};
    t.step = rows <= t.f.most_of_two ? 2 : 1;
    t.pieces = is_shared(p, &t.f, rows, halves) ? 0 : ((p->out + WIDE - 1) / WIDE + t.step - 1) / t.step;
    return t;
}

/* Words of a row where products of this kind meet up to so many rows of a portion one by one. */
static long words_of_each(const product *p, long rows, int halves)
{
    const form f = form_of(p->bits, p->in, halves);
    long words = 0;
    for (long n = 1; n <= rows && !is_shared(p, &f, n, halves); n++) words = most(words, prepared(&f, block_of(&f, n)));
    return words;
}

/* Bytes of memory that `multiplied_each` needs for portions of up to `rows` rows, `all` together, whichever of `count` products they
 * meet. */
long room_for_each(const product *products, long count, long rows, long all, int halves, int threads)
{
    long words = 0, bytes = 0;
    for (const product *p = products; p < products + count; p++) {
        if (p > products && p->bits == p[-1].bits) continue;
        words = most(words, words_of_each(p, rows, halves));
        for (long n = 1; n <= rows; n++) bytes = most(bytes, room_for(p, n, halves, threads));
    }
    return most(bytes, UP(4 * all * words, 64));
}

/* A team's y [rows, out]: each portion of x [rows, in], none longer than `rows`, by its own of the products, which are all of one shape.
 * Where few rows meet a product, the products are taken together: a thread does not wait for each of them. room: memory. All join at the
 * end. */
void multiplied_each(const member *me, const product *products, const portions *all, const void *x, long rows, void *room, void *y,
                     int halves)
{
    long words = 0, pieces = 0, at = 0, before = 0;
    for (long i = 0, bits = 0; i < all->count; bits = products[all->of[i++]].bits)
        if (products[all->of[i]].bits != bits) words = most(words, words_of_each(products + all->of[i], rows, halves));
    for (long i = 0; i < all->count; i++) {
        task t = task_of(products, all, i, x, room, words, y, halves);
        pieces += t.pieces;
        if (!t.pieces) multiplied(me, t.p, t.x, room, t.y, t.rows.rows, halves, 0);
    }
    for (long i = 0; i < all->count; i++) {
        task t = task_of(products, all, i, x, room, words, y, halves);
        if (!t.pieces || (const void *)t.rows.from == t.x) continue;
        if (in_bytes(t.p)) arrange_whole(me, &t.f, t.p->bits, t.x, t.rows.rows, t.p->in, halves, (uint32_t *)t.rows.from);
        else
            for (long r = (me->index + all->start[i]) % me->of; r < t.rows.rows; r += me->of)
                for (long b = 0; b < t.rows.blocks; b++) prepare(t.p, &t.f, t.x, &t.rows, r, b, halves);
    }
    join(me);
    if (!pieces) return;
    long own = shared_out(pieces * WIDE * products->in, pieces);
    task t = task_of(products, all, 0, x, room, words, y, halves);
    MOSTLY_MINE(n, pieces, own) {
        for (; n >= before + t.pieces; t = task_of(products, all, ++at, x, room, words, y, halves)) before += t.pieces;
        long a = (n - before) * t.step, left = (t.p->out + WIDE - 1) / WIDE - a;
        multiply_panels(t.p, &t.f, &t.rows, a, least(t.step, left), t.y, halves, 0);
    }
    leave_tiles();
    join(me);
}

/* y [rows, out]: `multiplied_each` by threads. Returns 0, or 1 without memory. */
int multiply_each(const product *products, const portions *all, const void *x, void *y, int halves, int threads)
{
    long rows = 0, total = all->start[all->count];
    for (long i = 0; i < all->count; i++) rows = most(rows, all->start[i + 1] - all->start[i]);
    long bytes = 0;
    for (long i = 0; i < all->count; i++) bytes = most(bytes, room_for_each(products + all->of[i], 1, rows, total, halves, threads));
    void *room = bytes ? aligned_alloc(64, bytes) : 0;
    if (bytes && !room) return 1;
    TOGETHER(threads, total * products->out * products->in > SMALL, multiplied_each(me, products, all, x, rows, room, y, halves));
    free(room);
    return 0;
}

/* The words of spare blocks, spare [n, 2, WIDE]: of panels and steps `at` [n, 2] of four columns. */
void arrange_spare(const uint16_t *weight, const int64_t *at, uint32_t *spare, long n, long out, long in)
{
    for (long i = 0; i < n * 2 * WIDE; i++) {
        const int64_t *where = at + i / (2 * WIDE) * 2;
        spare[i] = word_of(weight, out, in, where[0] * WIDE + i % WIDE, where[1] * 4 + i / WIDE % 2 * 2);
    }
}
