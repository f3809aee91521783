/* Products in tiles, for processors with AMX: sixteen rows times thirty-two columns of sixteen outputs in one instruction, whose time does
 * not depend on the rows. Panels are those of linear.c, narrow.c and integers.c; a tile reads linear.c's words as they lie, others are opened
 * into such words first, thirty-two columns at a time. Thirty-two rows share that; of more than sixty-four all do. Attention's scores are
 * taken in tiles, too.
 *
 * An instruction adds thirty-two columns in an order of its own, the same for every row and for any number of rows; numbers below 2^-126
 * count as zeros. What lies behind a row's last column is zero.
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
/* Tiles 0 to 3 are sums: of the first SIDE rows by the first and the second outputs of a panel, then of the other rows, or of the next panel. */
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

/* Sums += COLUMNS of the rows x times as many of one panel or two, in linear.c's words. */
#define MULTIPLY(panels, words, x, stride, rows)                                                                         \
    do {                                                                                                                 \
        const int others = (panels) == 1 && (rows) > SIDE;                                                               \
        SETTLE;                                                                                                          \
        _tile_loadd(ROWS, x, 4 * (stride));                                                                              \
        _tile_loadd(FIRST, (words)[0], 4 * WIDE);                                                                        \
        _tile_dpbf16ps(0, ROWS, FIRST);                                                                                  \
        if (!others) LEAVE(FIRST);                                                                                       \
        _tile_loadd(SECOND, (words)[0] + SIDE, 4 * WIDE);                                                                \
        _tile_dpbf16ps(1, ROWS, SECOND);                                                                                 \
        if (!others) LEAVE(SECOND);                                                                                      \
        if ((panels) == 2) {                                                                                             \
            _tile_loadd(FIRST, (words)[1], 4 * WIDE);                                                                    \
            _tile_dpbf16ps(2, ROWS, FIRST);                                                                              \
            LEAVE(FIRST);                                                                                                \
            _tile_loadd(SECOND, (words)[1] + SIDE, 4 * WIDE);                                                            \
            _tile_dpbf16ps(3, ROWS, SECOND);                                                                             \
            LEAVE(SECOND);                                                                                               \
        }                                                                                                                \
        LEAVE(ROWS);                                                                                                     \
        if (others) {                                                                                                    \
            _tile_loadd(OTHERS, (x) + SIDE * (stride), 4 * (stride));                                                    \
            _tile_dpbf16ps(2, OTHERS, FIRST);                                                                            \
            LEAVE(FIRST);                                                                                                \
            _tile_dpbf16ps(3, OTHERS, SECOND);                                                                           \
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

/* The lower and the upper byte of a bfloat16 from 0 to 127. */
static _Alignas(64) uint8_t lower[128], upper[128];

static __attribute__((constructor)) void fill_bytes(void)
{
    for (int i = 0; i < 128; i++) lower[i] = rounded(i) & 255, upper[i] = rounded(i) >> 8;
}

#define LOOK(table, at) _mm512_permutex2var_epi8(_mm512_load_si512(table), at, _mm512_load_si512((table) + 64))

static inline const uint32_t *open_eight(const uint32_t *panel, long s, long n, spares *left, uint32_t *room)
{
    (void)left;
    ask(panel + s * WIDE, n * WIDE);
    for (long i = 0; i < 2 * n; i++) { /* four columns of SIDE outputs */
        const __m512i levels = _mm512_loadu_si512(panel + s * WIDE + i * SIDE), sizes = _mm512_abs_epi8(levels);
        const __m512i below = LOOK(lower, sizes), sign = _mm512_and_si512(levels, _mm512_set1_epi8(-128));
        const __m512i above = _mm512_or_si512(LOOK(upper, sizes), sign);
        const __m512 low = (__m512)_mm512_unpacklo_epi8(below, above), high = (__m512)_mm512_unpackhi_epi8(below, above);
        _mm512_store_ps(room + (i & ~1) * WIDE + (i & 1) * SIDE, _mm512_shuffle_ps(low, high, 0x88));
        _mm512_store_ps(room + (i | 1) * WIDE + (i & 1) * SIDE, _mm512_shuffle_ps(low, high, 0xdd));
    }
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
        MULTIPLY(panels, now, x, stride, many);
    }
    MULTIPLY(panels, now, x, stride, many);
    MOVE(_tile_stored, panels, part, many);
}

/* Whether so many rows are multiplied by `multiply_in_tiles`. Groups of four bits are scaled one by one, which only `in_tiles` does. */
int stand_in_tiles(const product *p, long rows) { return rows > FEW && p->in && p->bits != 4; }

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
    if (p->bits == 16) return open_sixteen(panel, b * unit, n, left, room);
    return (p->bits == 12 ? open_twelve : open_eight)(panel, b * unit, n, left, room);
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
            if (b) {
                MOVE(_tile_loadd, 1, part + r * WIDE, many);
            } else {
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
            }
            for (long i = 0; i < n; i++, here += tall * SIDE) {
                if (!r && i + 1 < n) words[i + 1] = open_block(p, f, panel, b + i + 1, &left, room + (i + 1) * ROOM);
                MULTIPLY(1, words + i, here, SIDE, many);
            }
            MOVE(_tile_stored, 1, part + r * WIDE, many);
        }
    }
}

