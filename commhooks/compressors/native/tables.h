/* The rows of the tables in tables.py, with fields of 64 bits, and the thread team that processes them. */

/* One matrix of PowerSGD: delta, residual n x m; p r x n; q, mean_q r x m. */
struct matrix {
    size_t n, m, r;
    REAL *delta, *residual; /* residual may be NULL */
    REAL *p, *q, *mean_q;
    size_t scratch;   /* set in form_q: offset in the scratch memory */
    uint64_t largest; /* set in form_p: a double */
};

/* One factor of a matrix, r x k. */
struct factor {
    size_t r, k;
    const REAL *source, *refill; /* refill: rows that replace dependent rows, or NULL */
    REAL *to;
    size_t missing; /* set in unit_rows: number of dependent rows that were not replaced */
};

/* Consecutive blocks of one quantised tensor. */
struct piece {
    size_t numel, block; /* number of elements, and of elements per block; the last block may have fewer */
    REAL *bucket, *residual; /* residual may be NULL */
    uint8_t *codes; /* written here */
    REAL *scales;
    const uint8_t *arrived_codes; /* read here: in the message of rank 0 to the owner */
    const REAL *arrived_scales;
};

/* The name of a function that Python calls, for example commhooks_split_float. */
#define JOIN(name, real) commhooks_##name##_##real
#define WITH_REAL(name, real) JOIN(name, real)
#define EXPORT(name) WITH_REAL(name, REAL)

/* GOMP_parallel of the OpenMP library that torch uses, or NULL. */
typedef void start_team(void (*function)(void *), void *argument, unsigned threads, unsigned flags);

static size_t least(size_t a, size_t b) { return a < b ? a : b; }
static size_t pieces(size_t a, size_t size) { return (a + size - 1) / size; }

struct work {
    int (*run)(const struct work *, void *row, size_t part); /* returns 0, or -1 if there is no memory */
    size_t (*parts)(const void *row);
    void *table;
    size_t count, size; /* rows of the table, bytes of a row */
    const void *call;   /* arguments of the call */
    size_t next;        /* the next part */
    int failed;
};

/* Run in each thread: take the next part until none is left. */
static void take_parts(void *argument) {
    struct work *work = argument;
    char *row = work->table, *end = row + work->count * work->size;
    size_t before = 0, parts; /* parts of earlier rows, parts of this row */
    for (;;) {
        size_t next = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED);
        for (; row < end && next - before >= (parts = work->parts(row)); row += work->size) before += parts;
        if (row == end) return;
        if (work->run(work, row, next - before)) __atomic_store_n(&work->failed, -1, __ATOMIC_RELAXED);
    }
}

static int share(start_team *start, unsigned threads, size_t size, struct work *work) {
    work->next = 0;
    work->size = size;
    if (start && threads > 1)
        start(take_parts, work, threads, 0);
    else
        take_parts(work);
    return work->failed;
}
