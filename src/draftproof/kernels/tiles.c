/* Products in tiles, for processors with AMX: sixteen rows times thirty-two columns of sixteen outputs in one instruction, whose time does
 * not depend on the rows. Panels are those of linear.c, narrow.c and integers.c; a tile reads linear.c's words and those of eight bits as
 * they lie, others are opened first, thirty-two columns at a time or, of four bits, sixty-four. Thirty-two rows share that; of more than
 * sixty-four that meet twelve bits all do. Attention's scores are taken in tiles, too.
 *
 * An instruction adds thirty-two columns in an order of its own, the same for every row and for any number of rows; numbers below 2^-126
 * count as zeros. What lies behind a row's last column is zero. Whole numbers are added in fours, sixty-four columns in an instruction, and
 * have no order.
 */
#include "lanes.h"

#if TAKES_TILES
#include <sys/syscall.h>
#include <unistd.h>

#define SIDE 16                /* rows of a tile, and words of each */
#define COLUMNS 32             /* of one instruction */
#define ROOM (SIDE * WIDE)     /* words of so many columns of a panel */
#define AHEAD 1024             /* words */
#define FEW (4 * SIDE)         /* rows that open a panel again and again, measured */
#define PERMISSION 0x1023, 18L /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
/* Tiles 0 to 3 are sums: of the first SIDE rows by the first and second outputs of a panel, then of other rows, or of the next panel. */
#define ROWS 4
#define OTHERS 5
#define FIRST 6 /* outputs */
#define SECOND 7

/* GCC's tile instructions do not say which memory they read and write. */
#define SETTLE __asm__ volatile("" ::: "memory")

/* Linux gives a process the registers when it asks for them. */
int takes_tiles(void)
{
    static int answer; /* 1: yes, -1: no */
    if (!answer) answer = syscall(SYS_arch_prctl, PERMISSION) ? -1 : 1;
    return answer > 0;
}

static _Thread_local long shaped; /* for how many rows this thread's tiles are made; 0: they may be anybody's */