/* Half a group of four bits, of the panel's half `s`. */
static inline void open_four(const uint32_t *panel, long s, uint32_t *room)
{
    panel += s / 2 * GROUP_WORDS + s % 2 * (GROUP / 16) * WIDE;
    ask(panel, GROUP_WORDS / 2);
    for (long i = 0; i < GROUP / 16; i++)
        UNROLL for (int v = 0; v < 2; v++) {
            words w = *(const words *)(panel + i * WIDE + v * LANES);
            UNROLL for (int k = 0; k < 4; k++) {
                words level = k ? w >> (4 * k - 3) : w << 3;
                *(words *)(room + (4 * i + k) * WIDE + v * LANES) = (level & 0x780078) | 0x3f803f80;
            }
        }
}

/* part [many, panels * WIDE] += what the sums `found` of a group make, as integers.c does it. sums: of each row's columns. */
static inline void scale(int panels, const uint32_t *const *levels, const float *found, const float *sums, long many, long stride, float *part)
{
    for (int v = 0; v < 2 * panels; v++) {
        words both = *(const words *)(levels[v / 2] + GROUP / 8 * WIDE + v % 2 * LANES);
        floats step = (floats)(both << 16), zero = (floats)(both & 0xffff0000u);
        zero -= 24 * step;
        step *= 16;
        for (long r = 0; r < many; r++) {
            floats *all = (floats *)(part + (r * panels * 2 + v) * LANES);
            *all += zero * sums[r * stride];
            *all += step * *(const floats *)(found + (r * panels * 2 + v) * LANES);
        }
    }
}

/* The same of groups of four bits, which are scaled one by one. Behind all columns of a row stand their sums. */
static inline __attribute__((always_inline)) void groups_in_tiles(
    int panels, const uint32_t *panel, long apart, long first, const uint32_t *x, long many, long stride, long count, float *part)
{
    _Alignas(64) uint32_t room[2][2][ROOM];
    _Alignas(64) float found[2 * SIDE * WIDE];
    const float *sums = (const float *)(x + count * GROUP / 2);
    panel += first * GROUP_WORDS;
    shape(many);
    for (int q = 0; q < panels; q++) open_four(panel + q * apart, 0, room[0][q]);
    for (long s = 0; s < 2 * count; s++, x += SIDE) {
        const uint32_t *now[] = {room[s % 2][0], room[s % 2][1]};
        for (int q = 0; q < panels && s + 1 < 2 * count; q++) open_four(panel + q * apart, s + 1, room[(s + 1) % 2][q]);
        if (s % 2 == 0) {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        }
        MULTIPLY(panels, now, x, stride, many);
        if (s % 2 == 0) continue;
        MOVE(_tile_stored, panels, found, many);
        const uint32_t *levels[] = {panel + s / 2 * GROUP_WORDS, panel + s / 2 * GROUP_WORDS + apart};
        scale(panels, levels, found, sums + s / 2, many, stride, part);
    }
}

/* One row of eight bits, in vectors: 1.1 to 1.4 times as fast, for a tile's instructions take as long for one row as for SIDE, and longer
 * than the weights. Those of twelve bits take longer themselves, and four bits have more to open (0.8 to 1.0, measured). An instruction
 * adds the even ones of COLUMNS one after the other, likewise the odd ones, and both sums to what there was. */
