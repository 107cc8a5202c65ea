/* Q = delta^T P. */

#define AHEAD (16384 / sizeof(REAL)) /* elements: within the first-level cache */

/* Q (+)= delta^T P for up to WIDE ranks and up to HIGH vectors of columns. `ahead`: so far ahead lies what is needed
 * next; 0 if that is loaded already. */
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
    /* Few rows are read like a stream, and as many as there are ranks cost no more loads of Q than of delta. */
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
