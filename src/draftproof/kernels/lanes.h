/* What the kernels share: vectors of the processor's width, bfloat16, the exponential, and what they call of each other. */
#include <stdint.h>
#include <string.h>

#include "team.h"

#ifndef LANES /* a compiler makes vectors of any width, those beyond the processor's in memory; the tests run all of these everywhere */
#if defined __AVX512F__
#define LANES 16
#elif defined __AVX__
#define LANES 8
#else
#define LANES 4
#endif
#endif
#ifndef REGISTERS /* of that width */
#if LANES == 16 || defined __aarch64__
#define REGISTERS 32
#else
#define REGISTERS 16
#endif
#endif
#define WIDE (2 * LANES) /* outputs of a panel */
#define UNROLL _Pragma("GCC unroll 12")
#define CHUNK 16    /* keys that attention takes at a time */
#define UP(n, to) (((n) + (to) - 1) / (to) * (to))
#define MOST_SHARING 32 /* rows, of any form */
/* A kernel for each number of rows, UP_TO_12(KIND, NAME, …): KIND(NAME, 1, …) KIND(NAME, 2, …) …; and the LIST of them, by rows. */
#define UP_TO_2(KIND, NAME, ...) KIND(NAME, 1, __VA_ARGS__) KIND(NAME, 2, __VA_ARGS__)
#define UP_TO_3(KIND, NAME, ...) UP_TO_2(KIND, NAME, __VA_ARGS__) KIND(NAME, 3, __VA_ARGS__)
#define UP_TO_4(KIND, NAME, ...) UP_TO_3(KIND, NAME, __VA_ARGS__) KIND(NAME, 4, __VA_ARGS__)
#define UP_TO_5(KIND, NAME, ...) UP_TO_4(KIND, NAME, __VA_ARGS__) KIND(NAME, 5, __VA_ARGS__)
#define UP_TO_6(KIND, NAME, ...) UP_TO_5(KIND, NAME, __VA_ARGS__) KIND(NAME, 6, __VA_ARGS__)
#define UP_TO_12(KIND, NAME, ...)                                                                                        \
    UP_TO_6(KIND, NAME, __VA_ARGS__) KIND(NAME, 7, __VA_ARGS__) KIND(NAME, 8, __VA_ARGS__) KIND(NAME, 9, __VA_ARGS__)    \
    KIND(NAME, 10, __VA_ARGS__) KIND(NAME, 11, __VA_ARGS__) KIND(NAME, 12, __VA_ARGS__)
#define ENTRY(NAME, ROWS, PANELS, ...) NAME##_##ROWS##_##PANELS,
#define LIST(NAME, KIND, EACH_ROWS) EACH_ROWS(KIND, NAME) static panel_kernel *const NAME[] = {EACH_ROWS(ENTRY, NAME) 0};
#if LANES == 16
#define MOST_OPENED 12 /* rows that share a reading of an opened panel: as many as there are registers for */
#define EACH_OPENED(KIND, NAME) UP_TO_12(KIND, NAME, 1)
#else
#define MOST_OPENED 6
#define EACH_OPENED(KIND, NAME) UP_TO_6(KIND, NAME, 1)
#endif
#define GROUP 64   /* columns of four bits that share a step */
#define SPAN 512   /* columns of a row that share a step where weights have eight bits */
#define GROUP_WORDS ((GROUP / 8 + 1) * WIDE)
#define BLOCK 768 /* pairs of columns: of MANY rows or more so many lie together, row by row, with a line between two of them, measured: */
#define GAP 16    /* whole rows, a power of two apart, would meet in the same lines of the first cache and push each other out */
#define SMALL 65536 /* products that one thread finishes before a second has woken */

typedef float floats __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t words __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t integers __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint16_t shorts __attribute__((vector_size(2 * LANES), aligned(2)));
typedef uint32_t pair __attribute__((aligned(2), may_alias)); /* of bfloat16 */

/* What a step of a panel reads. Every line of it: fetching one of two is slower than fetching none, measured. */
static inline void fetch(const uint32_t *step) { for (int i = 0; i < WIDE; i += 16) __builtin_prefetch(step + i); }

/* Of the rows that are left, how many share the next reading: no reading is left to very few. */
static inline long sharing(long left, long most) { return left <= most ? left : left < 2 * most ? (left + 1) / 2 : most; }

static inline uint16_t entry_of(const uint16_t *weight, long out, long in, long o, long c) /* of weight [out, in], 0 beyond it */
{
    return o < out && c < in ? weight[o * in + c] : 0;
}

static inline long least(long a, long b) { return a < b ? a : b; }

static inline long most(long a, long b) { return a > b ? a : b; }

static inline long size(int halves) { return halves ? 2 : 4; } /* bytes of a number */

/* Bytes of a head of keys or values, as it is kept. */
static inline long kept_bytes(long dim, int halves, int rounded) { return rounded ? dim + 4 : size(halves) * dim; }

static inline float widened(uint16_t half)
{
    uint32_t word = (uint32_t)half << 16;
    float value;
    memcpy(&value, &word, 4);
    return value;
}

