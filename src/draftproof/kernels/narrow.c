/* Panels of a bfloat16 matrix in twelve bits a weight, or eight, without loss, for linear.c's products: a pass of few rows waits for
 * memory, and reads three quarters of it, or half.
 *
 * A weight's upper byte, its sign and all but the last bit of its exponent, takes few values: with a normal distribution a panel's sixteen
 * commonest are all but one of ten thousand. A panel is a HEAD with these sixteen, then, for each block of four columns, 2 * WIDE lower
 * bytes of the first two columns, as many of the others, and 2 * WIDE bytes with the numbers of the upper bytes: of the first two columns
 * in their lower halves, of the others in their upper ones. Bytes stand where interleaving puts them into linear.c's words.
 * A block with a weight that has another upper byte is spare: it stands apart, in linear.c's words. Words and the order of the sums are
 * those of linear.c: no bit of a product tells that the weights are narrow.
 *
 * Floats of eight bits, E4M3, leave the lower halves of their lower bytes empty: the numbers of the upper bytes stand there. They have
 * nineteen upper bytes, those of the largest and the least of both signs rare. An output's step is the same for ALIKE columns: behind
 * their blocks stand WIDE steps, float32, times which their sum is added to those before.
 */
#include "lanes.h"

#define COLUMNS 4
#define TWELVE (3 * WIDE / 2) /* words of a block */
#define EIGHT WIDE
#define ALIKE 128
#define BLOCKS (ALIKE / COLUMNS)
#define ALIKE_WORDS (BLOCKS * EIGHT + WIDE)
#define AT_ONCE 32 /* blocks, opened: in float32 they fit the first cache, beside the rows' */
/* How many words ahead of a block a panel is fetched, and whether; measured (docs/log.md). Zen 5 takes 0.76 of the time at nine rows and
 * 0.97 at one; Zen 4 takes 0.92 at twelve, and 1.05 to 1.15 below seven. */
#if TAKES_PAIRS
#define AHEAD(PANELS) (ZEN_4 ? 512 : 3072)
#else
#define AHEAD(PANELS) ((PANELS) == 1 ? 768 : 512)
#endif
#define FETCHES(ROWS) (!ZEN_4 || (ROWS) > 6)
#define FETCH(ROWS, PANELS, WORDS)                                                                                       \
    if (FETCHES(ROWS)) UNROLL for (int q = 0; q < PANELS; q++)                                                           \
        UNROLL for (int i = 0; i < WORDS; i += 16) __builtin_prefetch(panel + q * apart + AHEAD(PANELS) + i);

#if LANES == 16
#define MOST 12
#define EACH(KIND, NAME) UP_TO_12(KIND, NAME, 1)
#elif REGISTERS == 32 /* more rows would leave pointers, and then sums, on the stack */
#define MOST 6
#define EACH(KIND, NAME) UP_TO_6(KIND, NAME, 1)
#else
#define MOST 4
#define EACH(KIND, NAME) UP_TO_4(KIND, NAME, 1)
#endif

#if TAKES_TABLES
/* What a row takes of a pair of columns: pairs as they are, or its two numbers one after the other. */
#if TAKES_PAIRS
typedef pair entry;
#define APART 2 /* entries of a row for a block */
#define MOST_OF_TWO 0
#define EACH_OF_TWO(KIND, NAME)
#define PLUS(ROWS, PANELS)                                                                                               \
    UNROLL for (int r = 0; r < ROWS; r++)                                                                                \
        UNROLL for (int v = 0; v < 2 * PANELS; v++) sum[r][v] = plus_pairs(sum[r][v], w[v], x[r * stride + k]);
