/* Panels of a bfloat16 matrix in twelve bits a weight, without loss, for linear.c's products: a pass of few rows waits for memory, and
 * reads three quarters of it.
 *
 * A weight's upper byte, its sign and all but the last bit of its exponent, takes few values: with a normal distribution a panel's sixteen
 * commonest are all but one of ten thousand. A panel is a line with these sixteen, then, for each block of four columns, 2 * WIDE lower
 * bytes of the first two columns, as many of the others, and 2 * WIDE bytes with the numbers of the upper bytes: of the first two columns
 * in their lower halves, of the others in their upper ones. Bytes stand where interleaving puts them into linear.c's words.
 * A block with a weight that has another upper byte is spare: it stands apart, in linear.c's words. Words and the order of the sums are
 * those of linear.c: no bit of a product tells that the weights are narrow.
 */
#include "lanes.h"

#define COLUMNS 4
#define HEAD 16 /* words before the first block: a line, of which the first four are the upper bytes */
#define WORDS (3 * WIDE / 2) /* of a block */
#define MOST 12
#define AT_ONCE 32 /* blocks, opened: in float32 they fit the first cache, beside the rows' */
/* How many words ahead of a block a panel is fetched, if it is: */
#if !TAKES_PAIRS
#define AHEAD(PANELS) ((PANELS) == 1 ? 768 : 512) /* 3 KB of one stream, 2 KB of each of two, measured */
#elif defined __AVXVNNI__ /* Zen 5: 0.76 of the time at nine rows, 0.97 at one; Zen 4 takes 1.05 to 1.15 (docs/log.md) */
#define AHEAD(PANELS) 3072
#endif
#ifdef AHEAD
#define FETCH(PANELS)                                                                                                    \
    UNROLL for (int q = 0; q < PANELS; q++)                                                                              \
        UNROLL for (int i = 0; i < WORDS; i += 16) __builtin_prefetch(panel + q * apart + AHEAD(PANELS) + i);
#else
#define FETCH(PANELS)
#endif

#if TAKES_NARROW
#define EACH(DO) DO(1, 1) DO(2, 1) DO(3, 1) DO(4, 1) DO(5, 1) DO(6, 1) DO(7, 1) DO(8, 1) DO(9, 1) DO(10, 1) DO(11, 1) DO(12, 1)

/* What a row takes of a pair of columns: pairs as they are, or its two numbers one after the other. */
#if TAKES_PAIRS
typedef pair entry;
#define APART 2 /* entries of a row for a block */
#define MOST_OF_TWO 0
#define EACH_OF_TWO(DO)
#define PLUS(ROWS, PANELS)                                                                                               \
    UNROLL for (int r = 0; r < ROWS; r++)                                                                                \
        UNROLL for (int v = 0; v < 2 * PANELS; v++) sum[r][v] = plus_pairs(sum[r][v], w[v], x[r * stride + k]);
#else
typedef float entry;
#define APART 4
#define MOST_OF_TWO 6
#define EACH_OF_TWO(DO) DO(1, 2) DO(2, 2) DO(3, 2) DO(4, 2) DO(5, 2) DO(6, 2)
#define PLUS(ROWS, PANELS)                                                                                               \
    UNROLL for (int r = 0; r < ROWS; r++)                                                                                \
        UNROLL for (int v = 0; v < 2 * PANELS; v++) sum[r][v] += (floats)(w[v] << 16) * x[r * stride + 2 * k];           \
    UNROLL for (int r = 0; r < ROWS; r++)                                                                                \
        UNROLL for (int v = 0; v < 2 * PANELS; v++) sum[r][v] += (floats)(w[v] & 0xffff0000u) * x[r * stride + 2 * k + 1];
#endif