static void shape(long rows)
{
    if (shaped == rows) return;
    struct {
        uint8_t palette, start, none[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } tiles = {1};
    long most = least(rows, SIDE), others = rows > SIDE ? rows - SIDE : rows;
    for (int t = 0; t < 8; t++) tiles.bytes[t] = 64, tiles.rows[t] = t >= FIRST ? SIDE : t == ROWS || t < 2 ? most : others;
    SETTLE;
    _tile_loadconfig(&tiles);
    shaped = rows;
}

/* A thread leaves its tiles to others. */
void leave_tiles(void)
{
    if (shaped) _tile_release();
    shaped = 0;
}

/* Tiles of zeros take no register. Where a core's other thread has tiles, too, there is hardly one beside those that a program names, and
 * every load waits for it: what was read is made zeros at once. Products take 0.58 of the time there and the same elsewhere, measured. */
#define LEAVE _tile_zero

/* to [SIDE keys, SIDE queries]: products of keys, `apart` bytes from one to the next, and queries [dim / 2, n], pairs; dim in COLUMNS. */
void score_in_tiles(const char *key, long apart, const uint32_t *query, long n, long dim, float *to)
{
    shape(2 * SIDE);
    SETTLE;
    _tile_zero(0);
    for (long d = 0; d < dim; d += COLUMNS, key += 2 * COLUMNS, query += SIDE * n) {
        _tile_loadd(ROWS, key, apart);
        _tile_loadd(FIRST, query, 4 * n);
        _tile_dpbf16ps(0, ROWS, FIRST);
        LEAVE(ROWS);
        LEAVE(FIRST);
    }
    _tile_stored(0, to, 4 * SIDE);
    SETTLE;
}

/* Sums += COLUMNS of the rows x, or GROUP whole numbers, times as many of one panel or two, sixteen words of each. */
#define MULTIPLY(HOW, panels, words, x, stride, rows)                                                                    \
    do {                                                                                                                 \
        const int others = (panels) == 1 && (rows) > SIDE;                                                               \
        SETTLE;                                                                                                          \
        _tile_loadd(ROWS, x, 4 * (stride));                                                                              \
        _tile_loadd(FIRST, (words)[0], 4 * WIDE);                                                                        \
        HOW(0, ROWS, FIRST);                                                                                             \
        if (!others) LEAVE(FIRST);                                                                                       \
        _tile_loadd(SECOND, (words)[0] + SIDE, 4 * WIDE);                                                                \
        HOW(1, ROWS, SECOND);                                                                                            \
        if (!others) LEAVE(SECOND);                                                                                      \
        if ((panels) == 2) {                                                                                             \
            _tile_loadd(FIRST, (words)[1], 4 * WIDE);                                                                    \
            HOW(2, ROWS, FIRST);                                                                                         \
            LEAVE(FIRST);                                                                                                \
            _tile_loadd(SECOND, (words)[1] + SIDE, 4 * WIDE);                                                            \
            HOW(3, ROWS, SECOND);                                                                                        \
            LEAVE(SECOND);                                                                                               \
        }                                                                                                                \
        LEAVE(ROWS);                                                                                                     \
        if (others) {                                                                                                    \
            _tile_loadd(OTHERS, (x) + SIDE * (stride), 4 * (stride));                                                    \
            HOW(2, OTHERS, FIRST);                                                                                       \
            LEAVE(FIRST);                                                                                                \
            HOW(3, OTHERS, SECOND);                                                                                      \
            LEAVE(SECOND);                                                                                               \
            LEAVE(OTHERS);                                                                                               \
        }                                                                                                                \
    } while (0)
/* All sums from memory [rows, panels * WIDE] or there. */
#define MOVE(HOW, panels, part, rows)                                                                                    \
    do {                                                                                                                 \
        SETTLE;                                                                                                          \
        HOW(0, part, 4 * (panels) * WIDE);                                                                               \
        HOW(1, (part) + SIDE, 4 * (panels) * WIDE);                                                                      \
        if ((panels) == 2 || (rows) > SIDE) {                                                                            \
            HOW(2, (part) + ((panels) == 2 ? WIDE : SIDE * WIDE), 4 * (panels) * WIDE);                                  \
            HOW(3, (part) + ((panels) == 2 ? WIDE : SIDE * WIDE) + SIDE, 4 * (panels) * WIDE);                           \
        }                                                                                                                \
        SETTLE;                                                                                                          \
    } while (0)

/* All sums 0. */
#define EMPTY                                                                                                            \
    do {                                                                                                                 \
        _tile_zero(0);                                                                                                   \
        _tile_zero(1);                                                                                                   \
        _tile_zero(2);                                                                                                   \
        _tile_zero(3);                                                                                                   \
    } while (0)

/* Ask for what lies behind these words: without, passes take 1.2 to 1.3 of the time, measured. */
static inline void ask(const uint32_t *from, long words)
{
    for (long i = 0; i < words; i += 16) __builtin_prefetch(from + AHEAD + i);
}

/* Zeros behind the first `steps` of a room. */
static inline void clear(uint32_t *room, long steps)
{
    if (steps < SIDE) memset(room + steps * WIDE, 0, 4 * (SIDE - steps) * WIDE);
}

/* Steps [s, s + n) of a panel in linear.c's words [SIDE, WIDE], zeros behind them: where they lie, `room` if not in the panel. */
static inline const uint32_t *open_sixteen(const uint32_t *panel, long s, long n, spares *left, uint32_t *room)
{
    (void)left;
    ask(panel + s * WIDE, n * WIDE);
    if (n == SIDE) return panel + s * WIDE;
    memcpy(room, panel + s * WIDE, 4 * n * WIDE);
    clear(room, n);
    return room;
}

static inline const uint32_t *open_twelve(const uint32_t *panel, long s, long n, spares *left, uint32_t *room)
{
    ask(panel + s * (3 * WIDE / 2), n * (3 * WIDE / 2));
    open_narrow(panel, s, n, left, room);
    clear(room, 2 * n);
    return room;
}

/* The kernel of one panel or two, whose steps `open` brings into linear.c's words: `unit` of them are COLUMNS. Two rooms: while one is read
 * the next is opened, because a tile waits until every store that it reads has reached the cache. */
static inline __attribute__((always_inline)) void in_tiles(
    const uint32_t *open(const uint32_t *, long, long, spares *, uint32_t *), long unit, int panels, const uint32_t *panel, long apart,
    long first, const uint32_t *x, long many, long stride, long count, float *part, const spares *beside)
{
    _Alignas(64) uint32_t room[2][2][ROOM];
    const uint32_t *now[2], *next[2];
    spares left[2] = {{0, 0}, {0, 0}};
    if (beside) memcpy(left, beside, panels * sizeof *left);
    shape(many);
    MOVE(_tile_loadd, panels, part, many);
    for (int q = 0; q < panels; q++) next[q] = open(panel + q * apart, first, least(unit, count), left + q, room[0][q]);
    for (long s = unit, i = 1;; s += unit, i ^= 1, x += SIDE) {
        for (int q = 0; q < panels; q++) now[q] = next[q];
        if (s >= count) break;
        for (int q = 0; q < panels; q++)
            next[q] = open(panel + q * apart, first + s, least(unit, count - s), left + q, room[i][q]);
        MULTIPLY(_tile_dpbf16ps, panels, now, x, stride, many);
    }
    MULTIPLY(_tile_dpbf16ps, panels, now, x, stride, many);
    MOVE(_tile_stored, panels, part, many);
}

/* Whether so many rows are multiplied by `multiply_in_tiles`. Those of whole numbers have nothing to open, or are scaled one by one. */
int stand_in_tiles(const product *p, long rows) { return rows > FEW && p->in && (p->bits == 16 || p->bits == 12); }

/* Words of many rows as `arrange_in_tiles` has them. */
long words_in_tiles(long rows, long in) { return UP(rows, 2 * SIDE) * UP(in, COLUMNS) / 2; }

/* x [rows, in] bfloat16 → [groups of 2 * SIDE rows, COLUMNS, rows of the group], by a team: a group's tiles follow one another. */
void arrange_in_tiles(const member *me, const void *x, long rows, long in, uint32_t *to)
{
    long blocks = UP(in, COLUMNS) / COLUMNS;
    MINE(r, rows)
        for (long b = 0; b < blocks; b++) {
            long at = b * COLUMNS;
            fill(x, r * in + at, least(COLUMNS, in - at), to + ((r / (2 * SIDE) * blocks + b) * 2 * SIDE + r % (2 * SIDE)) * SIDE, COLUMNS);
        }
}

/* Block b of COLUMNS of a panel in linear.c's words: where they lie, `room` if not in the panel. */
static const uint32_t *open_block(const product *p, const form *f, const uint32_t *panel, long b, spares *left, uint32_t *room)
{
    long unit = COLUMNS / f->columns, n = least(unit, f->length - b * unit);
    return (p->bits == 16 ? open_sixteen : open_twelve)(panel, b * unit, n, left, room);
}

/* part [rows, WIDE] = x, which stands in tiles, times a panel, of which `most` columns at a time are opened, once for all rows, in `room`:
 * one block ahead of the first rows. The order of the sums is that of `in_tiles`; they lie in memory in between. left: of the panel, from
 * its first step on. */
void multiply_in_tiles(const product *p, const form *f, const uint32_t *panel, spares left, const uint32_t *x, long rows, long most,
                       uint32_t *room, float *part)
{
    const long blocks = UP(p->in, COLUMNS) / COLUMNS, tall = 2 * SIDE;
    const uint32_t *words[most / COLUMNS];
    for (long b = 0, n; b < blocks; b += n, x += n * tall * SIDE) {
        n = least(most / COLUMNS, blocks - b);
        words[0] = open_block(p, f, panel, b, &left, room);
        for (long r = 0; r < rows; r += tall) {
            long many = least(tall, rows - r);
            const uint32_t *here = x + r * blocks * SIDE;
            shape(many);
            if (b) MOVE(_tile_loadd, 1, part + r * WIDE, many);
            else EMPTY;
            for (long i = 0; i < n; i++, here += tall * SIDE) {
                if (!r && i + 1 < n) words[i + 1] = open_block(p, f, panel, b + i + 1, &left, room + (i + 1) * ROOM);
                MULTIPLY(_tile_dpbf16ps, 1, words + i, here, SIDE, many);
            }
            MOVE(_tile_stored, 1, part + r * WIDE, many);
        }
    }
}

/* Rows that meet whole numbers are 256 or, of four bits, 16 times a coarse number and a fine one, each of eight bits with a sign. So many
 * as share a reading lie together, a SPAN at a time: [SPAN / GROUP, rows, 2, SIDE] words, the coarse numbers of a GROUP in a line, then the
 * fine ones; and [rows, SIDE] numbers, two scales of the span or of each group. A tile has both of SIDE / 2 rows; of more rows of four
 * bits than are few, one: measured. */
#define NUMBERS (SPAN / GROUP * 2 * SIDE) /* of a row */
#define STRIDE (NUMBERS + SIDE)
#define FEW_OF_FOUR (SIDE / 2)

/* n whole numbers of a row, as bytes: those of a GROUP `apart` words behind those of the one before. */
static inline void part_in_two(const int32_t *whole, long n, int bits, long apart, uint32_t *to)
{
    const __m128i order = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15); /* that of `open_four` */
    for (long k = 0; k < n; k += LANES) {
        const integers all = *(const integers *)(whole + k), high = (all + (bits == 8 ? 128 : 0)) >> bits;
        __m128i coarse = _mm512_cvtepi32_epi8((__m512i)high), fine = _mm512_cvtepi32_epi8((__m512i)(all - (high << bits)));
        uint32_t *line = to + k / GROUP * apart + k % GROUP / 4;
        if (bits == 4) coarse = _mm_shuffle_epi8(coarse, order), fine = _mm_shuffle_epi8(fine, order);
        _mm_store_si128((__m128i *)line, coarse);
        _mm_store_si128((__m128i *)(line + SIDE), fine);
    }
}