#else
typedef float entry;
#define APART 4
#if LANES == 16
#define MOST_OF_TWO 6
#define EACH_OF_TWO(KIND, NAME) UP_TO_6(KIND, NAME, 2)
#elif REGISTERS == 32
#define MOST_OF_TWO 3
#define EACH_OF_TWO(KIND, NAME) UP_TO_3(KIND, NAME, 2)
#else
#define MOST_OF_TWO 0
#define EACH_OF_TWO(KIND, NAME)
#endif
#define PLUS(ROWS, PANELS)                                                                                               \
    UNROLL for (int r = 0; r < ROWS; r++)                                                                                \
        UNROLL for (int v = 0; v < 2 * PANELS; v++) sum[r][v] += (floats)(w[v] << 16) * x[r * stride + 2 * k];           \
    UNROLL for (int r = 0; r < ROWS; r++)                                                                                \
        UNROLL for (int v = 0; v < 2 * PANELS; v++) sum[r][v] += (floats)(w[v] & 0xffff0000u) * x[r * stride + 2 * k + 1];
#endif

/* Two columns of a block, k of two pairs, as linear.c's words w[0] and w[1]. */
static inline void open_twelve(const uint32_t *block, words upper, int k, words *w)
{
    words numbers = *(const words *)(block + WIDE), below = *(const words *)(block + k * LANES);
    words above = IN_LANES(shuffle, upper, (k ? numbers >> 4 : numbers) & 0x0f0f0f0f);
    w[0] = IN_LANES(unpacklo, below, above), w[1] = IN_LANES(unpackhi, below, above);
}

static inline void open_eight(const uint32_t *block, words upper, int k, words *w)
{
    words both = *(const words *)(block + k * LANES), numbers = both & 0x0f0f0f0f, below = both ^ numbers;
    words above = IN_LANES(shuffle, upper, numbers);
    w[0] = IN_LANES(unpacklo, below, above), w[1] = IN_LANES(unpackhi, below, above);
}

/* What a kernel begins with. */
#define BEGIN(ROWS, PANELS)                                                                                              \
        const entry *x = rows;                                                                                           \
        words upper[PANELS], w[2 * PANELS];                                                                              \
        const int64_t *at[PANELS];                                                                                       \
        const uint32_t *spare[PANELS];                                                                                   \
        floats sum[ROWS][2 * PANELS];                                                                                    \
        UNROLL for (int q = 0; q < PANELS; q++) {                                                                        \
            upper[q] = *(const words *)(panel + q * apart);                                                              \
            at[q] = beside[q].at, spare[q] = beside[q].words;                                                            \
        }
/* sum += x times the blocks [b, end) of PANELS adjoining panels, each of so many words that `open` opens. */
#define PLUS_BLOCKS(ROWS, PANELS, WORDS, open)                                                                           \
        for (; b < end; b++, panel += WORDS, x += APART) {                                                               \
            FETCH(ROWS, PANELS, WORDS)                                                                                   \
            UNROLL for (int k = 0; k < 2; k++) {                                                                         \
                UNROLL for (int q = 0; q < PANELS; q++) {                                                                \
                    if (__builtin_expect(b == *at[q], 0)) {                                                              \
                        UNROLL for (int v = 0; v < 2; v++) w[2 * q + v] = *(const words *)(spare[q] + (2 * k + v) * LANES); \
                        if (k) at[q]++, spare[q] += 2 * WIDE;                                                            \
                    } else {                                                                                             \
                        open(panel + q * apart, upper[q], k, w + 2 * q);                                                 \
                    }                                                                                                    \
                }                                                                                                        \
                PLUS(ROWS, PANELS)                                                                                       \
            }                                                                                                            \
        }