static inline uint16_t rounded(float value) /* to the nearest bfloat16, ties to even */
{
    uint32_t word;
    memcpy(&word, &value, 4);
    return value != value ? 0x7fc0 : (uint16_t)((word + 0x7fff + (word >> 16 & 1)) >> 16);
}

#if LANES == 16
static const integers AT = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif LANES == 8
static const integers AT = {0, 1, 2, 3, 4, 5, 6, 7};
#else
static const integers AT = {0, 1, 2, 3};
#endif
#define ACROSS(half, x) __builtin_shuffle(x, AT ^ (half)) /* each lane's partner's */

static inline floats either(integers which, floats a, floats b) { return (floats)(((integers)a & which) | ((integers)b & ~which)); }
#define GREATER(a, b) ((__typeof__(a))either((a) > (b), (floats)(a), (floats)(b))) /* of floats, or of integers */

static inline float total(floats x) /* over the lanes */
{
    float lanes[LANES];
    memcpy(lanes, &x, sizeof x);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

/* The sums [ROWS, COUNT] of a kernel from memory and back; the compiler would call memcpy, and keep the sums on the stack for it. */
#define TAKE(ROWS, COUNT)                                                                                                \
    UNROLL for (int r = 0; r < ROWS; r++)                                                                                \
        UNROLL for (int v = 0; v < COUNT; v++) sum[r][v] = *(const floats *)(part + (r * COUNT + v) * LANES);
#define GIVE(ROWS, COUNT)                                                                                                \
    UNROLL for (int r = 0; r < ROWS; r++)                                                                                \
        UNROLL for (int v = 0; v < COUNT; v++) *(floats *)(part + (r * COUNT + v) * LANES) = sum[r][v];

static inline void fill(const void *from, long first, long n, void *to, long wide) /* bfloat16 as they are, and zeros */
{
    memcpy(to, (const uint16_t *)from + first, 2 * n);
    memset((uint16_t *)to + n, 0, 2 * (wide - n));
}

/* Whether products of bfloat16 pairs are used. Intel's processors, which have AVX512-FP16 beside them, take four times as long for one as
 * for a product of float32; on AMD's they pay (docs/log.md). */
#ifndef TAKES_PAIRS
#if defined __AVX512BF16__ && LANES == 16 && !defined __AVX512FP16__
#define TAKES_PAIRS 1
#else
#define TAKES_PAIRS 0
#endif
#endif
#if TAKES_PAIRS && !defined __AVXVNNI__ /* measured apart from what follows it */
#define ZEN_4 1
#else
#define ZEN_4 0
#endif
/* Whether products are taken in tiles (tiles.c), which the process must have asked for: `takes_tiles`. */
#ifndef TAKES_TILES
#if defined __AMX_BF16__ && defined __AMX_INT8__ && defined __AVX512VNNI__ && defined __linux__ && LANES == 16
#define TAKES_TILES 1
#else
#define TAKES_TILES 0
#endif
#endif
/* Whether weights lie in twelve bits (narrow.c). */
#ifndef TAKES_NARROW
#if defined __AVX512BW__ && LANES == 16
#define TAKES_NARROW 1
#else
#define TAKES_NARROW 0
#endif
#endif
/* Whether bytes are looked up, sixteen side by side, and interleaved: floats of eight bits, and four in small groups. */
#if TAKES_NARROW || defined __AVX2__ && LANES == 8 || (defined __SSSE3__ || defined __aarch64__) && LANES == 4
#define TAKES_TABLES 1
#ifdef __aarch64__
#include <arm_neon.h>
#define NEON_shuffle vqtbl1q_u8
#define NEON_unpacklo vzip1q_u8
#define NEON_unpackhi vzip2q_u8
#define IN_LANES(NAME, A, B) ((words)NEON_##NAME((uint8x16_t)(A), (uint8x16_t)(B)))
#else
#include <immintrin.h>
#if LANES == 16
#define IN_LANES(NAME, A, B) ((words)_mm512_##NAME##_epi8((__m512i)(A), (__m512i)(B)))
#elif LANES == 8
#define IN_LANES(NAME, A, B) ((words)_mm256_##NAME##_epi8((__m256i)(A), (__m256i)(B)))
#else
#define IN_LANES(NAME, A, B) ((words)_mm_##NAME##_epi8((__m128i)(A), (__m128i)(B)))
#endif
#endif
#else
#define TAKES_TABLES 0
#endif
#define HEAD 16 /* words before a panel's first step: a line with sixteen bytes, four times */
#if TAKES_PAIRS
static inline floats plus_pairs(floats sum, words w, uint32_t x) /* sum + w's odd halves times x's, + the even ones */
{
    return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)_mm512_set1_epi32((int)x));
}
#endif

