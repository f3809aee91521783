/* What the kernels share: vectors of the processor's width, and bfloat16. */
#include <stdint.h>
#include <string.h>

#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif
#define UNROLL _Pragma("GCC unroll 6")

typedef float floats __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t words __attribute__((vector_size(4 * LANES), aligned(4)));

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
