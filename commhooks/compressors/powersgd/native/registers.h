/* How much the registers hold: 4 * HIGH sums and their operands fit into them. */

#if defined(__AVX512F__) || !defined(__x86_64__)
#define HIGH 4
#else
#define HIGH 2
#endif

#define WIDE 4 /* ranks at a time in P and Q */

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

typedef REAL quad __attribute__((vector_size(16)));

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