/* e to the x for x <= 0, within two units of the last place; exactly 0 below -87. Cephes' reduction and polynomial. */
static inline floats exponential(floats x)
{
    integers seen = x > -87.0f;
    x = (floats)((integers)x & seen);
    floats whole = x * 1.44269504088896341f + 12582912.0f; /* adding 1.5 * 2^23 rounds to an integer */
    words power = (words)whole << 23;
    whole -= 12582912.0f;
    x -= whole * 0.693359375f;
    x -= whole * -2.12194440e-4f;
    floats y = x * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * x + 8.3334519073e-3f;
    y = y * x + 4.1665795894e-2f;
    y = y * x + 1.6666665459e-1f;
    y = y * x + 5.0000001201e-1f;
    y = y * (x * x) + x + 1.0f;
    return (floats)((integers)((words)y + power) & seen);
}

static inline floats sigmoid(floats x) /* 1 / (1 + e^-x), by the exponential of what is not positive */
{
    integers negative = x < 0;
    floats e = exponential((floats)((words)x | 0x80000000u)), over = {0};
    over += 1;
    floats top = (floats)(((integers)e & negative) | ((integers)over & ~negative));
    return top / (1 + e);
}

/* log(1 + e^x): the larger of x and 0, and log(1 + t), t = e^-|x|, which is 2 artanh(t / (2 + t)). What is no number stays so. */
static inline floats softplus(floats x)
{
    floats t = exponential(-(floats)((words)x & 0x7fffffffu)), s = t / (2 + t), q = s * s;
    floats series = ((((q / 13 + 1 / 11.f) * q + 1 / 9.f) * q + 1 / 7.f) * q + 1 / 5.f) * q + 1 / 3.f;
    return either(x == x, either(x > 0, x, (floats){0}) + 2 * (s + s * q * series), x);
}

/* Numbers of float32 or, with halves, bfloat16: one, or LANES of them from the i-th on. */
static inline float load(const void *from, long i, int halves)
{
    return halves ? widened(((const uint16_t *)from)[i]) : ((const float *)from)[i];
}

static inline floats load_lanes(const void *from, long i, int halves)
{
    if (halves) return (floats)(__builtin_convertvector(*(const shorts *)((const uint16_t *)from + i), words) << 16);
    return *(const floats *)((const float *)from + i);
}

static inline void store(void *to, long i, float value, int halves)
{
    if (halves) ((uint16_t *)to)[i] = rounded(value);
    else ((float *)to)[i] = value;
}

/* Rounded as `rounded` does it; an instruction for it makes zeros of numbers below 2^-126, as that for products does. */
static inline shorts halves_of(floats value)
{
#if TAKES_PAIRS
    return (shorts)_mm512_cvtneps_pbh((__m512)value);
#else
    words word = (words)value, nan = (words)(value != value);
    word = (word + 0x7fff + (word >> 16 & 1)) >> 16;
    return __builtin_convertvector((word & ~nan) | (nan & 0x7fc0), shorts);
#endif
}

static inline floats kept_lanes(floats value, int halves) /* as it would be loaded after a store */
{
    return halves ? (floats)(__builtin_convertvector(halves_of(value), words) << 16) : value;
}

static inline void store_lanes(void *to, long i, floats value, int halves)
{
    if (halves) *(shorts *)((uint16_t *)to + i) = halves_of(value);
    else *(floats *)((float *)to + i) = value;
}

static inline float kept(float value, int halves)
{
    return halves ? widened(rounded(value)) : value;
}

static inline void widen(const void *from, long first, long n, int halves, float *to, long wide) /* and fill up with zeros */
{
    long i = 0;
    for (; i + LANES <= n; i += LANES) *(floats *)(to + i) = load_lanes(from, first + i, halves);
    for (; i < n; i++) to[i] = load(from, first + i, halves);
    for (; i < wide; i++) to[i] = 0;
}

/* A text's recurrent states, and what they lack of it (recurrence.c): memory [layers, …]; of the rows that a layer's first product made, history
 * [layers, places, …] holds those that reach into the convolution of the next one the states lack, and behind them, at places [owed], the
 * text's own that they lack. The first `taken` of these and the pass's rows they take in for good; all others they go through on the way.
 * Each line is a way through `rows` rows of the pass, from the `first` on, of which `line_row` holds those of each. */
typedef struct {
    float *memory;
    char *history;
    long places, owed;
    const int64_t *place;
    long taken, lines;
    const int64_t *line_start, *line_row; /* [lines + 1] where a line's rows begin, among all */
    long first, rows;
} walk;

/* Where rows of a pass run (native.Course): they stand at positions; each path has rows that attend through it, and pages that hold the
 * keys of its text in order; and the keys of some rows are written to places of the storage. The first `common` keys of a path are those
 * of the path before it, and are read there: paths with a common beginning follow one another, and are a family. */
typedef struct {
    long rows, paths, writes, page; /* page: tokens that one holds */
    const int64_t *position;              /* [rows] */
    const int64_t *row_start, *page_start; /* [paths + 1] where a path's rows and pages begin, among all */
    const int64_t *row_of, *page_of, *common; /* common: [paths] 0 for the first of a family; whole CHUNKs, as many for all others */
    const int64_t *write_to, *write_from; /* [writes] */
    void *own; /* storage of this course alone, [layers, 2, room, kv_heads, dim], or null: the layers' own */
    long room;
    const uint8_t *sight; /* [rows, seen] 0 where a row does not see a key before its position, or null: it sees all */
    long seen;
    const walk *walks; /* one for each text, of models with recurrent states */
    long walk_count;
} course;