/* n columns of x, of a span, from the `first` on. */
static void fill_span(int bits, const void *x, long first, long n, int halves, long apart, uint32_t *to, float *scales)
{
    int32_t whole[SPAN];
    const long wide = UP(n, GROUP);
    if (bits == 8) {
        scales[1] = in_whole(x, first, n, halves, SIZE_OF_EIGHT, whole, wide, scales);
        part_in_two(whole, wide, 8, apart, to);
        return;
    }
    for (long c = 0; c < n; c += GROUP, scales += 2) {
        scales[1] = in_whole(x, first + c, least(GROUP, n - c), halves, SIZE_OF_FOUR, whole + c, GROUP, scales);
        scales[1] *= scales[0];
    }
    part_in_two(whole, wide, 4, apart, to);
}

/* x [rows, in] → [spans, rows, STRIDE], by a team. */
void arrange_whole(const member *me, const form *f, int bits, const void *x, long rows, long in, int halves, uint32_t *to)
{
    const long spans = UP(in, SPAN) / SPAN;
    for (long r = 0, many; r < rows; r += many) {
        many = sharing(rows - r, f->most);
        MINE(i, many * spans) {
            const long row = i % many, first = i / many * SPAN;
            uint32_t *bundle = to + (i / many * rows + r) * STRIDE;
            fill_span(bits, x, (r + row) * in + first, least(SPAN, in - first), halves, 2 * SIDE * many, bundle + 2 * SIDE * row,
                      (float *)(bundle + NUMBERS * many + SIDE * row));
        }
    }
}

