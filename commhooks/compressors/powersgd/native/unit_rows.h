/* Rows of norm 1, and orthonormal rows, in double. */

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

/* Scale v to norm 1 and return its norm before; a zero v stays zero. */
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

/* v = source, scaled to norm 1; returns 0 if it is zero, otherwise 1. Non-finite numbers count as zero. */
static double read_row(const REAL *source, double *v, size_t k) {
    double largest = 0;
    for (size_t j = 0; j < k; j++) v[j] = __builtin_isfinite(source[j]) ? source[j] : 0;
    if (sizeof(REAL) == sizeof(double)) { /* squares may overflow, other than those of float */
        for (size_t j = 0; j < k; j++) largest = __builtin_fabs(v[j]) > largest ? __builtin_fabs(v[j]) : largest;
        for (size_t j = 0; largest > 0 && j < k; j++) v[j] /= largest;
    }
    return normalise(v, k) > 0;
}

/* With call->orthogonal by Gram-Schmidt, done twice. A row is missing if at most call->number of its norm is independent
 * of the rows before it; that of `refill` takes its place. */
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