static inline __attribute__((always_inline)) void eight_alone(
    int panels, const uint32_t *panel, long apart, const uint32_t *x, long count, float *part)
{
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON);
    SETTLE;
    for (long s = 0; s < count; s += COLUMNS / 4, x += SIDE) {
        _Alignas(64) float numbers[2][SIDE];
        floats sums[2 * 2][2] = {0};
        *(floats *)numbers[0] = (floats)(*(const words *)x << 16);
        *(floats *)numbers[1] = (floats)(*(const words *)x & 0xffff0000u);
        for (long i = 0; i < 2 * least(COLUMNS / 4, count - s); i += 2, panel += WIDE)
            UNROLL for (int v = 0; v < 2 * panels; v++) {
                const uint32_t *at = panel + v / 2 * apart + v % 2 * LANES;
                integers four = *(const integers *)at;
                __builtin_prefetch(at + AHEAD);
                UNROLL for (int k = 0; k < 4; k++)
                    sums[v][k % 2] += __builtin_convertvector(four << (24 - 8 * k) >> 24, floats) * numbers[k % 2][i + k / 2];
            }
        UNROLL for (int v = 0; v < 2 * panels; v++) *(floats *)(part + v * LANES) += sums[v][0] + sums[v][1];
    }
    SETTLE;
    _mm_setcsr(before);
}

/* Kernels by rows: one is for any number of them, two panels for half as many. */
#define TILED(NAME, UNIT)                                                                                                \
    KERNEL(NAME##_1) { in_tiles(open_##NAME, UNIT, 1, panel, apart, first, rows, many, stride, count, part, beside); }   \
    KERNEL(NAME##_2) { in_tiles(open_##NAME, UNIT, 2, panel, apart, first, rows, many, stride, count, part, beside); }
TILED(sixteen, SIDE)
TILED(twelve, SIDE / 2)
TILED(eight, SIDE / 2)
KERNEL(four_1) { groups_in_tiles(1, panel, apart, first, rows, many, stride, count, part); }
KERNEL(four_2) { groups_in_tiles(2, panel, apart, first, rows, many, stride, count, part); }

KERNEL(eight_alone_1) { eight_alone(1, panel + first * WIDE, apart, rows, count, part); }
KERNEL(eight_alone_2) { eight_alone(2, panel + first * WIDE, apart, rows, count, part); }

#define LISTED(NAME, ALONE)                                                                                              \
    static panel_kernel *const NAME[] = {ALONE##_1, [1 ... 2 * SIDE - 1] = NAME##_1};                                    \
    static panel_kernel *const NAME##_of_two[] = {ALONE##_2, [1 ... SIDE - 1] = NAME##_2};
LISTED(sixteen, sixteen) LISTED(twelve, twelve) LISTED(eight, eight_alone) LISTED(four, four)

static void as_columns(const void *x, long first, long n, int halves, void *to)
{
    (void)halves;
    fill(x, first, n, to, UP(n, COLUMNS));
}

static void as_groups(const void *x, long first, long n, int halves, void *to)
{
    float wide[GROUP], *sums = (float *)((uint32_t *)to + UP(n, GROUP) / 2);
    fill(x, first, n, to, UP(n, GROUP));
    for (long c = 0; c < n; c += GROUP) {
        widen(x, first + c, least(GROUP, n - c), halves, wide, GROUP);
        *sums++ = sum_of(wide);
    }
}

form form_of_tiles(int bits, long in)
{
    long columns = bits == 16 ? 2 : 4, length = (in + columns - 1) / columns, groups = (in + GROUP - 1) / GROUP;
    form f = {2 * SIDE, SIDE, length, columns, length * WIDE, columns / 2, UP(in, COLUMNS) / 2 + GAP, 0, 2 * BLOCK / columns, as_columns};
    if (bits == 4)
        return (form){2 * SIDE, SIDE, groups, GROUP, groups * GROUP_WORDS, 0, groups * (GROUP / 2 + 1), 0, 0, as_groups, four, four_of_two};
    if (bits == 12) f.words = form_of_narrow(in).words;
    f.one = bits == 16 ? sixteen : bits == 12 ? twelve : eight;
    f.two = bits == 16 ? sixteen_of_two : bits == 12 ? twelve_of_two : eight_of_two;
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

form form_of_tiles(int bits, long in) { return (form){bits, in}; }
#endif
