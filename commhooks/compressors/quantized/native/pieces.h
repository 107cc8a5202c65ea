/* The rows of the table that native_blocks.py makes, each field of 64 bits; what is common to a call; and how pieces are
 * cut into parts. */

/* Consecutive blocks of one tensor. */
struct piece {
    size_t numel, block; /* elements, and elements of a block; the last block may have fewer */
    REAL *bucket, *residual; /* residual may be NULL */
    uint8_t *codes; /* written here */
    REAL *scales;
    const uint8_t *arrived_codes; /* and read from here: of what all ranks send its owner, those of rank 0 */
    const REAL *arrived_scales;
};

struct call {
    int bits; /* 8, or 4: two codes in a byte, elements i and i + block / 2 */
    REAL most, factor;
    size_t ranks, rank, stride;
};

static size_t block_numel(const struct piece *x, size_t b) { return least(x->block, x->numel - b * x->block); }
static size_t code_bytes(size_t numel, int bits) { return bits == 8 ? numel : numel / 2; }

/* A part: about 2^16 elements. */
static size_t part_blocks(const struct piece *x) { return pieces(1 << 16, x->block); }
static size_t parts(const void *row) {
    const struct piece *x = row;
    return pieces(x->numel, x->block * part_blocks(x));
}
static size_t last_block(const struct piece *x, size_t part) {
    return least(pieces(x->numel, x->block), (part + 1) * part_blocks(x));
}