/* The kernel of eight bits, of one panel or two, which a tile reads as they lie. */
static inline __attribute__((always_inline)) void span_in_tiles(
    int panels, const uint32_t *panel, long apart, const uint32_t *x, long many, long count, float *part)
{
    _Alignas(64) uint32_t room[2][ROOM];
    _Alignas(64) int32_t found[2 * SIDE * WIDE];
    const float *step = (const float *)(x + NUMBERS * many);
    shape(2 * many);
    EMPTY;
    for (long s = 0; s < count; s += SIDE, x += 2 * SIDE * many) {
        const uint32_t *now[2];
        for (int q = 0; q < panels; q++) now[q] = open_sixteen(panel + q * apart, s, least(SIDE, count - s), 0, room[q]);
        MULTIPLY(_tile_dpbssd, panels, now, x, SIDE, 2 * many);
    }
    MOVE(_tile_stored, panels, found, 2 * many);
    const integers *sums = (const integers *)found;
    for (long r = 0; r < many; r++, step += SIDE, sums += 2 * panels)
        UNROLL for (int v = 0; v < 2 * panels; v++, sums++, part += LANES)
            *(floats *)part = plus_span(*(floats *)part, (sums[0] << 8) + sums[2 * panels], *step);
}

/* A group's levels, four columns of an output in a word; and, where it is asked for, sixteen times that. */
static inline void open_four(const uint32_t *panel, uint32_t *fine, uint32_t *coarse)
{
    const words low = (words){0} + 0x0f0f0f0f;
    ask(panel, GROUP_WORDS);
    for (long i = 0; i < ROOM; i += 2 * WIDE, panel += WIDE)
        UNROLL for (int v = 0; v < WIDE; v += LANES) {
            const words w = *(const words *)(panel + v);
            *(words *)(fine + i + v) = w & low;
            *(words *)(fine + i + v + WIDE) = w >> 4 & low;
            if (!coarse) continue;
            *(words *)(coarse + i + v) = w << 4 & ~low;
            *(words *)(coarse + i + v + WIDE) = w & ~low;
        }
}

