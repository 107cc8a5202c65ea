/* Vectors of the processor's length, and loads and stores of fewer numbers. */

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* STREAM writes past the caches, so that the old contents need not be read first. */
#if defined(__AVX512F__)
#define BYTES 64
#define STREAM(to, v) _mm512_stream_si512((void *)(to), (__m512i)(v))
#elif defined(__AVX__)
#define BYTES 32
#define STREAM(to, v) _mm256_stream_si256((void *)(to), (__m256i)(v))
#elif defined(__x86_64__)
#define BYTES 16
#define STREAM(to, v) _mm_stream_si128((void *)(to), (__m128i)(v))
#else
#define BYTES 16
#define STREAM(to, v) store(to, v, LANES)
#endif

#define LANES (BYTES / sizeof(REAL))
#define INLINE static inline __attribute__((always_inline)) /* so that constant arguments are propagated */

typedef REAL vec __attribute__((vector_size(BYTES)));
typedef __typeof__((vec){0} < (vec){0}) mask;

/* Load up to LANES numbers; the other lanes are 0. */
INLINE vec load(const REAL *from, size_t count) {
    vec v = {0};
    memcpy(&v, from, count < LANES ? count * sizeof(REAL) : sizeof v);
    return v;
}

INLINE void store(REAL *to, vec v, size_t count) { memcpy(to, &v, count < LANES ? count * sizeof(REAL) : sizeof v); }

/* Call this before other threads read what STREAM has written. */
INLINE void streamed(void) {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}