/* One layer's attention: query [rows, heads * group, dim], rows `query_stride` numbers apart; keys and values [places, heads, ...];
 * sinks [heads * group], or null: logits that only normalise; out [rows, heads * group, value_dim]. window: keys a row sees, or 0: all,
 * or, negative, it sees those of its own part of a text that is cut into parts of so many. cap: scores become cap * tanh(score / cap) (Gemma 2, arXiv 2408.00118), or 0: they stay. */
typedef struct {
    const void *query, *keys, *values;
    const float *sinks;
    void *out;
    long query_stride, heads, group, dim, value_dim, window;
    float scaling, cap;
    int halves;
    long out_stride; /* numbers from one row of `out` to the next, or 0: they adjoin */
    int rounded; /* keys and values stand as `round_head` leaves them, beside queries of halves */
} attention;

/* y = x Wᵀ + b: the panels of W [out, in], of numbers of 16, 12, 8 or 4 bits, EIGHT_FLOATS, or FOUR_BY_…; steps [out] of 8 bits, or null;
 * bias [out], or null. Of 12 bits and of floats: spare [n, 2, WIDE] are blocks that the panels cannot hold, those of panel a from
 * spare_start[a] on; spare_at [n + panels]: which of its blocks they are, ended for each panel by a number that none has. */
#define EIGHT_FLOATS -8
#define FOUR_BY_32 -32 /* four bits in groups of so many columns */
#define FOUR_BY_16 -16
typedef struct {
    const uint32_t *panels;
    const float *bias, *steps;
    const int64_t *spare_start, *spare_at;
    const uint32_t *spare;
    long in, out, bits;
} product;

/* Rows that go to different products: those from start[i] to start[i + 1] to the of[i]-th, for each of `count`. */
typedef struct {
    const int64_t *of, *start;
    long count;
} portions;

/* The experts of a layer (Shazeer et al., arXiv 1701.06538): each row goes through `chosen` of `count`, the last `shared` of both always
 * (Dai et al., arXiv 2401.06066). router [count - shared, hidden], of which a softmax or, with by_sigmoid, sigmoids make weights, and one
 * output more, if they are gated: the sigmoid of what the shared ones weigh, else 1. gate_up and down [count] are of one shape. bias
 * [count - shared], or null: what is added for the choice alone; scales [count - shared], or null: what an expert's weights are taken times
 * last. wide: the router's sums stay float32. normed: the weights of those that a row chooses add up to 1, but for `beside`, which is added
 * to their sum first, and are then taken times `factor`; kept: they are rounded to the stream's type. A row chooses among the experts of
 * `within` of the `groups`, of one size each, whose `leading` worthiest experts add up to most (DeepSeek-V2, arXiv 2405.04434); within >=
 * groups: among all. by_logits: they are chosen by logits, not by what these weigh. near: each is chosen among those that are left, and
 * weighs its softmax among those of them whose logits are so near, of their size (arXiv 2409.12136); or 0. before: rows are taken times
 * their weights as they enter an expert, not as they leave it. always: what the shared ones weigh that are not gated. limit: of gates like
 * gpt-oss's, whose gate and up stand side by side; 0: of gates by `act`, or of ups alone. */
typedef struct {
    product router;
    const product *gate_up, *down;
    const float *bias, *scales;
    long count, chosen, shared, groups, within, leading;
    int by_sigmoid, wide, normed, kept, gated, act;
    float factor, alpha, limit, beside;
    int by_logits, before;
    float near, always;
} mixture;

/* Rows on their way through experts, and memory. Of each row's choices, [rows, chosen]: the experts, in `chosen`, their weights, and in
 * `place` where it stands among the rows of all portions, -1: of no expert. read, written, inner: of those rows what products read and
 * write, and what stands between. */
typedef struct {
    int64_t *chosen, *place, *of, *start;
    float *weights;
    char *read, *written, *inner;
    void *room;
    long count;
} journey;

/* Steps of a panel that are not in it, from one on: which they are, rising and ended by one that no panel has, and their words. */
typedef struct {
    const int64_t *at;
    const uint32_t *words;
} spares;

/* part [many, WIDE], or of two panels, `apart` words apart, [many, 2 * WIDE] += x [many, …], `stride` words apart, times `count` steps of
 * a panel from the `first` on; x begins with that step. beside: of each panel, or null. */
typedef void panel_kernel(const uint32_t *panel, long apart, long first, const void *rows, long many, long stride, long count, float *part,
                          const spares *beside);
#define KERNEL(NAME)                                                                                                     \
    static void NAME(const uint32_t *panel, long apart, long first, const void *rows, long many, long stride, long count, float *part,   \
                     const spares *beside)

