/* The numbers of one block, and their codes and scale: see blocks.py. */

#define IS_FLOAT (sizeof(REAL) == sizeof(float))
#define RINT(x) (IS_FLOAT ? __builtin_rintf(x) : __builtin_rint(x))
#define LARGEST (IS_FLOAT ? FLT_MAX : DBL_MAX)
#define TINY (IS_FLOAT ? FLT_MIN : DBL_MIN)

typedef __typeof__(__builtin_choose_expr(IS_FLOAT, (int32_t)0, (int64_t)0)) integer; /* of the size of REAL */

INLINE void add(REAL *restrict delta, const REAL *restrict residual, REAL factor, size_t n) {
    for (size_t i = 0; i < n; i++) delta[i] = factor * residual[i] + delta[i];
}

INLINE void divide(REAL *delta, REAL by, size_t n) {
    for (size_t i = 0; i < n; i++) delta[i] /= by;
}

INLINE void multiply(REAL *delta, REAL by, size_t n) {
    for (size_t i = 0; i < n; i++) delta[i] *= by;
}

/* to = from, past the caches. */
INLINE void move(REAL *restrict to, const REAL *restrict from, size_t n) {
    size_t i = 0;
    if ((uintptr_t)to % BYTES == 0)
        for (; i + LANES <= n; i += LANES) STREAM(to + i, load(from + i, LANES));
    for (; i < n; i++) to[i] = from[i];
}

/* The largest |x|; inf or NaN if one of them is not finite. Without the sign, the bits are in the order of the numbers,
 * and those of inf and NaN come last. */
INLINE REAL largest(const REAL *delta, size_t n) {
    integer found = 0;
    REAL number;
    for (size_t i = 0; i < n; i++) {
        integer own;
        memcpy(&own, delta + i, sizeof own);
        own &= IS_FLOAT ? INT32_MAX : INT64_MAX;
        found = own > found ? own : found;
    }
    memcpy(&number, &found, sizeof number);
    return number;
}

INLINE REAL scale_of(REAL largest, const struct call *call) {
    REAL scale = largest / (call->bits == 8 ? 127 : 7);
    if (!(largest <= LARGEST)) return __builtin_nan(""); /* inf or NaN */
    if (scale > call->most) scale = call->most;
    return scale < TINY ? 0 : scale;
}

/* Codes of n numbers, of which remains what is lost. to (|)= (code + offset) << shift. */
INLINE void encode_some(REAL *restrict delta, uint8_t *restrict to, REAL scale, size_t n, int levels, int offset,
                        int shift) {
    REAL divisor = scale == 0 ? 1 : scale, top = levels;
    for (size_t i = 0; i < n; i++) {
        REAL whole = delta[i] / divisor;
        whole = whole < top ? whole : top; /* NaN, too, so that it has a code */
        whole = RINT(whole > -top ? whole : -top);
        delta[i] = delta[i] - whole * scale;
        to[i] = (shift ? to[i] : 0) | (uint8_t)((unsigned)((int)whole + offset) << shift);
    }
}

INLINE void encode(REAL *delta, uint8_t *codes, REAL scale, size_t n, size_t block, int width) {
    size_t half = block / 2;
    if (width == 8) {
        encode_some(delta, codes, scale, n, 127, 0, 0);
        return;
    }
    encode_some(delta, codes, scale, least(n, half), 7, 8, 0);
    if (n > half) encode_some(delta + half, codes, scale, n - half, 7, 8, 4);
    for (size_t i = n; i < block; i++) /* a block that is not full goes on with zeros, which torch decodes */
        codes[i % half] = i < half ? 8 : (codes[i % half] & 15) | 8 << 4;
}

/* to (+)= code * scale */
INLINE void decode_some(REAL *restrict to, const uint8_t *restrict codes, REAL scale, size_t n, int width, int shift,
                        int sum) {
    for (size_t i = 0; i < n; i++) {
        int code = width == 8 ? (int8_t)codes[i] : (codes[i] >> shift & 15) - 8;
        to[i] = sum ? to[i] + code * scale : code * scale;
    }
}

INLINE void decode(REAL *to, const uint8_t *codes, REAL scale, size_t n, size_t block, int width, int sum) {
    size_t half = block / 2;
    if (width == 8) {
        decode_some(to, codes, scale, n, 8, 0, sum);
        return;
    }
    decode_some(to, codes, scale, least(n, half), 4, 0, sum);
    if (n > half) decode_some(to + half, codes, scale, n - half, 4, 4, sum);
}
