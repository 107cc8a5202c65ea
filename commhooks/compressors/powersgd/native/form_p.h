/* delta += factor * residual, and P = delta Q. */

#define TILE (32768 / sizeof(REAL)) /* columns at a time: HIGH rows of delta fit into the second-level cache */

/* Four vectors or less. */
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
    union { double number; uint64_t bits; } found = {0}; /* positive doubles have the order of their bits */
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