/* How rows meet panels of a kind: `most` share a reading of one, `most_of_two` of two adjoining ones; a panel has `length` steps of so many
 * `columns` in so many `words`; a row has `apart` words of each step, `stride` in all. `prepare` brings n numbers of x, from the `first`
 * on, into the kernels' form; as_is: rows have it, if they are whole. block: steps after which rows may be cut, 0: never; where a step
 * has no words of its own all rows are, and `stride` is a block's. one [most], two [most_of_two]: kernels by rows. Of more than `direct`
 * rows, where there are kernels for it, `at_once` steps of a panel are opened for all of them, in `lines` of WIDE words a step; `opened`
 * [MOST_OPENED] take `count` opened steps as `one` takes steps, and fetch what is opened next meanwhile: for each line they read, what is
 * `apart` words of beside->words further on. */
typedef struct {
    long most, most_of_two, length, columns, words, apart, stride;
    int as_is;
    long block;
    void (*prepare)(const void *x, long first, long n, int halves, void *to);
    panel_kernel *const *one, *const *two;
    long direct, at_once, lines;
    void (*open)(const uint32_t *panel, long first, long count, spares *left, uint32_t *to);
    panel_kernel *const *opened;
} form;

/* Whether four bytes of a word are multiplied in one instruction, as ARM's processors have it; the tests do it without, too. */
#ifndef TAKES_DOTS
#if defined __ARM_FEATURE_DOTPROD && LANES == 4
#define TAKES_DOTS 1
#else
#define TAKES_DOTS 0
#endif
#endif
#ifdef __x86_64__
#include <immintrin.h>
#elif defined __ARM_FEATURE_DOTPROD
#include <arm_neon.h>
#endif

typedef int16_t signs __attribute__((vector_size(4 * LANES), aligned(4)));

/* Levels meet whole numbers in pairs of columns or, as dots, in fours: then a row has two words of four bytes for these, what its numbers
 * are beyond seven bits and then the seven, which are summed up apart. */
#if TAKES_DOTS
#define PARTS 2
#else
#define PARTS 1
#endif

static inline integers in_all(const integers *parts) { return TAKES_DOTS ? parts[0] * 128 + parts[PARTS - 1] : parts[0]; }

/* sum + two columns of levels, or four, times as many whole numbers of x */
static inline integers plus_products(integers sum, words level, uint32_t x)
{
#if TAKES_DOTS && defined __ARM_FEATURE_DOTPROD && LANES == 4
    return (integers)vdotq_lane_s32((int32x4_t)sum, (int8x16_t)level, (int8x8_t)(uint32x2_t){x}, 0);
#elif TAKES_DOTS
    for (int k = 0; k < 32; k += 8) sum += ((integers)(level << (24 - k)) >> 24) * (int8_t)(x >> k);
    return sum;
#elif LANES == 16 && defined __AVX512VNNI__
    return (integers)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)level, _mm512_set1_epi32((int)x));
#elif LANES == 16 && defined __AVX512BW__
    return sum + (integers)_mm512_madd_epi16((__m512i)level, _mm512_set1_epi32((int)x));
#elif LANES == 8 && defined __AVX2__
    return sum + (integers)_mm256_madd_epi16((__m256i)level, _mm256_set1_epi32((int)x));
#else
    return sum + ((integers)(level << 16) >> 16) * (int16_t)x + ((integers)level >> 16) * (int16_t)(x >> 16);
#endif
}

/* Of words of eight bits what a row's k-th word of two meets. */
static inline words met(words w, int k) { return TAKES_DOTS ? w : (words)(k ? (signs)w >> 8 : (signs)w << 8 >> 8); }

/* What products of eight bits take of each SPAN of a row, and those of four of each GROUP: whole numbers below 2^14 and 2^11 in size times
 * a power of two, which are bfloat16 numbers of at least 2^-6 and 2^-3 of the largest as they are. A SPAN's sums stay below 2^31. */
#define SIZE_OF_EIGHT 14
#define SIZE_OF_FOUR 11

/* n numbers of x, from the `first` on, as whole numbers [wide] below 2^size times *step; zeros behind them. Returns their sum. A step of
 * what is not finite is none, either. */
static inline int32_t in_whole(const void *x, long first, long n, int halves, int size, int32_t *whole, long wide, float *step)
{
    float numbers[SPAN], factor;
    integers most = (integers){0} + (27 << 23), sum = {0}; /* 2^-100: a step of far less would have no inverse */
    int32_t power, inverse;
    widen(x, first, n, halves, numbers, wide);
    for (long k = 0; k < wide; k += LANES) most = GREATER(*(const integers *)(numbers + k) & 0x7fffffff, most); /* in the order of sizes */
    UNROLL for (int half = LANES / 2; half; half /= 2) most = GREATER(most, ACROSS(half, most));
    power = most[0] & 0x7f800000;
    if (power == 0x7f800000) {
        memset(whole, 0, 4 * wide);
        *step = __builtin_nanf("");
        return 0;
    }
    inverse = ((127 + size - 1) << 23) - (power - (127 << 23));
    memcpy(&factor, &inverse, 4);
    for (long k = 0; k < wide; k += LANES) {
        floats near = *(const floats *)(numbers + k) * factor + 12582912.0f; /* adding 1.5 * 2^23 rounds to an integer */
        integers found = (integers)near - 0x4b400000, over = found >> size;
        found -= over & ~(found >> 31); /* 2^size, rounded up */
        *(integers *)(whole + k) = found;
        sum += found;
    }
    power -= (size - 1) << 23;
    memcpy(step, &power, 4);
    UNROLL for (int half = LANES / 2; half; half /= 2) sum += ACROSS(half, sum);
    return sum[0];
}

