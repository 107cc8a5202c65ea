/* The rows of the tables that native_products.py makes, each field of 64 bits; what is common to a call; and how
 * matrices are cut into parts. */

struct matrix {
    size_t n, m, r;
    REAL *delta, *residual; /* residual may be NULL */
    REAL *p, *q, *mean_q;
    size_t scratch;   /* set in commhooks_form_q: place in the scratch memory */
    uint64_t largest; /* set in form_p: a double */
};

struct factor {
    size_t r, k;
    const REAL *source, *refill; /* refill: rows that replace dependent ones, or NULL */
    REAL *to;
    size_t missing; /* set in unit_rows: number of dependent rows that were not replaced */
};

/* What a call gives to all parts. */
struct call {
    double number; /* the residual's factor, or the least norm of a row that is not missing */
    int orthogonal;
    REAL *scratch;
};

static size_t most(size_t a, size_t b) { return a > b ? a : b; }
static size_t up(size_t a, size_t unit) { return pieces(a, unit) * unit; }

/* A part: about 2^18 elements of delta, and at least 64 rows, for which what is prepared of Q is used. */
static size_t part_rows(const struct matrix *x) { return up(most((1 << 18) / x->m, 64), 32); }
static size_t row_parts(const void *row) { return pieces(((struct matrix *)row)->n, part_rows(row)); }

/* Each part of Q's sum is an r x m matrix: with 16 r rows or more in a part it is small beside delta. */
static size_t sum_rows(const struct matrix *x) { return most(part_rows(x), up(16 * x->r, 32)); }
static size_t sum_parts(const void *row) { return pieces(((struct matrix *)row)->n, sum_rows(row)); }
static size_t one_part(const void *row) { return (void)row, 1; }
