/* PowerSGD's arithmetic for all matrices of a bucket, on the CPU. Compiled once for each REAL: float and double.
 *
 * Layouts: delta and residual n x m; P and Q transposed, r x n and r x m; all contiguous.
 *
 * Traffic: at any rank, seven passes over the gradients. form_p reads delta and residual and writes delta; form_q reads
 * delta; split reads delta and writes residual and gradient. Rows of delta (for the next ranks) and tiles of Q are
 * still in the first- or second-level cache when they are read again, and sums stay in registers.
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

#include "tables.h"
#include "vectors.h"

/* The arguments of a call, for all parts. */
struct call {
    double number; /* the residual's factor, or the least norm of a row that is not missing */
    int orthogonal;
    REAL *scratch;
};

static size_t most(size_t a, size_t b) { return a > b ? a : b; }
static size_t up(size_t a, size_t unit) { return pieces(a, unit) * unit; }

/* A part has about 2^18 elements of delta, and at least 64 rows, so that packing Q for it pays off. */
static size_t part_rows(const struct matrix *x) { return up(most((1 << 18) / x->m, 64), 32); }
static size_t row_parts(const void *row) { return pieces(((struct matrix *)row)->n, part_rows(row)); }

/* Each part has its own sum of Q, an r x m matrix. With 16 r rows or more in a part it is small compared to delta. */
static size_t sum_rows(const struct matrix *x) { return most(part_rows(x), up(16 * x->r, 32)); }
static size_t sum_parts(const void *row) { return pieces(((struct matrix *)row)->n, sum_rows(row)); }
static size_t one_part(const void *row) { return (void)row, 1; }

/* ---- What fits into the registers: 4 * HIGH sums and their operands ---------------------------------------------- */

#if defined(__AVX512F__) || !defined(__x86_64__)
#define HIGH 4
#else
#define HIGH 2
#endif

#define WIDE 4 /* ranks at a time in P and Q */

/* Keep v in a register: otherwise gcc may load it again for each use. */
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

/* How many of `count` numbers remain from vector b on. */
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

/* ---- delta += factor * residual, and P = delta Q ----------------------------------------------------------------- */

#define TILE (32768 / sizeof(REAL)) /* columns at a time: HIGH rows of delta fit into the second-level cache */

/* `add` for up to four vectors. */
INLINE void add_some(size_t count, REAL *delta, const REAL *residual, REAL factor, vec *largest) {
    const mask sign = (mask)-(vec){0};
    for (size_t b = 0; b < 4; b++) {
        vec d = load(delta + b * LANES, left(count, b));
        mask size = (mask)d & ~sign, more = (vec)size > largest[b];
        largest[b] = (vec)((size & more) | ((mask)largest[b] & ~more));
        if (residual) store(delta + b * LANES, d + factor * load(residual + b * LANES, left(count, b)), left(count, b));
    }
}

/* delta += factor * residual (if there is one) for some columns of a row. `largest`: of |delta| before, per lane. */
INLINE void add(size_t columns, REAL *delta, const REAL *residual, REAL factor, vec largest[4]) {
    vec found[4] = {largest[0], largest[1], largest[2], largest[3]};
    for (; columns >= 4 * LANES; columns -= 4 * LANES, delta += 4 * LANES) {
        add_some(4 * LANES, delta, residual, factor, found);
        if (residual) residual += 4 * LANES;
    }
    if (columns) add_some(columns, delta, residual, factor, found);
    for (size_t b = 0; b < 4; b++) largest[b] = found[b];
}