/* The step of LANES outputs, and what stands for level 0. */
typedef struct {
    floats step, zero;
} levels;

static inline levels levels_of(words both)
{
    floats step = (floats)(both << 16), zero = (floats)(both & 0xffff0000u);
    return (levels){step, zero - 8 * step};
}

/* The same of small groups: the step, float32 but for its last five bits, which are the number that stands for 0. */
static inline levels levels_beside(words both)
{
    floats step = (floats)(both & ~31u);
    return (levels){step, -step * __builtin_convertvector(both & 31, floats)};
}

/* all + what a group adds: the sums of its levels times the whole numbers of x. scales [2]: their step and, times that, their sum. */
static inline floats plus_group(floats all, levels of, integers whole, const float *scales)
{
    all += of.zero * scales[1];
    all += of.step * scales[0] * __builtin_convertvector(whole, floats);
    return all;
}

static inline floats plus_span(floats all, integers whole, float step) { return all + step * __builtin_convertvector(whole, floats); }

/* A norm's weights, or null: there is none. late: they are float32, and what they make is rounded once, behind them. bias: of a norm
 * that is centred, whose weights are float32, too; null: of one that is not. */
typedef struct {
    const void *weight;
    const float *bias;
    float eps;
    int late;
} scale;

/* What an MLP makes of its gates, or of its only product; SIGMOID, SOFTPLUS: of what attention's are gated by. */
enum { SILU, GELU_BY_TANH, GELU, RELU_SQUARED, SIGMOID, SOFTPLUS, RELU };

/* What attention through a latent has beside its first product (latent.c): queries [heads, dim] of their own latent, normed, or, of out 0,
 * none, and the first product makes queries; keys [heads, dim - shared] and behind them values [heads, value_dim] of the other, normed. Of a
 * key `shared` numbers are the same in all heads: those that are turned, if any are. */
typedef struct {
    product queries, keys_values;
    scale of_queries, of_latent;
    long value_dim, shared;
} latent;

/* What a layer with a recurrent state has between its first product and the last (recurrence.c), by one of three rules: the gated DELTA
 * rule, a state SPACE, or SHORT, a convolution alone, whose state is the rows that reach into it. The first product makes queries and keys
 * [key_heads, key_dim], values [value_heads, value_dim], of a SPACE how much of each of value_heads is written, and gates [value_heads,
 * value_dim]; for SHORT values alone, what they are taken times behind the convolution, and before. written_kept: a product beside it,
 * which makes, of DELTA, how much of each of value_heads is written, and how much kept, of each of them `keeps` numbers, one or key_dim.
 * decays, gates: products of low rank, which make how much is kept, and gates, of what the other two made in their place; or of out 0:
 * there are none. taps [reach + 1, channels]: of a convolution over the first three and the rows before, sharp: whose sums are rounded
 * behind silu alone; bias [channels], or null; decay [value_heads], shift [value_heads] or [value_heads, keeps]; coarse: the logarithm of
 * what is kept is rounded; skip [value_heads], of a SPACE: what a value adds to what is seen. of_sight: the norm of what a row sees, of a
 * head, in a SPACE of `groups` parts of all heads, behind the gates. floor, top: of how much a SPACE writes; of a diagonal DELTA, the
 * least logarithm of what is kept, or 0: there is none. share: what is seen of a SPACE, and what DELTA writes, is taken times that.
 * opened_by: gates of DELTA, SILU or SIGMOID. number: which of such layers it is; first: where its numbers begin among those that the
 * first product makes, behind those of attention. */
enum { DELTA, SPACE, SHORT };
typedef struct {
    product written_kept, decays, gates;
    const float *taps, *bias, *decay, *shift, *skip;
    scale of_sight;
    long key_heads, value_heads, key_dim, value_dim, reach, number, groups, first, keeps;
    float floor, top, share;
    int rule, opened_by, sharp, coarse;
} recurrence;

/* What a layer adds last (Gemma 4's): norm(last(act(gate(x)) * side)), of what stands beside each row for this layer. */
typedef struct {
    product gate, last;
    scale of_side;
} side;

/* Norms of a layer whose MLP stands beside its experts (Gemma 4's): norm(mlp; of_mlp) + norm(experts; of_experts) is what both make. The MLP
 * reads the stream by the layer's norm after attention, experts by `before`, and the router norm(x; of_router) times `share`. */
typedef struct {
    scale of_router, before, of_experts, of_mlp;
    float share;
} abreast;