/* part [many, panels * WIDE] += what a group adds. found: its sums, of few rows coarse and fine ones in turns. */
static inline __attribute__((always_inline)) void plus_scaled(
    int panels, const uint32_t *const *group, const int32_t *found, int few, const float *scales, long many, float *part)
{
    levels of[2 * 2];
    UNROLL for (int v = 0; v < 2 * panels; v++) of[v] = levels_of(*(const words *)(group[v / 2] + GROUP / 8 * WIDE + v % 2 * LANES));
    for (long r = 0; r < many; r++, scales += SIDE)
        UNROLL for (int v = 0; v < 2 * panels; v++, part += LANES) {
            const integers *sums = (const integers *)found + (few ? 2 * r : r) * 2 * panels + v;
            *(floats *)part = plus_group(*(const floats *)part, of[v], few ? (sums[0] << 4) + sums[2 * panels] : *sums, scales);
        }
}

/* The kernel of four bits, of one panel or, for few rows, two. */
static inline __attribute__((always_inline)) void groups_in_tiles(
    int few, int panels, const uint32_t *panel, long apart, const uint32_t *x, long many, long count, float *part)
{
    _Alignas(64) uint32_t fine[2][2][ROOM], coarse[2][ROOM];
    _Alignas(64) int32_t found[2 * SIDE * WIDE];
    const float *scales = (const float *)(x + NUMBERS * many);
    shape(few ? 2 * many : many);
    for (int q = 0; q < panels; q++) open_four(panel + q * apart, fine[0][q], few ? 0 : coarse[0]);
    for (long g = 0; g < count; g++, x += 2 * SIDE * many, scales += 2, panel += GROUP_WORDS) {
        const uint32_t *group[] = {panel, panel + apart}, *now[] = {fine[g % 2][0], fine[g % 2][1]}, *sixteen[] = {coarse[g % 2]};
        for (int q = 0; q < panels && g + 1 < count; q++)
            open_four(group[q] + GROUP_WORDS, fine[(g + 1) % 2][q], few ? 0 : coarse[(g + 1) % 2]);
        EMPTY;
        if (few) MULTIPLY(_tile_dpbsud, panels, now, x, SIDE, 2 * many);
        else {
            MULTIPLY(_tile_dpbsud, 1, sixteen, x, 2 * SIDE, many);
            MULTIPLY(_tile_dpbsud, 1, now, x + SIDE, 2 * SIDE, many);
        }
        MOVE(_tile_stored, panels, found, few ? 2 * many : many);
        plus_scaled(panels, group, found, few, scales, many, part);
    }
}

/* One row without tiles: of four bits there is less to open, and of eight a tile's instructions, which take as long for one row as for
 * SIDE, would take longer than the weights. */