/* part [ROWS, WIDE * PANELS] += x [ROWS, COLUMNS * count] times blocks [first, first + count) of PANELS adjoining panels */
#define NARROW(NAME, ROWS, PANELS)                                                                                       \
    KERNEL(NAME##_##ROWS##_##PANELS)                                                                                     \
    {                                                                                                                    \
        BEGIN(ROWS, PANELS)                                                                                              \
        TAKE(ROWS, 2 * PANELS)                                                                                           \
        panel += HEAD + first * TWELVE;                                                                                  \
        long b = first, end = first + count;                                                                             \
        PLUS_BLOCKS(ROWS, PANELS, TWELVE, open_twelve)                                                                   \
        GIVE(ROWS, 2 * PANELS)                                                                                           \
    }
/* The same of floats: steps are of ALIKE columns. */
#define FLOATS(NAME, ROWS, PANELS)                                                                                       \
    KERNEL(NAME##_##ROWS##_##PANELS)                                                                                     \
    {                                                                                                                    \
        BEGIN(ROWS, PANELS)                                                                                              \
        panel += HEAD + first * ALIKE_WORDS;                                                                             \
        for (long b = first * BLOCKS, last = b + count * BLOCKS; b < last; panel += WIDE) {                              \
            memset(sum, 0, sizeof sum);                                                                                  \
            long end = b + BLOCKS;                                                                                       \
            PLUS_BLOCKS(ROWS, PANELS, EIGHT, open_eight)                                                                 \
            UNROLL for (int v = 0; v < 2 * PANELS; v++) {                                                                \
                const floats step = *(const floats *)(panel + v / 2 * apart + v % 2 * LANES);                            \
                UNROLL for (int r = 0; r < ROWS; r++) *(floats *)(part + (r * 2 * PANELS + v) * LANES) += step * sum[r][v]; \
            }                                                                                                            \
        }                                                                                                                \
    }
LIST(floating, FLOATS, EACH)
LIST(floating_of_two, FLOATS, EACH_OF_TWO)

/* Block b of a panel, opened: in linear.c's words, [2, WIDE], or each column in float32, [COLUMNS, WIDE]; spare ones from `left`, which
 * goes on. Returns where the next one goes. */
static inline __attribute__((always_inline)) uint32_t *open_block(void open(const uint32_t *, words, int, words *), const uint32_t *block,
                                                                  words upper, long b, spares *left, uint32_t *to, int wide)
{
    int spare = b == *left->at;
    for (int k = 0; k < 2; k++, to += wide ? 2 * WIDE : WIDE) {
        words w[2], *next = (words *)to;
        open(block, upper, k, w);
        if (__builtin_expect(spare, 0)) memcpy(w, left->words + 2 * k * LANES, sizeof w);
        for (int v = 0; v < 2; v++)
            if (wide) next[v] = w[v] << 16, next[v + 2] = w[v] & 0xffff0000u;
            else next[v] = w[v];
    }
    if (spare) left->at++, left->words += 2 * WIDE;
    return to;
}

/* `count` times ALIKE columns in float32, and their steps. */
static void widen_floats(const uint32_t *panel, long first, long count, spares *left, uint32_t *to)
{
    const words upper = *(const words *)panel;
    panel += HEAD + first * ALIKE_WORDS;
    for (long b = first * BLOCKS, last = b + count * BLOCKS; b < last; panel += WIDE, to += WIDE) {
        for (long end = b + BLOCKS; b < end; b++, panel += EIGHT) to = open_block(open_eight, panel, upper, b, left, to, 1);
        memcpy(to, panel, 4 * WIDE);
    }
}

/* sum [ROWS, WIDE] += x [ROWS, count] times columns that are opened in float32 */
#define PLUS_OPENED(ROWS, COUNT)                                                                                         \
        for (long c = 0; c < (COUNT); c++, x++, w += WIDE, next += apart) {                                              \
            __builtin_prefetch(next);                                                                                    \
            UNROLL for (int r = 0; r < ROWS; r++)                                                                        \
                UNROLL for (int v = 0; v < 2; v++) sum[r][v] += *(const floats *)(w + v * LANES) * x[r * stride];        \
        }
#define OPENED_FLOATS(NAME, ROWS, PANELS)                                                                                \
    KERNEL(NAME##_##ROWS##_##PANELS)                                                                                     \
    {                                                                                                                    \
        const float *x = rows, *w = (const float *)panel;                                                                \
        const uint32_t *next = beside->words;                                                                            \
        floats sum[ROWS][2];                                                                                             \
        for (long g = 0; g < count; g++, w += WIDE, next += apart) {                                                     \
            memset(sum, 0, sizeof sum);                                                                                  \
            PLUS_OPENED(ROWS, ALIKE)                                                                                     \
            __builtin_prefetch(next);                                                                                    \
            UNROLL for (int r = 0; r < ROWS; r++)                                                                        \
                UNROLL for (int v = 0; v < 2; v++)                                                                       \
                    *(floats *)(part + r * WIDE + v * LANES) += *(const floats *)(w + v * LANES) * sum[r][v];            \
        }                                                                                                                \
    }
LIST(opened_floats, OPENED_FLOATS, EACH_OPENED)
#else
#define MOST_OF_TWO 0
static panel_kernel *const *const floating = 0, *const *const floating_of_two = 0, *const *const opened_floats = 0;
#define widen_floats open_narrow
#endif

#if TAKES_NARROW
LIST(narrows, NARROW, EACH)
LIST(narrows_of_two, NARROW, EACH_OF_TWO)

static inline void open_blocks(const uint32_t *panel, long first, long count, spares *left, uint32_t *to, int wide)
{
    const words upper = *(const words *)panel;
    panel += HEAD + first * TWELVE;
    for (long b = first; b < first + count; b++, panel += TWELVE) to = open_block(open_twelve, panel, upper, b, left, to, wide);
}

void open_narrow(const uint32_t *panel, long first, long count, spares *left, uint32_t *to)
{
    open_blocks(panel, first, count, left, to, 0);
}

static void widen_narrow(const uint32_t *panel, long first, long count, spares *left, uint32_t *to)
{
    open_blocks(panel, first, count, left, to, 1);
}

#define OPENED(NAME, ROWS, PANELS)                                                                                       \
    KERNEL(NAME##_##ROWS##_##PANELS)                                                                                     \
    {                                                                                                                    \
        const float *x = rows, *w = (const float *)panel;                                                                \
        const uint32_t *next = beside->words;                                                                            \
        floats sum[ROWS][2];                                                                                             \
        TAKE(ROWS, 2)                                                                                                    \
        PLUS_OPENED(ROWS, COLUMNS * count)                                                                               \
        GIVE(ROWS, 2)                                                                                                    \
    }
LIST(opened, OPENED, EACH_OPENED)
#else
static panel_kernel *const *const narrows = 0, *const *const narrows_of_two = 0, *const *const opened = 0;

void open_narrow(const uint32_t *panel, long first, long count, spares *left, uint32_t *to)
{
    (void)panel, (void)first, (void)count, (void)left, (void)to;
}
#define widen_narrow open_narrow
#endif

static int in_pairs(int halves) { return TAKES_PAIRS && halves; }

static void as_entries(const void *x, long first, long n, int halves, void *to)
{
    if (in_pairs(halves)) fill(x, first, n, to, UP(n, COLUMNS));
    else widen(x, first, n, halves, to, UP(n, COLUMNS));
}

static void as_alike(const void *x, long first, long n, int halves, void *to)
{
    if (in_pairs(halves)) fill(x, first, n, to, UP(n, ALIKE));
    else widen(x, first, n, halves, to, UP(n, ALIKE));
}

/* Where a processor takes pairs, the kernels are for rows in pairs, however many: what one reading leaves in the caches serves the next,
 * measured. Others meet the panels opened; elsewhere they do if one reading does not serve all. */
form form_of_narrow(int bits, long in, int halves)
{
    const int pairs = in_pairs(halves), eight = bits == EIGHT_FLOATS;
    const long columns = eight ? ALIKE : COLUMNS, length = (in + columns - 1) / columns, apart = pairs ? columns / 2 : columns;
    const int as_is = in % columns == 0 && halves == pairs;
    form f = {.most = MOST, .most_of_two = MOST_OF_TWO, .length = length, .columns = columns,
              .words = HEAD + length * (eight ? ALIKE_WORDS : TWELVE), .apart = apart, .stride = apart * length + (as_is ? 0 : GAP),
              .as_is = as_is, .block = pairs ? 2 * BLOCK / columns : 0, .prepare = as_entries, .one = narrows, .two = narrows_of_two,
              .direct = TAKES_PAIRS ? 0 : MOST, .at_once = AT_ONCE, .lines = COLUMNS, .open = widen_narrow, .opened = pairs ? 0 : opened};
    if (!eight) return f;
    f.prepare = as_alike, f.one = floating, f.two = floating_of_two;
    f.at_once = AT_ONCE / BLOCKS, f.lines = ALIKE + 1, f.open = widen_floats, f.opened = pairs ? 0 : opened_floats;
    return f;
}

/* Whether products can be taken with narrow panels, or those of small groups, of so many bits. All but twelve have no tiles, in which
 * prompts meet bfloat16 numbers far faster. */
int takes_narrow(int bits) { return bits < 0 ? TAKES_TABLES && !takes_tiles() : TAKES_NARROW; }

/* The place of a byte among those of two columns: output o of a panel, the first column or the second. */
static long place(long o, long second) { return o % LANES / 4 * 16 + o / LANES * 8 + o % 4 * 2 + second; }

/* The sixteen commonest upper bytes of a panel, four times, and the number of each; 255 of others. */
static void count_upper(const uint16_t *weight, long out, long in, long first, uint8_t *to, uint8_t *number)
{
    long seen[256] = {0};
    for (long o = first; o < first + WIDE; o++)
        for (long c = 0; c < UP(in, COLUMNS); c++) seen[entry_of(weight, out, in, o, c) >> 8]++;
    memset(number, 255, 256);
    memset(to, 0, 4 * HEAD);
    for (int n = 0; n < 16; n++) {
        int best = 0;
        for (int value = 1; value < 256; value++)
            if (seen[value] > seen[best]) best = value;
        if (seen[best] <= 0) break;
        for (int i = n; i < 64; i += 16) to[i] = best;
        number[best] = n, seen[best] = 0;
    }
}

/* weight [out, in] → panels [ceil(out / WIDE), HEAD + …] of twelve bits or, with steps [out, ceil(in / ALIKE)], of eight, which have zeros
 * in the lower halves of their lower bytes; what is beyond the matrix is zero. spare [panels, blocks]: 1 where a block is spare. */
void arrange_narrow(const uint16_t *weight, const float *steps, uint32_t *panels, uint8_t *spare, long out, long in, int threads)
{
    const long count = (out + WIDE - 1) / WIDE, groups = (in + ALIKE - 1) / ALIKE, each = 4 * (steps ? EIGHT : TWELVE);
    const long blocks = steps ? groups * BLOCKS : (in + COLUMNS - 1) / COLUMNS, words = steps ? groups * ALIKE_WORDS : blocks * TWELVE;
#pragma omp parallel for num_threads(threads)
    for (long a = 0; a < count; a++) {
        uint8_t number[256], *to = (uint8_t *)(panels + a * (HEAD + words));
        count_upper(weight, out, in, a * WIDE, to, number);
        to += 4 * HEAD;
        for (long b = 0; b < blocks; b++, to += each) {
            spare[a * blocks + b] = 0;
            memset(to, 0, each);
            for (long o = 0; o < WIDE; o++)
                for (long k = 0; k < COLUMNS; k++) {
                    uint16_t value = entry_of(weight, out, in, a * WIDE + o, b * COLUMNS + k);
                    long at = place(o, k % 2);
                    to[k / 2 * 2 * WIDE + at] = value;
                    if (number[value >> 8] > 15) spare[a * blocks + b] = 1;
                    to[steps ? k / 2 * 2 * WIDE + at : 4 * WIDE + at] |= (number[value >> 8] & 15) << (steps ? 0 : 4 * (k / 2));
                }
            if (!steps || (b + 1) % BLOCKS) continue;
            float *behind = (float *)(to + each);
            for (long o = a * WIDE; o < (a + 1) * WIDE; o++) *behind++ = o < out ? steps[o * groups + b / BLOCKS] : 0;
            to += 4 * WIDE;
        }
    }
}