/* What a layer of several streams has beside the others (Gemma 3n's; streams.c): left and right, of rows that attention reads; of_laurel: the
 * norm of what they make. router [STREAMS, hidden] in the stream's type, reads norm(x; of_router) taken times `share`; predict [STREAMS,
 * STREAMS, STREAMS] and correct [STREAMS, STREAMS]: of what each stream is made, by what the router made. by [hidden], in the stream's type:
 * what `side` reads the first stream times. cuts: gates must lie above their mean, by `cut` deviations. */
#define STREAMS 4
typedef struct {
    product left, right;
    scale of_laurel, of_router;
    const void *router, *by;
    const float *predict, *correct;
    float share, cut;
    int cuts;
} altup;

/* What makes the streams beside the first, and what becomes of them behind the layers. */
typedef struct {
    product enter[STREAMS - 1], leave[STREAMS - 1];
} altup_ends;

/* A layer of Llama's block: norms before attention and before the MLP, of what either adds to the stream, and of heads, [heads + kv_heads,
 * dim], each by itself or, as_one, all queries and all keys. of_stream: the layer reads norm(beside; before) and norm(x; of_stream),
 * side by side (EAGLE-3); normed: x itself goes on as the latter. What is added is taken times `share`. sinks [heads], or null. Of a
 * head the first `turned` numbers are turned, by the rope of this number. gate_up: both, one below the other, or up alone: then the MLP is
 * down(act(up(x))). A layer may lack what looks back: then qkv has no outputs, and of o they are all that there is; or its MLP: gate_up has
 * none, and there are no experts. */
typedef struct {
    product qkv, o, gate_up, down;
    scale before, after, of_attention, of_mlp, of_heads, of_stream;
    float scaling, share;
    long heads, kv_heads, dim, turned, rope, window;
    int as_one, normed, act;
    const float *sinks;
    void *keys, *values; /* the layer's storage, [places, kv_heads, dim] */
    const mixture *experts; /* in place of gate_up and down, or null */
    const latent *latent; /* or null: then `qkv` makes queries, keys and values */
    float cap; /* of scores, or 0 */
    int turned_first, parallel; /* heads are normed behind the turn; the MLP reads what the stream was before attention */
    int stretched; /* queries are taken times what stands behind all angles of their rows */
    int opened_by; /* SIGMOID or SOFTPLUS */
    const float *bends; /* of an MLP by xIELU in place of `act`, as block.c has them, or null */
    long openings; /* of what attention gives so many equal parts are taken times that of what `qkv` makes behind values */
    const recurrence *recurrence; /* in place of attention or, a SPACE, beside it: what `o` reads stands behind what that sees; or null */
    const side *side; /* or null */
    const abreast *abreast; /* or null; else gate_up and down stand beside `experts` */
    float factor; /* what the stream leaves with is taken times it, or 0: it is not */
    int borrows, values_normed; /* keys and values are another layer's, in the storage; values are normed as heads are */
    int settles; /* of_attention and of_mlp are norms of the stream, what is added included */
    const altup *altup; /* or null */
    long value_dim; /* of a value's head */
    int rounded; /* its keys and values, in the storage, as `attention` says */
} layer;

/* A pass of the rows of `courses` courses, one after the other, and its memory, for all rows and every layer: what a product reads, what it
 * writes, heads or the MLP's inner numbers; and `room` for products. failed: set where a thread finds no memory. x [rows, hidden];
 * beside [rows, hidden], or null: what a layer with `of_stream` reads, too; cos, sin: rows `angles` numbers apart, sin negative in its first
 * half, those of each rope behind the others'; sharp: they are float32. keep [kept], rising, or null: of layer `last` only these rows
 * are wanted, which x begins with afterwards. */
typedef struct {
    const course *first;
    long courses, rows, angles;
    char *x;
    const char *beside, *cos, *sin;
    int sharp, halves, threads, *failed;
    char *read, *written, *inner, *room;
    const int64_t *keep;
    long kept, last;
    journey *journey; /* of layers with experts, which are all of one shape */
    char *aside; /* what parallel MLPs will read, or those beside experts made; or of each row the first stream predicted, and a LAuReL */
    const char *sides; /* [rows, layers, n], for layers with a `side`, or null */
    long side_stride; /* bytes of a row of it */
    const int64_t *row_of; /* [rows]: which of them is a row's, or null: its own */
    char *streams; /* [rows, STREAMS - 1, hidden], beside x, or null */
} run;

/* How far behind the first rope's a layer's cosines and sines stand, which have as much room each as the first one's. */
static inline long rope_of(const run *p, const layer *l) { return 2 * l->rope * (p->sin - p->cos); }

/* What a row's queries are taken times, where a layer's are: the first number behind all ropes. */
static inline float stretch_of(const run *p, long r)
{
    int early = p->halves && !p->sharp;
    return load(p->cos + size(early) * (r + 1) * p->angles - (p->sin - p->cos), 0, early);
}

/* Heads of a layer's own that are turned. */
static inline long turned_heads(const layer *l) { return l->heads + (l->borrows ? 0 : l->kv_heads); }