static inline __attribute__((always_inline)) void four_alone(
    int panels, const uint32_t *panel, long apart, const uint32_t *x, long count, float *part)
{
    const float *scales = (const float *)(x + NUMBERS);
    const words low = (words){0} + 0x0f0f0f0f;
    for (long g = 0; g < count; g++, scales += 2, panel += WIDE, x += SIDE) {
        __m512i coarse[2 * 2] = {0}, fine[2 * 2] = {0};
        for (long i = 0; i < GROUP / 8; i++, panel += WIDE, x += 2)
            UNROLL for (int v = 0; v < 2 * panels; v++) {
                const uint32_t *at = panel + v / 2 * apart + v % 2 * LANES;
                const words w = *(const words *)at;
                __builtin_prefetch(at + AHEAD);
                coarse[v] = _mm512_dpbusd_epi32(coarse[v], (__m512i)(w & low), _mm512_set1_epi32((int)x[0]));
                fine[v] = _mm512_dpbusd_epi32(fine[v], (__m512i)(w & low), _mm512_set1_epi32((int)x[SIDE]));
                coarse[v] = _mm512_dpbusd_epi32(coarse[v], (__m512i)(w >> 4 & low), _mm512_set1_epi32((int)x[1]));
                fine[v] = _mm512_dpbusd_epi32(fine[v], (__m512i)(w >> 4 & low), _mm512_set1_epi32((int)x[SIDE + 1]));
            }
        UNROLL for (int v = 0; v < 2 * panels; v++) {
            const uint32_t *at = panel + v / 2 * apart + v % 2 * LANES;
            floats *all = (floats *)(part + v * LANES);
            __builtin_prefetch(at + AHEAD);
            *all = plus_group(*all, levels_of(*(const words *)at), ((integers)coarse[v] << 4) + (integers)fine[v], scales);
        }
    }
}

/* The instruction takes no signs of levels: they are read as 128 more. */
static inline __attribute__((always_inline)) void eight_alone(
    int panels, const uint32_t *panel, long apart, const uint32_t *x, long count, float *part)
{
    const float *scales = (const float *)(x + NUMBERS);
    __m512i coarse[2 * 2] = {0}, fine[2 * 2] = {0};
    for (long c = 0; c < count; x += SIDE)
        for (long end = least(count, c + SIDE); c < end; c++, panel += WIDE, x++)
            UNROLL for (int v = 0; v < 2 * panels; v++) {
                const uint32_t *at = panel + v / 2 * apart + v % 2 * LANES;
                const __m512i more = (__m512i)(*(const words *)at ^ 0x80808080u);
                __builtin_prefetch(at + AHEAD);
                coarse[v] = _mm512_dpbusd_epi32(coarse[v], more, _mm512_set1_epi32((int)x[0]));
                fine[v] = _mm512_dpbusd_epi32(fine[v], more, _mm512_set1_epi32((int)x[SIDE]));
            }
    UNROLL for (int v = 0; v < 2 * panels; v++, part += LANES) {
        const words sum = ((words)coarse[v] << 8) + (words)fine[v] - 128 * (uint32_t)(int32_t)scales[1];
        *(floats *)part = plus_span(*(floats *)part, (integers)sum, scales[0]);
    }
}