/* part [ROWS, WIDE * PANELS] += x [ROWS, COLUMNS * count] times blocks [first, first + count) of PANELS adjoining panels */
#define NARROW(ROWS, PANELS)                                                                                             \
    KERNEL(narrow_##ROWS##_##PANELS)                                                                                     \
    {                                                                                                                    \
        const entry *x = rows;                                                                                           \
        const __m512i half = _mm512_set1_epi8(15);                                                                       \
        __m512i upper[PANELS];                                                                                           \
        const int64_t *at[PANELS];                                                                                       \
        const uint32_t *spare[PANELS];                                                                                   \
        floats sum[ROWS][2 * PANELS];                                                                                    \
        words w[2 * PANELS];                                                                                             \
        UNROLL for (int q = 0; q < PANELS; q++) {                                                                        \
            upper[q] = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(panel + q * apart)));                    \
            at[q] = beside[q].at, spare[q] = beside[q].words;                                                            \
        }                                                                                                                \
        TAKE(ROWS, 2 * PANELS)                                                                                           \
        panel += HEAD + first * WORDS;                                                                                   \
        for (long b = first; b < first + count; b++, panel += WORDS, x += APART) {                                       \
            FETCH(PANELS)                                                                                                \
            UNROLL for (int k = 0; k < 2; k++) {                                                                         \
                UNROLL for (int q = 0; q < PANELS; q++) {                                                                \
                    if (__builtin_expect(b == *at[q], 0)) {                                                              \
                        UNROLL for (int v = 0; v < 2; v++) w[2 * q + v] = *(const words *)(spare[q] + (2 * k + v) * LANES);              \
                        if (k) at[q]++, spare[q] += 2 * WIDE;                                                            \
                    } else {                                                                                             \
                        const uint32_t *here = panel + q * apart;                                                        \
                        __m512i numbers = _mm512_loadu_si512(here + WIDE), below = _mm512_loadu_si512(here + k * LANES); \
                        if (k) numbers = _mm512_srli_epi16(numbers, 4);                                                  \
                        __m512i above = _mm512_shuffle_epi8(upper[q], _mm512_and_si512(numbers, half));                  \
                        w[2 * q] = (words)_mm512_unpacklo_epi8(below, above);                                            \
                        w[2 * q + 1] = (words)_mm512_unpackhi_epi8(below, above);                                        \
                    }                                                                                                    \
                }                                                                                                        \
                PLUS(ROWS, PANELS)                                                                                       \
            }                                                                                                            \
        }                                                                                                                \
        GIVE(ROWS, 2 * PANELS)                                                                                           \
    }
#define NARROW_NAME(ROWS, PANELS) narrow_##ROWS##_##PANELS,
EACH(NARROW) EACH_OF_TWO(NARROW)
static panel_kernel *const narrows[] = {EACH(NARROW_NAME)}, *const narrows_of_two[] = {EACH_OF_TWO(NARROW_NAME) 0};

/* Blocks [first, first + count) of a panel, opened: in linear.c's words, [count, 2, WIDE], or each column in float32, [count, COLUMNS, WIDE].
 * `left` begins with the first and goes on. */
static inline void open_blocks(const uint32_t *panel, long first, long count, spares *left, void *to, int wide)
{
    const __m512i upper = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)panel)), half = _mm512_set1_epi8(15);
    words *next = to;
    panel += HEAD + first * WORDS;
    for (long b = first; b < first + count; b++, panel += WORDS) {
        int spare = b == *left->at;
        __m512i numbers = _mm512_loadu_si512(panel + WIDE);
        for (int k = 0; k < 2; k++, numbers = _mm512_srli_epi16(numbers, 4)) {
            __m512i below = _mm512_loadu_si512(panel + k * LANES), above = _mm512_shuffle_epi8(upper, _mm512_and_si512(numbers, half));
            words w[] = {(words)_mm512_unpacklo_epi8(below, above), (words)_mm512_unpackhi_epi8(below, above)};
            if (__builtin_expect(spare, 0)) memcpy(w, left->words + 2 * k * LANES, sizeof w);
            if (wide)
                for (int v = 0; v < 2; v++) next[v] = w[v] << 16, next[v + 2] = w[v] & 0xffff0000u;
            else
                for (int v = 0; v < 2; v++) next[v] = w[v];
            next += wide ? 4 : 2;
        }
        if (spare) left->at++, left->words += 2 * WIDE;
    }
}

void open_narrow(const uint32_t *panel, long first, long count, spares *left, uint32_t *to) { open_blocks(panel, first, count, left, to, 0); }

static void widen_narrow(const uint32_t *panel, long first, long count, spares *left, uint32_t *to) { open_blocks(panel, first, count, left, to, 1); }

