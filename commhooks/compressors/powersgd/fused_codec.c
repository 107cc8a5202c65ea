/* The passes of the low-rank codec over a matrix, fused: each reads delta once, where codec.py reads it several times.
 *
 * Notation and layouts as in codec.py: delta and residual n x m; P and Q transposed, r x n and r x m; all float32 and
 * contiguous. A factor is processed in groups of up to four rows, which fit into registers; delta is still in the cache
 * when the next group needs it. One thread. The order of each sum depends on n, m and r only.
 */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#define WIDTH 16
#elif defined(__AVX2__)
#define WIDTH 8
#else
#define WIDTH 4
#endif
#define COLUMNS 1024  /* of Q per block: a group of rows of Q fits into the L1 cache */
#define ROWS(m) (65536 / (m) + 1)  /* of delta per block: they fit into the L2 cache */

typedef float vec __attribute__((vector_size(4 * WIDTH)));
typedef double dvec __attribute__((vector_size(4 * WIDTH)));

static inline vec load(const float *from) { vec v; memcpy(&v, from, sizeof v); return v; }
static inline void store(float *to, vec v) { memcpy(to, &v, sizeof v); }

static inline float total(vec v) {
    float sum = 0;
    for (int lane = 0; lane < WIDTH; lane++) sum += v[lane];
    return sum;
}

/* delta += factor * residual (if there is one); P = delta Q for R columns of P. */
#define ADD_AND_PROJECT(R)                                                                                             \
    static void add_and_project_##R(size_t rows, size_t n, size_t m, float *restrict delta,                            \
                                    const float *restrict residual, float factor, const float *restrict q,             \
                                    float *restrict p) {                                                               \
        for (size_t i = 0; i < rows; i++, delta += m) {                                                                \
            vec sums[R];                                                                                               \
            float rest[R];                                                                                             \
            size_t j = 0;                                                                                              \
            for (int k = 0; k < R; k++) sums[k] = (vec){0};                                                            \
            for (; j + WIDTH <= m; j += WIDTH) {                                                                       \
                vec d = load(delta + j);                                                                               \
                if (residual) store(delta + j, d += factor * load(residual + i * m + j));                              \
                for (int k = 0; k < R; k++) sums[k] += d * load(q + k * m + j);                                        \
            }                                                                                                          \
            for (int k = 0; k < R; k++) rest[k] = total(sums[k]);                                                      \
            for (; j < m; j++) {                                                                                       \
                if (residual) delta[j] += factor * residual[i * m + j];                                                \
                for (int k = 0; k < R; k++) rest[k] += delta[j] * q[k * m + j];                                        \
            }                                                                                                          \
            for (int k = 0; k < R; k++) p[k * n + i] = rest[k];                                                        \
        }                                                                                                              \
    }

/* Q += delta^T P for R columns of Q and `columns` of its rows. */
#define PROJECT_Q(R)                                                                                                   \
    static void project_q_##R(size_t rows, size_t columns, size_t n, size_t m, const float *restrict delta,            \
                              const float *restrict p, float *restrict q) {                                            \
        size_t i = 0;                                                                                                  \
        for (; i + 8 <= rows; i += 8, delta += 8 * m) {                                                                \
            size_t j = 0;                                                                                              \
            for (; j + WIDTH <= columns; j += WIDTH) {                                                                 \
                vec d[8];                                                                                              \
                for (int t = 0; t < 8; t++) d[t] = load(delta + t * m + j);                                            \
                for (int k = 0; k < R; k++) {                                                                          \
                    const float *s = p + k * n + i;                                                                    \
                    vec low = d[0] * s[0] + d[1] * s[1] + d[2] * s[2] + d[3] * s[3];                                   \
                    vec high = d[4] * s[4] + d[5] * s[5] + d[6] * s[6] + d[7] * s[7];                                  \
                    store(q + k * m + j, load(q + k * m + j) + (low + high));                                          \
                }                                                                                                      \
            }                                                                                                          \
            for (; j < columns; j++)                                                                                   \
                for (int k = 0; k < R; k++)                                                                            \
                    for (int t = 0; t < 8; t++) q[k * m + j] += delta[t * m + j] * p[k * n + i + t];                   \
        }                                                                                                              \
        for (; i < rows; i++, delta += m)                                                                              \
            for (int k = 0; k < R; k++)                                                                                \
                for (size_t j = 0; j < columns; j++) q[k * m + j] += delta[j] * p[k * n + i];                          \
    }

/* BLOCK vectors of one row: residual = delta - P' Q'^T, delta = P Q^T; local and mean hold the row's P' and P. */
#define SPLIT(BLOCK)                                                                                                   \
    for (; j + BLOCK * WIDTH <= end; j += BLOCK * WIDTH) {                                                             \
        vec left[BLOCK], sum[BLOCK];                                                                                   \
        for (int b = 0; b < BLOCK; b++) left[b] = load(delta + j + b * WIDTH), sum[b] = (vec){0};                      \
        for (size_t k = 0; k < r; k++)                                                                                 \
            for (int b = 0; b < BLOCK; b++) {                                                                          \
                left[b] -= local[k] * load(q_local + k * m + j + b * WIDTH);                                           \
                sum[b] += mean[k] * load(q + k * m + j + b * WIDTH);                                                   \
            }                                                                                                          \
        for (int b = 0; b < BLOCK; b++) store(residual + j + b * WIDTH, left[b]), store(delta + j + b * WIDTH, sum[b]); \
    }

