/* Vectors of the processor, and of other lengths. 4 * HIGH sums and their operands fit into the registers. */

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define BYTES 64
#define HIGH 4
#define STREAM(to, v) _mm512_stream_si512((void *)(to), (__m512i)(v))
#elif defined(__AVX__)
#define BYTES 32
#define HIGH 2
#define STREAM(to, v) _mm256_stream_si256((void *)(to), (__m256i)(v))
#elif defined(__x86_64__)
#define BYTES 16
#define HIGH 2
#define STREAM(to, v) _mm_stream_si128((void *)(to), (__m128i)(v))
#else
#define BYTES 16
#define HIGH 4
#define STREAM(to, v) store(to, v, LANES)
#endif

#define LANES (BYTES / sizeof(REAL))
#define WIDE 4 /* ranks at a time in P and Q */
#define INLINE static inline __attribute__((always_inline)) /* numbers of rows, columns and ranks become constants */

/* Keep v in a register: gcc may load it again for each use. */
#if defined(__x86_64__)
#define KEEP(v) __asm__("" : "+v"(v))
#else
#define KEEP(v)
#endif

#define WITH_RANKS(ranks, function, ...)                                                                               \
    switch (ranks) {                                                                                                   \
        case 1: function(1, __VA_ARGS__); break;                                                                       \
        case 2: function(2, __VA_ARGS__); break;                                                                       \
        case 3: function(3, __VA_ARGS__); break;                                                                       \
        default: function(WIDE, __VA_ARGS__);                                                                          \
    }

typedef REAL vec __attribute__((vector_size(BYTES)));
typedef REAL quad __attribute__((vector_size(16)));
typedef __typeof__((vec){0} < (vec){0}) mask;

/* Up to LANES numbers; the others are 0. */
INLINE vec load(const REAL *from, size_t count) {
    vec v = {0};
    memcpy(&v, from, count < LANES ? count * sizeof(REAL) : sizeof v);
    return v;
}

INLINE void store(REAL *to, vec v, size_t count) { memcpy(to, &v, count < LANES ? count * sizeof(REAL) : sizeof v); }

/* Of `count` numbers those that are left for vector b. */
INLINE size_t left(size_t count, size_t b) { return count > b * LANES ? count - b * LANES : 0; }

INLINE REAL total(vec v) {
    quad parts[BYTES / 16], sum;
    REAL lanes[16 / sizeof(REAL)], result = 0;
    memcpy(parts, &v, sizeof v);
    sum = parts[0];
    for (size_t c = 1; c < BYTES / 16; c++) sum += parts[c];
    memcpy(lanes, &sum, sizeof sum);
    for (size_t c = 0; c < 16 / sizeof(REAL); c++) result += lanes[c];
    return result;
}
