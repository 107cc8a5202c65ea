/* A `free` that finds out who writes into freed memory. Loaded with LD_PRELOAD by heap.py (Linux, glibc).
 *
 * Freed blocks are filled with a pattern and kept for a while. A block whose pattern has changed when it is given back
 * was written to after it had been freed, by whatever code, compiled with checks or not: then the process is aborted.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define KEPT 65536             /* blocks */
#define KEPT_BYTES (96 << 20)  /* of all of them */
#define LARGEST (4 << 20)      /* larger blocks go back at once: the system unmaps most of them */
#define PATTERN 0xDB

extern void __libc_free(void *);

static struct block { unsigned char *start; size_t size; void *freed_by; } blocks[KEPT];
static size_t first, count, bytes;
static atomic_flag busy = ATOMIC_FLAG_INIT;
static int ended;

static void lock(void) { while (atomic_flag_test_and_set_explicit(&busy, memory_order_acquire)) {} }
static void unlock(void) { atomic_flag_clear_explicit(&busy, memory_order_release); }

static void check(struct block x) {
    for (size_t i = 0; i < x.size; i++)
        if (x.start[i] != PATTERN) {
            Dl_info by = {0};
            dladdr(x.freed_by, &by);
            fprintf(stderr, "quarantine: a block of %zu bytes at %p, freed by %s (%s), was written to at byte %zu:", x.size,
                    (void *)x.start, by.dli_sname ? by.dli_sname : "?", by.dli_fname ? by.dli_fname : "?", i);
            for (size_t j = i; j < x.size && j < i + 64; j++) fprintf(stderr, " %02x", x.start[j]);
            fprintf(stderr, "\n");
            abort();
        }
}

void free(void *start) {
    struct block old[64];
    size_t olds = 0, size;
    if (!start) return;
    size = malloc_usable_size(start);
    if (size > LARGEST || ended) {
        __libc_free(start);
        return;
    }
    memset(start, PATTERN, size);
    lock();
    while (count && olds < 64 && (count == KEPT || bytes + size > KEPT_BYTES)) {
        bytes -= blocks[first].size;
        old[olds++] = blocks[first];
        first = (first + 1) % KEPT;
        count--;
    }
    blocks[(first + count++) % KEPT] = (struct block){start, size, __builtin_return_address(0)};
    bytes += size;
    unlock();
    for (size_t i = 0; i < olds; i++) {
        check(old[i]);
        __libc_free(old[i].start);
    }
}

__attribute__((destructor)) static void check_all(void) {
    lock();
    ended = 1;
    for (size_t i = 0; i < count; i++) check(blocks[(first + i) % KEPT]);
    unlock();
}
