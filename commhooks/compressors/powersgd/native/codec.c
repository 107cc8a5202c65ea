/* The low-rank codec for all matrices of a bucket, on the CPU. Compiled once for each REAL: float and double.
 *
 * Notation and layouts as in codec.py: delta and residual n x m; P and Q transposed, r x n and r x m; all contiguous.
 *
 * Traffic: at any rank, seven passes over the gradients. form_p reads delta and residual and writes delta; form_q reads
 * delta; split reads delta and writes residual and gradient. What is needed again (rows of delta, for the next ranks;
 * tiles of Q) is still in the first- or second-level cache then, and sums stay in registers.
 *
 * Threads: matrices are cut into parts, and each thread of a team takes one part after another. The parts and the order
 * of every sum depend on n, m and r only, so the number of threads changes no bit.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifndef REAL
#define REAL float
#endif

#include "threads.h"
#include "vectors.h"

#include "registers.h"
#include "tables.h"

#include "form_p.h"
#include "form_q.h"
#include "split.h"
#include "unit_rows.h"

/* What native_products.py calls. The result is 0, or -1 if there is no memory; then the matrices may be half done. */

/* delta += factor * residual where there is one; P = delta Q; largest = max |delta| before, without NaN. */
int commhooks_form_p(start_team *start, unsigned threads, size_t count, struct matrix *table, double factor) {
    struct call call = {.number = factor};
    struct work work = {.run = form_p, .parts = row_parts, .table = table, .count = count, .call = &call};
    for (size_t i = 0; i < count; i++) table[i].largest = 0;
    return share(start, threads, sizeof *table, &work);
}

/* Q = delta^T P. */
int commhooks_form_q(start_team *start, unsigned threads, size_t count, struct matrix *table) {
    struct call call = {0};
    struct work work = {.run = form_q, .parts = sum_parts, .table = table, .count = count, .call = &call};
    size_t size = 1;
    for (size_t i = 0; i < count; i++) {
        table[i].scratch = size;
        size += (sum_parts(table + i) - 1) * table[i].r * table[i].m;
    }
    if (!(call.scratch = malloc(size * sizeof(REAL)))) return -1;
    share(start, threads, sizeof *table, &work);
    work.run = add_sums, work.parts = one_part;
    share(start, threads, sizeof *table, &work);
    free(call.scratch);
    return 0;
}

/* residual = delta - P Q^T unless residual is NULL, then delta = P mean_Q^T unless mean_q is NULL. */
int commhooks_split(start_team *start, unsigned threads, size_t count, struct matrix *table) {
    struct work work = {.run = split, .parts = row_parts, .table = table, .count = count};
    return share(start, threads, sizeof *table, &work);
}

/* Rows of norm 1, with `orthogonal` also orthogonal; see unit_rows.h. */
int commhooks_unit_rows(start_team *start, unsigned threads, size_t count, struct factor *table, int orthogonal,
                        double least_norm) {
    struct call call = {.number = least_norm, .orthogonal = orthogonal};
    struct work work = {.run = unit_rows, .parts = one_part, .table = table, .count = count, .call = &call};
    return share(start, threads, sizeof *table, &work);
}
