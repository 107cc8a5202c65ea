/* Work on all parts of all rows of a table, by a team of threads. */

/* GOMP_parallel of the OpenMP that torch uses; NULL: there is none. */
typedef void start_team(void (*function)(void *), void *argument, unsigned threads, unsigned flags);

static size_t least(size_t a, size_t b) { return a < b ? a : b; }
static size_t pieces(size_t a, size_t size) { return (a + size - 1) / size; }

struct work {
    int (*run)(const struct work *, void *row, size_t part); /* returns 0, or -1 if there is no memory */
    size_t (*parts)(const void *row);
    void *table;
    size_t count, size; /* rows of the table, bytes of a row */
    const void *call;   /* what else the parts need */
    size_t next;        /* part to take */
    int failed;
};

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