/* Whether so many rows of a layer are worth a team. */
static inline int worth_a_team(const layer *l, long rows)
{
    const product *p = l->experts ? l->experts->gate_up : l->gate_up.out ? &l->gate_up : &l->qkv;
    return rows * p->in * p->out > SMALL;
}

void attended(const member *me, const course *c, const attention *a, int *failed);
void keep_heads(const char *from, long heads, long dim, int halves, int rounded, char *to);
void as_span(const void *x, long first, long n, int halves, void *to);
form form_of_whole(int bits, long in);
form form_of_narrow(int bits, long in, int halves);
form form_of_tiles(int bits, long in);
int takes_tiles(void);
void leave_tiles(void);
int stand_in_tiles(const product *p, long rows);
long words_in_tiles(long rows, long in);
void arrange_in_tiles(const member *me, const void *x, long rows, long in, uint32_t *to);
void arrange_whole(const member *me, const form *f, int bits, const void *x, long rows, long in, int halves, uint32_t *to);
void multiply_in_tiles(const product *p, const form *f, const uint32_t *panel, spares left, const uint32_t *x, long rows, long most,
                       uint32_t *room, float *part);
void score_in_tiles(const char *key, long apart, const uint32_t *query, long n, long dim, float *to);
void open_narrow(const uint32_t *panel, long first, long count, spares *left, uint32_t *to);
long room_for(const product *p, long rows, int halves, int threads);
void multiplied(const member *me, const product *p, const void *x, void *room, void *y, long rows, int halves, int adding);
int multiply(const product *p, const void *x, void *y, long rows, int halves, int threads);
long room_for_each(const product *products, long count, long rows, long all, int halves, int threads);
void multiplied_each(const member *me, const product *products, const portions *all, const void *x, long rows, void *room, void *y, int halves);
void gated(const member *me, const void *x, void *y, long rows, long n, int alone, int which, int halves);
void limited(const member *me, const void *x, void *y, long rows, long n, float alpha, float limit, int halves);
long journey_for(journey *j, const mixture *m, long rows, int halves, int threads, char *memory);
void through_experts(const member *me, const mixture *m, const void *x, journey *j, void *y, long rows, int halves, int adding);
void routed(const member *me, const mixture *m, const void *logits, journey *j, long rows, int halves, int stream);
void norm(const void *x, const scale *by, void *y, long outer, long inner, long n, long stride, int halves, int threads);
void norm_of_row(const char *from, const scale *by, char *to, long inner, long n, int halves);
void norm_or_copy(const char *from, const scale *by, char *to, long n, int halves);
void turn_row(const char *from, const void *cos, const void *sin, char *to, long heads, long dim, long turned, int sharp, int halves);
void latent_needs(const run *p, const layer *l, long *read, long *written, long *inner, long *room);
void open_parts(const char *x, char *y, long parts, long n, int which, int halves);
void look_back_through(const member *me, const run *p, const layer *l);
void recurrence_needs(const run *p, const layer *l, long *inner, long *room);
void recall(const member *me, const run *p, const layer *l);
void enlarge(const char *x, float factor, char *y, long n, int halves);
void plus_row(char *x, const char *other, long n, int halves);
void predict(const member *me, const run *p, const layer *l);
void stay(const member *me, const run *p, const layer *l);
void rejoin(const member *me, const run *p, const layer *l, long rows);
void cut_off(const member *me, const run *p, const layer *l, long rows);
void correct(const member *me, const run *p, const layer *l, long rows);
void add_to_others(const member *me, const run *p, const layer *l, long rows);
void come_along(const run *p, long from, long to, long bytes);
void altup_needs(const run *p, const layer *l, long *inner, long *room);
long ends_need(const altup_ends *e, long rows, int halves, int threads);
void branch(const member *me, const run *p, const altup_ends *e, void *room);
void merge(const member *me, const run *p, const altup_ends *e, void *room, const int64_t *keep, long kept);
char *equip(run *p, const layer *layers, long count);
void through(const member *me, const run *p, const layer *l, long number);
int blocks(const layer *layers, long count, const course *first_course, long courses, void *x, const void *beside, const void *cos,
           const void *sin, long angles, int sharp, int halves, int threads, const void *sides, long side_stride, long first_number,
           void *streams);
int law(const void *x, float *y, long rows, long width, float temperature, int halves, int threads);

/* What a request asks of a law (core/host.py): a temperature above 0, top_p, the logarithm of min_p, or -inf, and top_k, or 0. */
typedef struct {
    double temperature, top_p, least;
    long top_k;
} filters;

void narrow(float *law, long rows, long width, const filters *f, int threads);
int best(const float *x, long rows, long size, const uint32_t *keys, const int64_t *names, long k, float *scores, int64_t *columns,
         int threads);

/* Place a score that is among the k best so far: behind its equals. Returns how many there are. */
static inline long placed(float score, long column, long k, long count, float *scores, int64_t *columns)
{
    long at = count < k ? count++ : k - 1;
    for (; at && scores[at - 1] < score; at--) {
        scores[at] = scores[at - 1];
        columns[at] = columns[at - 1];
    }
    scores[at] = score;
    columns[at] = column;
    return count;
}