static void split_row(size_t j, size_t end, size_t m, size_t r, float *restrict delta, float *restrict residual,
                      const float *local, const float *mean, const float *q_local, const float *q) {
    SPLIT(4)
    SPLIT(1)
    for (; j < end; j++) {
        float left = delta[j], sum = 0;
        for (size_t k = 0; k < r; k++) left -= local[k] * q_local[k * m + j], sum += mean[k] * q[k * m + j];
        residual[j] = left;
        delta[j] = sum;
    }
}

#define FOR_EACH_GROUP(MAKE) MAKE(1) MAKE(2) MAKE(3) MAKE(4)
FOR_EACH_GROUP(ADD_AND_PROJECT)
FOR_EACH_GROUP(PROJECT_Q)

#define DISPATCH(name, rows, ...)                                                                                      \
    switch (rows) {                                                                                                    \
        case 1: name##_1(__VA_ARGS__); break;                                                                          \
        case 2: name##_2(__VA_ARGS__); break;                                                                          \
        case 3: name##_3(__VA_ARGS__); break;                                                                          \
        default: name##_4(__VA_ARGS__);                                                                                \
    }

void commhooks_add_and_project(size_t n, size_t m, size_t r, float *delta, const float *residual, float factor,
                               const float *q, float *p) {
    for (size_t i = 0; i < n; i += ROWS(m)) {
        size_t rows = n - i < ROWS(m) ? n - i : ROWS(m);
        for (size_t k = 0; k < r; k += 4)
            DISPATCH(add_and_project, r - k, rows, n, m, delta + i * m, residual && k == 0 ? residual + i * m : NULL,
                     factor, q + k * m, p + k * n + i)
    }
}

void commhooks_project_q(size_t n, size_t m, size_t r, const float *delta, const float *p, float *q) {
    memset(q, 0, sizeof(float) * r * m);
    for (size_t j = 0; j < m; j += COLUMNS) {
        size_t columns = m - j < COLUMNS ? m - j : COLUMNS;
        size_t height = 8 * (ROWS(columns) / 8 + 1);  /* a multiple of eight, so that no order of sums depends on it */
        for (size_t i = 0; i < n; i += height) {
            size_t rows = n - i < height ? n - i : height;
            for (size_t k = 0; k < r; k += 4)
                DISPATCH(project_q, r - k, rows, columns, n, m, delta + i * m + j, p + k * n + i, q + k * m + j)
        }
    }
}

void commhooks_split(size_t n, size_t m, size_t r, float *delta, float *residual, const float *p_local,
                     const float *q_local, const float *p, const float *q) {
    float local[r], mean[r];
    size_t columns = (3072 / r / (4 * WIDTH) + 1) * 4 * WIDTH;  /* of Q and Q' at once: they fit into the first cache */
    for (size_t begin = 0; begin < m; begin += columns) {
        size_t end = m - begin < columns ? m : begin + columns;
        for (size_t i = 0; i < n; i++) {
            for (size_t k = 0; k < r; k++) local[k] = p_local[k * n + i], mean[k] = p[k * n + i];
            split_row(begin, end, m, r, delta + i * m, residual + i * m, local, mean, q_local, q);
        }
    }
}

static double dot(const double *a, const double *b, size_t k) {
    dvec sums[2] = {0}, x, y;
    size_t j = 0;
    for (; j + WIDTH <= k; j += WIDTH)
        for (int half = 0; half < 2; half++) {
            memcpy(&x, a + j + half * WIDTH / 2, sizeof x);
            memcpy(&y, b + j + half * WIDTH / 2, sizeof y);
            sums[half] += x * y;
        }
    double sum = 0;
    for (int lane = 0; lane < WIDTH / 2; lane++) sum += sums[0][lane] + sums[1][lane];
    for (; j < k; j++) sum += a[j] * b[j];
    return sum;
}

/* Scale v to norm 1 and return its previous norm; a zero v stays zero. In double: squares of floats do not overflow. */
static double normalise(double *v, size_t k) {
    double norm = __builtin_sqrt(dot(v, v, k));
    double scale = norm > 0 ? 1 / norm : 0;
    for (size_t j = 0; j < k; j++) v[j] *= scale;
    return norm;
}

/* Scale the rows of `from` (r x k) to norm 1; with `orthogonal`, also orthogonalise them by Gram-Schmidt done twice.
 * Returns the number of dependent rows (less than `least` of their norm is independent of the rows before), or -1 if no
 * memory could be allocated. Non-finite numbers count as zero. */
int commhooks_unit_rows(size_t r, size_t k, int orthogonal, double least, const float *from, float *to) {
    double *rows = malloc(sizeof(double) * r * k);
    int missing = rows ? 0 : -1;
    for (size_t i = 0; rows && i < r; i++) {
        double *v = rows + i * k;
        for (size_t j = 0; j < k; j++) v[j] = __builtin_isfinite(from[i * k + j]) ? from[i * k + j] : 0;
        double norm = normalise(v, k);
        for (int again = 0; orthogonal && again < 2; again++)
            for (size_t e = 0; e < i; e++) {
                double share = dot(v, rows + e * k, k);
                for (size_t j = 0; j < k; j++) v[j] -= share * rows[e * k + j];
            }
        if (orthogonal && norm > 0) norm = normalise(v, k);
        missing += norm <= (orthogonal ? least : 0);
        for (size_t j = 0; j < k; j++) to[i * k + j] = v[j];
    }
    free(rows);
    return missing;
}
