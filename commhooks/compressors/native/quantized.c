/* The arithmetic of the quantised all-reduce on blocks, on the CPU. Compiled once for each REAL: float and double.
 *
 * The operations and their order are the same as with torch in quantized/kernels.py, without contracted multiplications
 * and additions (-ffp-contract=off), so the bits are equal. Loops over a block are plain, so that the compiler can
 * vectorise them; a block is still in the first-level cache from one loop to the next.
 *
 * Traffic: six passes over the gradients, and two over their codes. quantise reads gradient and residual, and writes
 * codes, and rounding errors into the bucket. dequantise reads both, and writes residual and gradient.
 *
 * Threads: pieces are cut into parts of whole blocks, and each thread of a team takes one part after another. Blocks do
 * not depend on each other, so the number of threads changes no bit.
 */
#include <float.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifndef REAL
#define REAL float
#endif

#include "tables.h"
#include "vectors.h"

struct call {
    int bits; /* 8, or 4: two codes in a byte, elements i and i + block / 2 */
    REAL most, factor;
    size_t ranks, rank, stride;
};

static size_t block_numel(const struct piece *x, size_t b) { return least(x->block, x->numel - b * x->block); }
static size_t code_bytes(size_t numel, int bits) { return bits == 8 ? numel : numel / 2; }

/* A part has about 2^16 elements. */
static size_t part_blocks(const struct piece *x) { return pieces(1 << 16, x->block); }
static size_t parts(const void *row) {
    const struct piece *x = row;
    return pieces(x->numel, x->block * part_blocks(x));
}
static size_t last_block(const struct piece *x, size_t part) {
    return least(pieces(x->numel, x->block), (part + 1) * part_blocks(x));
}

/* ---- one block: numbers, codes, scale ------------------------------------------------------------------------------- */

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

/* The largest |x|; inf or NaN if one of them is not finite. Without the sign, the bits have the order of the numbers,
 * with inf and NaN last. */
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

/* Write the codes of n numbers, and replace the numbers by their rounding errors. to (|)= (code + offset) << shift. */
INLINE void encode_some(REAL *restrict delta, uint8_t *restrict to, REAL scale, size_t n, int levels, int offset,
                        int shift) {
    REAL divisor = scale == 0 ? 1 : scale, top = levels;
    for (size_t i = 0; i < n; i++) {
        REAL whole = delta[i] / divisor;
        whole = whole < top ? whole : top; /* also turns NaN into top, so that it has a code */
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
    for (size_t i = n; i < block; i++) /* pad a block that is not full with codes of zero, which torch decodes */
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

static int quantise(const struct work *work, void *row, size_t part) {
    const struct call *call = work->call;
    const struct piece *x = row;
    for (size_t b = part * part_blocks(x); b < last_block(x, part); b++) {
        size_t n = block_numel(x, b);
        REAL *delta = x->bucket + b * x->block, scale;
        if (x->residual) add(delta, x->residual + b * x->block, call->factor, n);
        if (call->ranks > 1) divide(delta, call->ranks, n);
        for (size_t rank = 0; rank < call->ranks; rank++) {
            const char *codes = (char *)(x->arrived_codes + b * code_bytes(x->block, call->bits)) + rank * call->stride;
            const char *scales = (char *)(x->arrived_scales + b) + rank * call->stride;
            if (rank != call->rank)
                decode(delta, (uint8_t *)codes, *(REAL *)scales / call->ranks, n, x->block, call->bits, 1);
        }
        x->scales[b] = scale = scale_of(largest(delta, n), call);
        encode(delta, x->codes + b * code_bytes(x->block, call->bits), scale, n, x->block, call->bits);
        if (call->ranks > 1) multiply(delta, call->ranks, n);
    }
    return 0;
}

static int dequantise(const struct work *work, void *row, size_t part) {
    const struct call *call = work->call;
    const struct piece *x = row;
    for (size_t b = part * part_blocks(x); b < last_block(x, part); b++) {
        size_t n = block_numel(x, b);
        REAL *bucket = x->bucket + b * x->block;
        if (x->residual) move(x->residual + b * x->block, bucket, n);
        const uint8_t *codes = x->arrived_codes + b * code_bytes(x->block, call->bits);
        decode(bucket, codes, x->arrived_scales[b], n, x->block, call->bits, 0);
    }
    streamed();
    return 0;
}

static int add_dequantised(const struct work *work, void *row, size_t part) {
    const struct call *call = work->call;
    const struct piece *x = row;
    for (size_t b = part * part_blocks(x); b < last_block(x, part); b++) {
        const uint8_t *codes = x->arrived_codes + b * code_bytes(x->block, call->bits);
        decode(x->bucket + b * x->block, codes, x->arrived_scales[b], block_numel(x, b), x->block, call->bits, 1);
    }
    return 0;
}

/* The functions that Python calls. */

/* Replace the gradient in the bucket by the rounding error of delta = gradient + factor * residual; write codes and
 * scales.
 *
 * ranks, rank: divide delta by `ranks`, add the messages of all ranks but `rank`, also divided, and multiply the
 * rounding error by `ranks`. With 1 and 0 there are no messages. stride: bytes from one rank's message to the next.
 * most: the largest scale. */
int EXPORT(quantise)(start_team *start, unsigned threads, size_t count, struct piece *table, int bits, double most,
                       double factor, size_t ranks, size_t rank, size_t stride) {
    struct call call = {bits, most, factor, ranks, rank, stride};
    struct work work = {.run = quantise, .parts = parts, .table = table, .count = count, .call = &call};
    return share(start, threads, sizeof *table, &work);
}

/* Move the rounding error from the bucket to the residual, unless residual is NULL, and write the received
 * codes * scales into the bucket. */
int EXPORT(dequantise)(start_team *start, unsigned threads, size_t count, struct piece *table, int bits) {
    struct call call = {.bits = bits};
    struct work work = {.run = dequantise, .parts = parts, .table = table, .count = count, .call = &call};
    return share(start, threads, sizeof *table, &work);
}

/* Add the received codes * scales to the numbers in the bucket. */
int EXPORT(add_dequantised)(start_team *start, unsigned threads, size_t count, struct piece *table, int bits) {
    struct call call = {.bits = bits};
    struct work work = {.run = add_dequantised, .parts = parts, .table = table, .count = count, .call = &call};
    return share(start, threads, sizeof *table, &work);
}