/* Kernels by rows: one is for any number of them, two panels for half as many. */
#define TILED(NAME, UNIT)                                                                                                \
    KERNEL(NAME##_1) { in_tiles(open_##NAME, UNIT, 1, panel, apart, first, rows, many, stride, count, part, beside); }   \
    KERNEL(NAME##_2) { in_tiles(open_##NAME, UNIT, 2, panel, apart, first, rows, many, stride, count, part, beside); }
TILED(sixteen, SIDE)
TILED(twelve, SIDE / 2)
KERNEL(four_1) { groups_in_tiles(0, 1, panel + first * GROUP_WORDS, apart, rows, many, count, part); }
KERNEL(few_of_four_1) { groups_in_tiles(1, 1, panel + first * GROUP_WORDS, apart, rows, many, count, part); }
KERNEL(few_of_four_2) { groups_in_tiles(1, 2, panel + first * GROUP_WORDS, apart, rows, many, count, part); }

KERNEL(four_alone_1) { four_alone(1, panel + first * GROUP_WORDS, apart, rows, count, part); }
KERNEL(four_alone_2) { four_alone(2, panel + first * GROUP_WORDS, apart, rows, count, part); }
KERNEL(eight_1) { span_in_tiles(1, panel + first * WIDE, apart, rows, many, count, part); }
KERNEL(eight_2) { span_in_tiles(2, panel + first * WIDE, apart, rows, many, count, part); }
KERNEL(eight_alone_1) { eight_alone(1, panel + first * WIDE, apart, rows, count, part); }
KERNEL(eight_alone_2) { eight_alone(2, panel + first * WIDE, apart, rows, count, part); }

#define LISTED(NAME, ALONE)                                                                                              \
    static panel_kernel *const NAME[] = {ALONE##_1, [1 ... 2 * SIDE - 1] = NAME##_1};                                    \
    static panel_kernel *const NAME##_of_two[] = {ALONE##_2, [1 ... SIDE - 1] = NAME##_2};
LISTED(sixteen, sixteen) LISTED(twelve, twelve) LISTED(eight, eight_alone)
static panel_kernel *const four[] = {four_alone_1, [1 ... FEW_OF_FOUR - 1] = few_of_four_1, [FEW_OF_FOUR ... 2 * SIDE - 1] = four_1};
static panel_kernel *const four_of_two[] = {four_alone_2, [1 ... FEW_OF_FOUR - 1] = few_of_four_2};

static void as_columns(const void *x, long first, long n, int halves, void *to)
{
    (void)halves;
    fill(x, first, n, to, UP(n, COLUMNS));
}

form form_of_tiles(int bits, long in)
{
    long columns = bits == 16 ? 2 : 4, length = (in + columns - 1) / columns, groups = UP(in, GROUP) / GROUP;
    if (bits == 4)
        return (form){.most = 2 * SIDE, .most_of_two = FEW_OF_FOUR, .length = groups, .columns = GROUP, .words = groups * GROUP_WORDS,
                      .stride = STRIDE, .block = SPAN / GROUP, .one = four, .two = four_of_two};
    if (bits == 8)
        return (form){.most = SIDE, .most_of_two = SIDE / 2, .length = length, .columns = 4, .words = length * WIDE,
                      .stride = STRIDE, .block = SPAN / 4, .one = eight, .two = eight_of_two};
    form f = {.most = 2 * SIDE, .most_of_two = SIDE, .length = length, .columns = columns, .words = length * WIDE, .apart = columns / 2,
              .stride = UP(in, COLUMNS) / 2 + GAP, .block = 2 * BLOCK / columns, .prepare = as_columns};
    if (bits == 12) f.words = form_of_narrow(12, in, 1).words;
    f.one = bits == 16 ? sixteen : twelve;
    f.two = bits == 16 ? sixteen_of_two : twelve_of_two;
    return f;
}
#else
int takes_tiles(void) { return 0; }

void leave_tiles(void) {}

int stand_in_tiles(const product *p, long rows) { return (void)p, (void)rows, 0; }

long words_in_tiles(long rows, long in) { return (void)rows, (void)in, 0; }

void arrange_in_tiles(const member *me, const void *x, long rows, long in, uint32_t *to)
{
    (void)me, (void)x, (void)rows, (void)in, (void)to;
}

void multiply_in_tiles(const product *p, const form *f, const uint32_t *panel, spares left, const uint32_t *x, long rows, long most,
                       uint32_t *room, float *part)
{
    (void)p, (void)f, (void)panel, (void)left, (void)x, (void)rows, (void)most, (void)room, (void)part;
}

void arrange_whole(const member *me, const form *f, int bits, const void *x, long rows, long in, int halves, uint32_t *to)
{
    (void)me, (void)f, (void)bits, (void)x, (void)rows, (void)in, (void)halves, (void)to;
}

form form_of_tiles(int bits, long in) { return (void)bits, (void)in, (form){0}; }
#endif
