/* The quantised all-reduce's work on blocks, on the CPU. Compiled once for each REAL: float and double.
 *
 * Every operation and its order are those of blocks.py and torch_kernel.py, without joined multiplications and
 * additions (-ffp-contract=off): not one bit differs. Loops over a block are plain, for the compiler to vectorise; a
 * block is still in the first cache from one loop to the next.
 *
 * Traffic: six passes over the gradients, and two over their codes. quantise reads gradient and residual and writes into
 * the bucket what is lost, and the codes; dequantise reads these and writes residual and gradient.
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

#include "threads.h"
#include "vectors.h"

#include "pieces.h"
#include "codes.h"

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

/* What native_blocks.py calls. */

/* Replace what is in the bucket by delta = gradient + factor * residual, and that by what its rounding loses; write
 * codes and scales.
 *
 * ranks, rank: delta is divided by `ranks` first, then what has arrived from all ranks but `rank` is added, divided
 * likewise, and what is lost is multiplied by `ranks`. 1 and 0: nothing has arrived. stride: bytes from what arrived
 * from one rank to what arrived from the next. most: the largest scale. */
int commhooks_quantise(start_team *start, unsigned threads, size_t count, struct piece *table, int bits, double most,
                       double factor, size_t ranks, size_t rank, size_t stride) {
    struct call call = {bits, most, factor, ranks, rank, stride};
    struct work work = {.run = quantise, .parts = parts, .table = table, .count = count, .call = &call};
    return share(start, threads, sizeof *table, &work);
}

/* Move what is in the bucket to the residual, unless that is NULL, and write codes * scales, of what has arrived, into
 * the bucket. */
int commhooks_dequantise(start_team *start, unsigned threads, size_t count, struct piece *table, int bits) {
    struct call call = {.bits = bits};
    struct work work = {.run = dequantise, .parts = parts, .table = table, .count = count, .call = &call};
    return share(start, threads, sizeof *table, &work);
}
