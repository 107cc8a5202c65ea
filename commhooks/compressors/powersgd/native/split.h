/* residual = delta - P Q^T, and then the gradient: delta = P mean_Q^T. */

#define PAIR (2 * LANES)  /* columns at a time */
#define TALL (2 * HIGH)   /* rows at a time */
#define TILES 16384       /* elements at a time of each Q: both fit into the second-level cache */

/* Factors in the order in which low_rank reads them: [length / unit][r][unit], filled up with zeros. from: r x stride */
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