/* part [ROWS, WIDE] += x [ROWS, COLUMNS * count] times columns that are opened in float32 */
#define OPENED(ROWS)                                                                                                     \
    KERNEL(opened_##ROWS)                                                                                                \
    {                                                                                                                    \
        const float *x = rows, *w = (const float *)panel;                                                                \
        const uint32_t *next = beside->words;                                                                            \
        floats sum[ROWS][2];                                                                                             \
        TAKE(ROWS, 2)                                                                                                    \
        for (long c = 0; c < COLUMNS * count; c++, w += WIDE, next += apart) {                                           \
            __builtin_prefetch(next);                                                                                    \
            UNROLL for (int r = 0; r < ROWS; r++)                                                                        \
                UNROLL for (int v = 0; v < 2; v++) sum[r][v] += *(const floats *)(w + v * LANES) * x[r * stride + c];    \
        }                                                                                                                \
        GIVE(ROWS, 2)                                                                                                    \
    }
#define OPENED_NAME(ROWS) opened_##ROWS,
EACH_OPENED(OPENED)
static panel_kernel *const opened[] = {EACH_OPENED(OPENED_NAME)};
#else
#define MOST_OF_TWO 0
static panel_kernel *const *const narrows = 0, *const *const narrows_of_two = 0;

void open_narrow(const uint32_t *panel, long first, long count, spares *left, uint32_t *to) { (void)panel, (void)first, (void)count, (void)left, (void)to; }
#define widen_narrow open_narrow
static panel_kernel *const *const opened = 0;
#endif

static int in_pairs(int halves) { return TAKES_PAIRS && halves; }

static void as_entries(const void *x, long first, long n, int halves, void *to)
{
    if (in_pairs(halves)) fill(x, first, n, to, UP(n, COLUMNS));
    else widen(x, first, n, halves, to, UP(n, COLUMNS));
}

/* Where a processor takes pairs, the kernels are for rows in pairs, however many: what one reading leaves in the caches serves the next,
 * measured. Others meet the panels opened; elsewhere they do if one reading does not serve all. */
form form_of_narrow(long in, int halves)
{
    long length = (in + COLUMNS - 1) / COLUMNS, apart = in_pairs(halves) ? 2 : 4, block = in_pairs(halves) ? BLOCK / 2 : 0;
    int as_is = in % COLUMNS == 0 && halves == in_pairs(halves);
    return (form){MOST, MOST_OF_TWO, length, COLUMNS, HEAD + length * WORDS, apart, apart * length + (as_is ? 0 : GAP), as_is, block, as_entries,
                  narrows, narrows_of_two, TAKES_PAIRS ? 0 : MOST, AT_ONCE, COLUMNS, widen_narrow, in_pairs(halves) ? 0 : opened};
}

/* Whether products of bfloat16 numbers can be taken with narrow panels. */
int takes_narrow(void) { return TAKES_NARROW; }

/* The place of a lower byte among those of two columns: output o of a panel, the first column or the second. */
static long place(long o, long second) { return o % LANES / 4 * 16 + o / LANES * 8 + o % 4 * 2 + second; }

/* weight [out, in] → panels [ceil(out / WIDE), HEAD + blocks * WORDS]; what is beyond the matrix is zero. spare [panels, blocks]: 1 where a
 * block is spare. */
void arrange_narrow(const uint16_t *weight, uint32_t *panels, uint8_t *spare, long out, long in, int threads)
{
    long count = (out + WIDE - 1) / WIDE, blocks = (in + COLUMNS - 1) / COLUMNS;
#pragma omp parallel for num_threads(threads)
    for (long a = 0; a < count; a++) {
        long seen[256] = {0};
        for (long o = a * WIDE; o < (a + 1) * WIDE; o++)
            for (long c = 0; c < blocks * COLUMNS; c++) seen[entry_of(weight, out, in, o, c) >> 8]++;
        uint8_t number[256], *to = (uint8_t *)(panels + a * (HEAD + blocks * WORDS));
        memset(number, 255, sizeof number);
        memset(to, 0, 4 * HEAD);
        for (int n = 0; n < 16; n++) {
            int best = 0;
            for (int value = 1; value < 256; value++)
                if (seen[value] > seen[best]) best = value;
            if (seen[best] <= 0) break;
            to[n] = best, number[best] = n, seen[best] = 0;
        }
        to += 4 * HEAD;
        for (long b = 0; b < blocks; b++, to += 4 * WORDS) {
            spare[a * blocks + b] = 0;
            memset(to, 0, 4 * WORDS);
            for (long o = 0; o < WIDE; o++)
                for (long k = 0; k < COLUMNS; k++) {
                    uint16_t value = entry_of(weight, out, in, a * WIDE + o, b * COLUMNS + k);
                    long at = place(o, k % 2);
                    to[k / 2 * 2 * WIDE + at] = value;
                    if (number[value >> 8] > 15) spare[a * blocks + b] = 1;
                    to[4 * WIDE + at] |= (number[value >> 8] & 15) << 4 * (k / 2);
                }
        }
    }
}