/* x->largest is the maximum over all parts. */
static void note_largest(struct matrix *x, const vec largest[4]) {
    REAL lanes[4 * LANES];
    union { double number; uint64_t bits; } found = {0}; /* positive doubles compare as their bits do */
    uint64_t known = __atomic_load_n(&x->largest, __ATOMIC_RELAXED);
    memcpy(lanes, largest, sizeof lanes);
    for (size_t i = 0; i < 4 * LANES; i++) found.number = lanes[i] > found.number ? lanes[i] : found.number;
    while (found.bits > known &&
           !__atomic_compare_exchange_n(&x->largest, &known, found.bits, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
}

/* sums += delta * Q for `count` columns, at most a vector. */
INLINE void multiply(size_t ranks, size_t rows, size_t count, size_t m, const REAL *delta, const REAL *q,
                     vec sums[HIGH][WIDE]) {
    vec d[HIGH];
    for (size_t t = 0; t < rows; t++) {
        vec own = load(delta + t * m, count);
        KEEP(own);
        d[t] = own;
    }
    for (size_t k = 0; k < ranks; k++) {
        vec column = load(q + k * m, count);
        KEEP(column);
        for (size_t t = 0; t < rows; t++) sums[t][k] += d[t] * column;
    }
}

/* P (+)= delta Q for up to WIDE ranks and up to HIGH rows. */
INLINE void project_rows(size_t ranks, size_t rows, size_t columns, size_t n, size_t m, const REAL *delta,
                         const REAL *q, REAL *p, int first) {
    vec sums[HIGH][WIDE] = {{{0}}};
    size_t j = 0;
    for (; j + LANES <= columns; j += LANES) multiply(ranks, rows, LANES, m, delta + j, q + j, sums);
    if (j < columns) multiply(ranks, rows, columns - j, m, delta + j, q + j, sums);
    for (size_t k = 0; k < ranks; k++)
        for (size_t t = 0; t < rows; t++) p[k * n + t] = (first ? 0 : p[k * n + t]) + total(sums[t][k]);
}

static int form_p(const struct work *work, void *row, size_t part) {
    const struct call *call = work->call;
    const struct matrix x = *(struct matrix *)row;
    size_t m = x.m, begin = part * part_rows(&x), end = least(x.n, begin + part_rows(&x));
    size_t tile = up(pieces(m, pieces(m, TILE)), LANES);
    vec largest[4] = {{0}};
    for (size_t j = 0; j < m; j += tile)
        for (size_t i = begin; i < end; i += HIGH) {
            size_t rows = least(HIGH, end - i), columns = least(tile, m - j);
            for (size_t t = i; t < i + rows; t++)
                add(columns, x.delta + t * m + j, x.residual ? x.residual + t * m + j : NULL, call->number, largest);
            for (size_t k = 0; k < x.r; k += WIDE) {
                const REAL *delta = x.delta + i * m + j, *q = x.q + k * m + j;
                REAL *p = x.p + k * x.n + i;
                if (rows < HIGH)
                    project_rows(least(WIDE, x.r - k), rows, columns, x.n, m, delta, q, p, j == 0);
                else
                    WITH_RANKS(x.r - k, project_rows, HIGH, columns, x.n, m, delta, q, p, j == 0)
            }
        }
    note_largest(row, largest);
    return 0;
}

/* ---- Q = delta^T P ----------------------------------------------------------------------------------------------- */

#define AHEAD (16384 / sizeof(REAL)) /* elements: within the first-level cache */

/* Q (+)= delta^T P for up to WIDE ranks and up to HIGH vectors of columns. `ahead`: distance of the elements to
 * prefetch; 0 if they are in the cache. */
INLINE void project_columns(size_t ranks, size_t columns, size_t rows, size_t n, size_t m, const REAL *delta,
                            const REAL *p, REAL *q, int first, size_t ahead) {
    vec sums[WIDE][HIGH], d[HIGH];
    for (size_t k = 0; k < ranks; k++)
        for (size_t b = 0; b < HIGH; b++) sums[k][b] = first ? (vec){0} : load(q + k * m + b * LANES, left(columns, b));
    for (size_t i = 0; i < rows; i++, delta += m) {
        for (size_t b = 0; b < HIGH; b++) {
            d[b] = load(delta + b * LANES, left(columns, b));
            if (ahead) __builtin_prefetch(delta + ahead + b * LANES);
        }
        for (size_t k = 0; k < ranks; k++)
            for (size_t b = 0; b < HIGH; b++) sums[k][b] += p[k * n + i] * d[b];
    }
    for (size_t k = 0; k < ranks; k++)
        for (size_t b = 0; b < HIGH; b++) store(q + k * m + b * LANES, sums[k][b], left(columns, b));
}

static int form_q(const struct work *work, void *row, size_t part) {
    const struct call *call = work->call;
    const struct matrix x = *(struct matrix *)row;
    size_t m = x.m, begin = part * sum_rows(&x), end = least(x.n, begin + sum_rows(&x));
    /* With few rows at a time delta is read as a stream. With as many rows as ranks, Q is loaded no more often than
     * delta. */
    size_t block = x.r > WIDE ? 32 : x.r, strip = HIGH * LANES;
    size_t ahead = up(most(pieces(AHEAD, m), block), block) * m;
    REAL *sum = part ? call->scratch + x.scratch + (part - 1) * x.r * m : x.q;
    for (size_t i = begin; i < end; i += block) {
        size_t rows = least(block, end - i);
        for (size_t j = 0; j < m; j += strip)
            for (size_t k = 0; k < x.r; k += WIDE) {
                const REAL *delta = x.delta + i * m + j, *p = x.p + k * x.n + i;
                REAL *q = sum + k * m + j;
                if (j + strip > m)
                    project_columns(least(WIDE, x.r - k), m - j, rows, x.n, m, delta, p, q, i == begin, 0);
                else
                    WITH_RANKS(x.r - k, project_columns, HIGH * LANES, rows, x.n, m, delta, p, q, i == begin,
                               k ? 0 : ahead)
            }
    }
    return 0;
}

/* Add the sums of the other parts to Q, in their order. */
static int add_sums(const struct work *work, void *row, size_t part) {
    const struct call *call = work->call;
    const struct matrix x = *(struct matrix *)row;
    const REAL *restrict sum = call->scratch + x.scratch;
    REAL *restrict q = x.q;
    for (part = 1; part < sum_parts(row); part++, sum += x.r * x.m)
        for (size_t j = 0; j < x.r * x.m; j++) q[j] += sum[j];
    return 0;
}

/* ---- residual = delta - P Q^T, and then the gradient: delta = P mean_Q^T ----------------------------------------- */

#define PAIR (2 * LANES)  /* columns at a time */
#define TALL (2 * HIGH)   /* rows at a time */
#define TILES 16384       /* elements at a time of each Q: both fit into the second-level cache */

/* Pack a factor (r x stride) in the order in which low_rank reads it: [length / unit][r][unit], padded with zeros. */
INLINE void pack(size_t unit, size_t r, size_t length, size_t stride, REAL sign, const REAL *from, REAL *restrict to) {
    for (size_t j = 0; from && j < length; j += unit)
        for (size_t k = 0; k < r; k++, to += unit)
            if (j + unit <= length)
                for (size_t c = 0; c < unit; c++) to[c] = sign * from[k * stride + j + c];
            else
                for (size_t c = 0; c < unit; c++) to[c] = j + c < length ? sign * from[k * stride + j + c] : 0;
}

/* out = in + P Q^T for up to TALL rows and PAIR columns, with packed factors; in: NULL for zeros. `stream`: with
 * STREAM. */
INLINE void low_rank(size_t r, size_t rows, size_t columns, size_t m, const REAL *in, REAL *out, const REAL *p,
                     const REAL *q, int stream) {
    vec sums[TALL][2];
    for (size_t t = 0; t < rows; t++)
        for (size_t b = 0; b < 2; b++) sums[t][b] = in ? load(in + t * m + b * LANES, left(columns, b)) : (vec){0};
    for (size_t k = 0; k < r; k++, p += TALL, q += PAIR)
        for (size_t b = 0; b < 2; b++) {
            vec column = load(q + b * LANES, LANES);
            KEEP(column);
            for (size_t t = 0; t < rows; t++) sums[t][b] += p[t] * column;
        }
    for (size_t t = 0; t < rows; t++)
        for (size_t b = 0; b < 2; b++)
            if (stream) STREAM(out + t * m + b * LANES, sums[t][b]);
            else store(out + t * m + b * LANES, sums[t][b], left(columns, b));
}

static int split(const struct work *work, void *row, size_t part) {
    const struct matrix x = *(struct matrix *)row;
    size_t m = x.m, r = x.r, begin = part * part_rows(&x), end = least(x.n, begin + part_rows(&x));
    size_t tile = most(TILES / r / PAIR, 1) * PAIR, high = r * up(end - begin, TALL), wide = r * tile;
    REAL *minus_p = malloc((2 * high + 2 * wide) * sizeof(REAL)), *p = minus_p + high, *q = p + high, *mean_q = q + wide;
    int aligned = ((uintptr_t)x.residual | m * sizeof(REAL)) % BYTES == 0;
    (void)work;
    if (!minus_p) return -1;
    pack(TALL, r, end - begin, x.n, -1, x.p + begin, minus_p);
    pack(TALL, r, end - begin, x.n, 1, x.p + begin, p);
    for (size_t first = 0; first < m; first += tile) {
        size_t last = least(m, first + tile);
        pack(PAIR, r, last - first, m, 1, x.q + first, q);
        pack(PAIR, r, last - first, m, 1, x.mean_q ? x.mean_q + first : NULL, mean_q);
        for (size_t i = begin; i < end; i += TALL)
            for (size_t j = first; j < last; j += PAIR) {
                REAL *delta = x.delta + i * m + j, *residual = x.residual ? x.residual + i * m + j : NULL;
                const REAL *own_minus_p = minus_p + (i - begin) * r, *own_p = p + (i - begin) * r;
                const REAL *own_q = q + (j - first) * r, *own_mean_q = mean_q + (j - first) * r;
                size_t rows = least(TALL, end - i), columns = least(PAIR, m - j);
                if (rows < TALL || columns < PAIR) {
                    if (residual) low_rank(r, rows, columns, m, delta, residual, own_minus_p, own_q, 0);
                    if (x.mean_q) low_rank(r, rows, columns, m, NULL, delta, own_p, own_mean_q, 0);
                    continue;
                }
                for (size_t t = TALL; t < 2 * TALL; t++) /* the next rows */
                    for (size_t c = 0; c < PAIR; c += LANES) __builtin_prefetch(delta + t * m + c, 1);
                if (residual && aligned) low_rank(r, TALL, PAIR, m, delta, residual, own_minus_p, own_q, 1);
                else if (residual) low_rank(r, TALL, PAIR, m, delta, residual, own_minus_p, own_q, 0);
                if (x.mean_q) low_rank(r, TALL, PAIR, m, NULL, delta, own_p, own_mean_q, 0);
            }
    }
    free(minus_p);
    streamed();
    return 0;
}

/* ---- Rows of norm 1, and orthonormal rows, in double ------------------------------------------------------------- */

typedef double dvec __attribute__((vector_size(BYTES)));
#define DLANES (BYTES / sizeof(double))
INLINE dvec dload(const double *from) { dvec v; memcpy(&v, from, sizeof v); return v; }

/* shares[e] = a . rows[e], for four rows. */
static void dots(const double *a, const double *const *rows, size_t k, double *shares) {
    dvec sums[4] = {{0}};
    size_t j = 0;
    for (; j + DLANES <= k; j += DLANES)
        for (size_t e = 0; e < 4; e++) sums[e] += dload(a + j) * dload(rows[e] + j);
    for (size_t e = 0; e < 4; e++) {
        shares[e] = 0;
        for (size_t lane = 0; lane < DLANES; lane++) shares[e] += sums[e][lane];
        for (size_t i = j; i < k; i++) shares[e] += a[i] * rows[e][i];
    }
}

/* Subtract from v its components along `count` orthonormal rows (up to 4). */
static void subtract(double *restrict v, const double *rows, size_t count, size_t k) {
    const double *row[4];
    double shares[4];
    for (size_t e = 0; e < 4; e++) row[e] = rows + (e < count ? e : 0) * k;
    dots(v, row, k, shares);
    for (size_t e = count; e < 4; e++) shares[e] = 0;
    for (size_t j = 0; j < k; j++)
        v[j] -= (shares[0] * row[0][j] + shares[1] * row[1][j]) + (shares[2] * row[2][j] + shares[3] * row[3][j]);
}

/* Scale v to norm 1 and return its previous norm; a zero v stays zero. */
static double normalise(double *v, size_t k) {
    dvec sums[4] = {{0}};
    double square = 0, scale;
    size_t j = 0;
    for (; j + 4 * DLANES <= k; j += 4 * DLANES)
        for (size_t b = 0; b < 4; b++) sums[b] += dload(v + j + b * DLANES) * dload(v + j + b * DLANES);
    sums[0] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    for (size_t lane = 0; lane < DLANES; lane++) square += sums[0][lane];
    for (; j < k; j++) square += v[j] * v[j];
    scale = square > 0 ? 1 / __builtin_sqrt(square) : 0;
    for (j = 0; j < k; j++) v[j] *= scale;
    return __builtin_sqrt(square);
}

/* v = source, scaled to norm 1. Return 0 if source is zero, otherwise 1. Non-finite numbers count as zero. */
static double read_row(const REAL *source, double *v, size_t k) {
    double largest = 0;
    for (size_t j = 0; j < k; j++) v[j] = __builtin_isfinite(source[j]) ? source[j] : 0;
    if (sizeof(REAL) == sizeof(double)) { /* the square of a double may overflow; the square of a float cannot */
        for (size_t j = 0; j < k; j++) largest = __builtin_fabs(v[j]) > largest ? __builtin_fabs(v[j]) : largest;
        for (size_t j = 0; largest > 0 && j < k; j++) v[j] /= largest;
    }
    return normalise(v, k) > 0;
}

/* Scale rows to norm 1; with call->orthogonal orthonormalise them by Gram-Schmidt, done twice. A row is missing if at
 * most call->number of its norm is independent of the rows before it; the row of `refill` replaces it. */
static int unit_rows(const struct work *work, void *row, size_t part) {
    const struct call *call = work->call;
    struct factor *x = row;
    size_t k = x->k;
    double *rows = malloc((call->orthogonal ? x->r : 1) * k * sizeof(double));
    (void)part;
    if (!rows) return -1;
    x->missing = 0;
    for (size_t i = 0; i < x->r; i++) {
        const REAL *sources[2] = {x->source, x->refill};
        double *v = call->orthogonal ? rows + i * k : rows, norm = 0;
        for (int s = 0; s < 2 && sources[s] && norm <= call->number; s++) {
            norm = read_row(sources[s] + i * k, v, k);
            if (!call->orthogonal || i == 0) continue;
            for (int twice = 0; twice < 2; twice++)
                for (size_t e = 0; e < i; e += 4) subtract(v, rows + e * k, least(4, i - e), k);
            norm = normalise(v, k);
        }
        x->missing += norm <= call->number;
        for (size_t j = 0; j < k; j++) x->to[i * k + j] = v[j];
    }
    free(rows);
    return 0;
}

/* The functions that Python calls. They return 0, or -1 if memory runs out after some matrices are done. */

/* delta += factor * residual where there is one; P = delta Q; largest = max |delta| before, without NaN. */
int EXPORT(form_p)(start_team *start, unsigned threads, size_t count, struct matrix *table, double factor) {
    struct call call = {.number = factor};
    struct work work = {.run = form_p, .parts = row_parts, .table = table, .count = count, .call = &call};
    for (size_t i = 0; i < count; i++) table[i].largest = 0;
    return share(start, threads, sizeof *table, &work);
}

/* Q = delta^T P. */
int EXPORT(form_q)(start_team *start, unsigned threads, size_t count, struct matrix *table) {
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
int EXPORT(split)(start_team *start, unsigned threads, size_t count, struct matrix *table) {
    struct work work = {.run = split, .parts = row_parts, .table = table, .count = count};
    return share(start, threads, sizeof *table, &work);
}

/* Scale rows to norm 1; with `orthogonal` orthonormalise them. */
int EXPORT(unit_rows)(start_team *start, unsigned threads, size_t count, struct factor *table, int orthogonal,
                        double least_norm) {
    struct call call = {.number = least_norm, .orthogonal = orthogonal};
    struct work work = {.run = unit_rows, .parts = one_part, .table = table, .count = count, .call = &call};
    return share(start, threads, sizeof *table, &work);
}
