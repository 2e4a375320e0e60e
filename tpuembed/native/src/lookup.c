/* Pooled lookups: the activations of all features of a request in one call. Names become ids in a call before it.
 *
 * A feature has a table, which is a part of a stack of stored rows. A call gives each feature's ids, and takes its
 * activations. Rows come from memory at random, so the row of an id is found and prefetched AHEAD ids before it is added,
 * across examples and features. Numbers are those of TensorFlow's graph (tpuembed/export/graph): one id gives the same bits,
 * sums are added in another order. No operation is contracted: compile with -ffp-contract=off.
 *
 * The caller owns all memory. It guarantees what `tpuembed/native/lookup.py` checks: pointers of the sizes that the fields
 * say, and a dim, rows and hot that are not negative. Ids may be any numbers, and may change while a call reads them.
 *
 * C11. No allocation, no thread: callers divide the examples into slices of their own. The only call of the operating system
 * is posix_madvise, for tables that are larger than the memory.
 */

#define _POSIX_C_SOURCE 200112L /* posix_madvise */

#include <math.h>
#include <sys/mman.h>

#include "rows.h"

enum { ONE_ID, LIST, SEQUENCE };
enum { SUM, MEAN, SQRTN };
enum { FAIL, ZEROS, ROW };
enum { OK, OUTSIDE, DAMAGED };

#define PADDING (-1)
#define NOWHERE ((int64_t)1 << 62) /* the row of an unknown name: tpuembed/errors/ids.py */
#define WAYS 4
#define BLOCK 64 /* names whose buckets are prefetched before the first of them is compared */
#define AHEAD 16 /* ids between the prefetch of a row and its use */
#define RING 32  /* a power of two above AHEAD */
#define LINE 64
#define MAX_PREFETCH 1024 /* bytes of a row; the processor fetches the rest of a long row by itself */
#define LOCAL 256         /* sums of at most this width are kept on the stack */

/* All fields have 8 bytes, so that every compiler and ctypes agree on the layout. */

struct feature {
    const unsigned char *rows; /* of the stack's file, stored rows of row_bytes each */
    const unsigned char *overlay; /* rows that replace those of the file; NULL if there are none */
    const uint64_t *words; /* bit n % 32 of word n / 32: row n of the stack is in the overlay. Upper half: OverlayEntry */
    int64_t overlay_rows;
    int64_t storage, dim, row_bytes;
    int64_t ids; /* the ids [0, ids) are rows */
    int64_t row_offset; /* the first one is this row of the stack, and of its file */
    int64_t kind, combiner, length; /* length: of a sequence */
    int64_t policy, policy_row; /* of ids outside; policy_row counts from the table's first row */
    int64_t divides_weights; /* of lists with weights: each weight is divided, and not the sum of the rows */
};

struct input {
    const int64_t *ids; /* [examples, hot], with id_stride elements from one example to the next */
    int64_t id_stride, hot;
    const float *weights; /* as ids; NULL stands for 1 */
    int64_t weight_stride;
    float *out; /* [examples, dim], or [examples, length, dim] of a sequence */
    int64_t out_stride;
};

struct place {
    int64_t example, id;
};

struct names { /* the names of a table: an index of tpuembed/lookup/name_index.py */
    const int64_t *keys;    /* [buckets, WAYS], the fingerprint of each string, or each integer itself */
    const int32_t *numbers; /* [buckets, WAYS], the number of each key's name, -1 for a place without a key */
    int64_t buckets;
    int64_t oov_buckets; /* rows before the names, for unknown ones; 0 makes these NOWHERE */
    int64_t salt_bytes;  /* of a text that stands before each string, and belongs to its fingerprint alone */
    int64_t padded;      /* "" and the integer -1 are padding */
};

/* ---- ids */

INLINE int64_t columns_of(const struct feature *feature, const struct input *input) {
    if (feature->kind == SEQUENCE) return input->hot < feature->length ? input->hot : feature->length;
    return input->hot;
}

INLINE int is_outside(const struct feature *feature, int64_t id) {
    int is_row = (uint64_t)id < (uint64_t)feature->ids;
    return !is_row & !((feature->kind != ONE_ID) & (id == PADDING));
}

INLINE int any_outside(const struct feature *feature, const int64_t *ids, int64_t count, int64_t stride) {
    uint64_t rows = (uint64_t)feature->ids;
    uint64_t padded = feature->kind != ONE_ID, found = 0;
    for (int64_t i = 0; i < count; i++) {
        uint64_t id = (uint64_t)ids[i * stride];
        found |= (uint64_t)(id >= rows) & (uint64_t)!(padded & (id == (uint64_t)PADDING));
    }
    return found != 0;
}

INLINE int has_outside(const struct feature *feature, const struct input *input, int64_t begin, int64_t end) {
    int64_t columns = columns_of(feature, input), stride = input->id_stride;
    const int64_t *ids = input->ids;
    if (feature->policy != FAIL || columns == 0) return 0;
    if (columns == 1 && stride != 1) return any_outside(feature, ids + begin * stride, end - begin, stride);
    if (columns == stride) return any_outside(feature, ids + begin * stride, (end - begin) * columns, 1);
    for (int64_t example = begin; example < end; example++)
        if (any_outside(feature, ids + example * stride, columns, 1)) return 1;
    return 0;
}

/* ---- rows */

static const unsigned char NOTHING[1]; /* stands for the row of an id that a policy makes zeros */

struct cursor { /* walks over all ids of all features, AHEAD of the sums */
    const struct feature *feature;
    const struct input *input;
    const int64_t *ids; /* of the example */
    int64_t features_left, example, column, columns;
    int is_damaged;
};

/* Return the row of an id: NULL for padding, NOTHING for zeros. */
INLINE const unsigned char *find_row(const struct feature *feature, int64_t id, int *is_damaged) {
    uint64_t row = (uint64_t)id;
    if (row >= (uint64_t)feature->ids) {
        if (id == PADDING && feature->kind != ONE_ID) return NULL;
        if (feature->policy != ROW) return NOTHING;
        row = (uint64_t)feature->policy_row;
    }
    if (feature->overlay != NULL) {
        uint64_t stacked = (uint64_t)feature->row_offset + row;
        uint64_t word = feature->words[stacked / 32], bit = (uint64_t)1 << stacked % 32;
        if (word & bit) {
            uint64_t rank = (uint64_t)(int64_t)((int32_t)(word >> 32) + POPCOUNT(word & (2 * bit - 1)));
            if (rank < (uint64_t)feature->overlay_rows) return feature->overlay + rank * (uint64_t)feature->row_bytes;
            *is_damaged = 1;
            return NOTHING;
        }
    }
    return feature->rows + ((uint64_t)feature->row_offset + row) * (uint64_t)feature->row_bytes;
}

INLINE void next_feature(struct cursor *cursor, int64_t begin) {
    while (cursor->features_left > 0) {
        cursor->columns = columns_of(cursor->feature, cursor->input);
        if (cursor->columns > 0) break;
        cursor->feature++, cursor->input++, cursor->features_left--;
    }
    if (cursor->features_left == 0) return;
    cursor->example = begin, cursor->column = 0;
    cursor->ids = cursor->input->ids + begin * cursor->input->id_stride;
}

INLINE const unsigned char *next_row(struct cursor *cursor, int64_t begin, int64_t end) {
    if (cursor->features_left == 0) return NULL;
    const unsigned char *row = find_row(cursor->feature, cursor->ids[cursor->column], &cursor->is_damaged);
    if (row != NULL && row != NOTHING) {
        int64_t bytes = cursor->feature->row_bytes;
        int64_t most = bytes < MAX_PREFETCH ? bytes : MAX_PREFETCH;
        for (int64_t byte = 0; byte < most; byte += LINE) PREFETCH(row + byte);
        if (bytes % LINE) PREFETCH(row + bytes - 1);
    }
    if (++cursor->column == cursor->columns) {
        cursor->column = 0;
        cursor->ids += cursor->input->id_stride;
        if (++cursor->example == end) {
            cursor->feature++, cursor->input++, cursor->features_left--;
            next_feature(cursor, begin);
        }
    }
    return row;
}

/* ---- values */

#define EACH(type, value)                                                                                             \
    do {                                                                                                              \
        const type *a = (const type *)(const void *)rows[0], *b = (const type *)(const void *)rows[1];                 \
        const type *c = (const type *)(const void *)rows[2], *d = (const type *)(const void *)rows[3];                 \
        if (weights != NULL)                                                                                          \
            for (int64_t i = 0; i < dim; i++)                                                                         \
                sums[i] = (((sums[i] + value(a[i], 0) * weights[0]) + value(b[i], 1) * weights[1]) +                  \
                           value(c[i], 2) * weights[2]) + value(d[i], 3) * weights[3];                                \
        else                                                                                                          \
            for (int64_t i = 0; i < dim; i++)                                                                         \
                sums[i] = (((sums[i] + value(a[i], 0)) + value(b[i], 1)) + value(c[i], 2)) + value(d[i], 3);          \
    } while (0)
#define AS_FLOAT32(stored, which) (stored)
#define AS_BFLOAT16(stored, which) bfloat16_value(stored)
#define AS_FLOAT16(stored, which) float16_value(stored)
#define AS_INT8(stored, which) ((float)(stored) * scale[which] + centre[which])

/* Add four rows, one after the other. */
INLINE void add_four(
    float *restrict sums, const unsigned char *const rows[4], const float *weights, int64_t storage, int64_t dim) {
    if (storage == FLOAT32) {
        EACH(float, AS_FLOAT32);
    } else if (storage == BFLOAT16) {
        EACH(uint16_t, AS_BFLOAT16);
    } else if (storage == FLOAT16) {
        EACH(uint16_t, AS_FLOAT16);
    } else {
        float scale[4], centre[4];
        for (int i = 0; i < 4; i++) scale_and_centre(rows[i], dim, &scale[i], &centre[i]);
        EACH(int8_t, AS_INT8);
    }
}

#define ONE(type, value)                                                                                              \
    do {                                                                                                              \
        const type *a = (const type *)(const void *)row;                                                              \
        for (int64_t i = 0; i < dim; i++) sums[i] += value(a[i], 0) * weight;                                         \
    } while (0)

/* Add one row. A product with the weight 1 is exact. */
INLINE void add_one(float *restrict sums, const unsigned char *row, float weight, int64_t storage, int64_t dim) {
    if (storage == FLOAT32) {
        ONE(float, AS_FLOAT32);
    } else if (storage == BFLOAT16) {
        ONE(uint16_t, AS_BFLOAT16);
    } else if (storage == FLOAT16) {
        ONE(uint16_t, AS_FLOAT16);
    } else {
        float scale[1], centre[1];
        scale_and_centre(row, dim, scale, centre);
        ONE(int8_t, AS_INT8);
    }
}

/* ---- lookups */

struct ring {
    const unsigned char *rows[RING];
    uint64_t read, written;
    struct cursor cursor;
    int64_t begin, end;
};

INLINE void advance(struct ring *ring) {
    ring->rows[ring->written++ % RING] = next_row(&ring->cursor, ring->begin, ring->end);
}

INLINE const unsigned char *take(struct ring *ring) {
    advance(ring);
    return ring->rows[ring->read++ % RING];
}

/* Write an example's rows as they are, and rows of zeros up to the sequence's length. */
INLINE void copy(struct ring *ring, float *out, int64_t columns, int64_t length, int64_t storage, int64_t dim) {
    for (int64_t column = 0; column < columns; column++, out += dim) {
        const unsigned char *row = take(ring);
        if (row == NULL || row == NOTHING)
            memset(out, 0, (size_t)dim * sizeof *out);
        else
            decode(out, row, storage, dim);
    }
    memset(out, 0, (size_t)((length - columns) * dim) * sizeof *out);
}

/* Return what the combiner, MEAN or SQRTN, divides by. */
INLINE float divisor_of(const int64_t *ids, const float *weights, int64_t columns, int64_t combiner) {
    float sum = 0;
    for (int64_t column = 0; column < columns; column++)
        if (ids[column] != PADDING) sum += combiner == SQRTN ? weights[column] * weights[column] : weights[column];
    return combiner == SQRTN ? sqrtf(sum) : sum;
}

/* Write the sum of an example's rows, divided as the combiner says. `ids` is NULL if the sum is divided, and not the weights. */
INLINE void pool(
    struct ring *ring, float *out, int64_t columns, const int64_t *ids, const float *weights, int64_t combiner,
    int64_t storage, int64_t dim) {
    if (columns == 1 && weights == NULL) { /* twice as fast as a sum of one row */
        copy(ring, out, columns, 1, storage, dim);
        return;
    }
    const unsigned char *rows[4];
    float four[4], local[LOCAL], *sums = dim <= LOCAL ? local : out, divisor = 0;
    float of_weights = ids == NULL ? 1 : divisor_of(ids, weights, columns, combiner);
    int count = 0;
    memset(sums, 0, (size_t)dim * sizeof *sums);
    for (int64_t column = 0; column < columns; column++) {
        const unsigned char *row = take(ring);
        if (row == NULL) continue;
        float weight = weights == NULL ? 1 : weights[column];
        if (ids != NULL) weight = of_weights == 0 ? 0 : weight / of_weights;
        divisor += combiner == SQRTN ? weight * weight : weight;
        if (row == NOTHING) {
            if (weight * 0 != 0) /* NaN or infinite: zeros times it are NaN */
                for (int64_t i = 0; i < dim; i++) sums[i] += weight * 0;
            continue;
        }
        rows[count] = row, four[count] = weight;
        if (++count == 4) {
            add_four(sums, rows, weights == NULL ? NULL : four, storage, dim);
            count = 0;
        }
    }
    for (int i = 0; i < count; i++) add_one(sums, rows[i], four[i], storage, dim);
    if (combiner == SUM || ids != NULL) {
        if (sums != out) memcpy(out, sums, (size_t)dim * sizeof *out);
    } else {
        if (combiner == SQRTN) divisor = sqrtf(divisor);
        if (divisor == 0)
            memset(out, 0, (size_t)dim * sizeof *out);
        else
            for (int64_t i = 0; i < dim; i++) out[i] = sums[i] / divisor;
    }
}

INLINE int look_up(
    const struct feature *features, const struct input *inputs, int64_t count, int64_t begin, int64_t end) {
    if (begin >= end) return OK;
    for (int64_t i = 0; i < count; i++)
        if (has_outside(&features[i], &inputs[i], begin, end)) return OUTSIDE;
    struct ring ring = {.cursor = {.feature = features, .input = inputs, .features_left = count}, .begin = begin, .end = end};
    next_feature(&ring.cursor, begin);
    for (int i = 0; i < AHEAD; i++) advance(&ring);
    for (int64_t i = 0; i < count; i++) {
        const struct feature *feature = &features[i];
        const struct input *input = &inputs[i];
        int64_t columns = columns_of(feature, input), storage = feature->storage, dim = feature->dim;
        int64_t length = feature->kind == SEQUENCE ? feature->length : 1;
        for (int64_t example = begin; example < end; example++) {
            float *out = input->out + example * input->out_stride;
            if (feature->kind == LIST) {
                const float *weights = input->weights == NULL ? NULL : input->weights + example * input->weight_stride;
                int divides = feature->divides_weights && weights != NULL && feature->combiner != SUM;
                const int64_t *ids = divides ? input->ids + example * input->id_stride : NULL;
                pool(&ring, out, columns, ids, weights, feature->combiner, storage, dim);
            } else {
                copy(&ring, out, columns, length, storage, dim);
            }
        }
    }
    return ring.cursor.is_damaged ? DAMAGED : OK;
}

/* ---- pages of rows that are not in memory */

struct pages {
    uint64_t *recent;    /* pages that were advised not long ago, each at a place that its number decides; 0 is none */
    int64_t recent_bits; /* recent has 2^recent_bits places */
    uint64_t page_bytes; /* a power of two */
};

/* Let the kernel start to read the pages of some bytes, if they were not advised not long ago. A failure changes
 * nothing: a lookup then reads them itself. Threads may race for a place: a page is advised once more. */
static void advise(const struct pages *pages, const unsigned char *bytes, int64_t count) {
    uint64_t last = ((uint64_t)(uintptr_t)bytes + (uint64_t)count - 1) / pages->page_bytes;
    for (uint64_t page = (uint64_t)(uintptr_t)bytes / pages->page_bytes; page <= last; page++) {
        uint64_t *place = &pages->recent[page * 0x9e3779b97f4a7c15u >> (64 - pages->recent_bits)];
        if (__atomic_load_n(place, __ATOMIC_RELAXED) == page) continue;
        __atomic_store_n(place, page, __ATOMIC_RELAXED);
        (void)posix_madvise(
            (void *)(uintptr_t)(page * pages->page_bytes), (size_t)pages->page_bytes, POSIX_MADV_WILLNEED);
    }
}

/* Advise the rows of the ids, or the words that say which of these are in the overlay. */
static void advise_ids(
    const struct pages *pages, const struct feature *feature, const struct input *input, int64_t begin, int64_t end,
    int are_words) {
    int64_t columns = columns_of(feature, input);
    int is_damaged = 0;
    for (int64_t example = begin; example < end; example++)
        for (int64_t column = 0; column < columns; column++) {
            int64_t id = input->ids[example * input->id_stride + column];
            uint64_t row = (uint64_t)id;
            if (!are_words) {
                const unsigned char *bytes = find_row(feature, id, &is_damaged);
                if (bytes != NULL && bytes != NOTHING && feature->row_bytes > 0) advise(pages, bytes, feature->row_bytes);
                continue;
            }
            if (row >= (uint64_t)feature->ids) {
                if (feature->policy != ROW || (id == PADDING && feature->kind != ONE_ID)) continue;
                row = (uint64_t)feature->policy_row;
            }
            const uint64_t *word = feature->words + ((uint64_t)feature->row_offset + row) / 32;
            advise(pages, (const unsigned char *)word, sizeof *word);
        }
}

/* ---- names: what tpuembed/lookup/names.py computes in a graph */

#define K0 0xc3a5c85c97cb3127u
#define K1 0xb492b66fbe98f273u
#define K2 0x9ae16a3b2f90404fu
#define SECOND 0x9e3779b97f4a7c15u /* MIX of tpuembed/lookup/name_index.py, as an unsigned number */

INLINE uint64_t word(const unsigned char *bytes) {
    uint64_t value;
    memcpy(&value, bytes, sizeof value);
    return value;
}

INLINE uint64_t half(const unsigned char *bytes) {
    uint32_t value;
    memcpy(&value, bytes, sizeof value);
    return value;
}

INLINE uint64_t rotate(uint64_t value, int bits) { return value >> bits | value << (64 - bits); }

INLINE uint64_t mix(uint64_t value) { return value ^ value >> 47; }

INLINE uint64_t of_two(uint64_t one, uint64_t other, uint64_t factor) {
    uint64_t mixed = mix((one ^ other) * factor);
    return mix((other ^ mixed) * factor) * factor;
}

struct state {
    uint64_t x, y, z, v[2], w[2];
};

INLINE void weak(uint64_t pair[2], const unsigned char *bytes, uint64_t a, uint64_t b) {
    a += word(bytes);
    b = rotate(b + a + word(bytes + 24), 21);
    uint64_t c = a;
    a += word(bytes + 8) + word(bytes + 16);
    pair[0] = a + word(bytes + 24), pair[1] = b + rotate(a, 44) + c;
}

/* Mix 64 bytes in. */
INLINE void add_block(struct state *s, const unsigned char *bytes, uint64_t factor, uint64_t times) {
    uint64_t x = rotate(s->x + s->y + s->v[0] + word(bytes + 8), 37) * factor;
    uint64_t y = rotate(s->y + s->v[1] + word(bytes + 48), 42) * factor;
    uint64_t z = rotate(s->z + s->w[0], 33) * factor;
    x ^= s->w[1] * times;
    y += s->v[0] * times + word(bytes + 40);
    weak(s->v, bytes, s->v[1] * factor, x + s->w[0]);
    weak(s->w, bytes + 32, z + s->w[1], y + word(bytes + 16));
    s->x = z, s->y = y, s->z = x;
}

static uint64_t hash_of_blocks(const unsigned char *bytes, uint64_t length) {
    uint64_t y = 81 * K1 + 113, rest = (length - 1) % 64;
    struct state s = {.x = 81 * K2 + word(bytes), .y = y, .z = mix(y * K2 + 113) * K2};
    for (uint64_t block = 0; block < (length - 1) / 64; block++) add_block(&s, bytes + 64 * block, K1, 1);
    uint64_t factor = K1 + ((s.z & 0xff) << 1);
    s.w[0] += rest;
    s.v[0] += s.w[0];
    s.w[0] += s.v[0];
    add_block(&s, bytes + length - 64, factor, 9);
    return of_two(
        of_two(s.v[0], s.w[0], factor) + mix(s.y) * K0 + s.z, of_two(s.v[1], s.w[1], factor) + s.x, factor);
}

/* Return the hash of tf.strings.to_hash_bucket_fast: FarmHash's Fingerprint64. Source: farmhashna::Hash64 of
 * https://github.com/google/farmhash/blob/master/src/farmhash.cc */
INLINE uint64_t hash_of(const unsigned char *bytes, uint64_t length) {
    const unsigned char *end = bytes + length;
    uint64_t factor = K2 + 2 * length;
    if (length > 64) return hash_of_blocks(bytes, length);
    if (length > 16) {
        uint64_t k = length > 32 ? K2 : K1, a = word(bytes) * k, b = word(bytes + 8);
        uint64_t c = word(end - 8) * factor, d = word(end - 16) * K2;
        uint64_t y = rotate(a + b, 43) + rotate(c, 30) + d, tail = a + rotate(b + K2, 18) + c;
        if (length <= 32) return of_two(y, tail, factor);
        uint64_t z = of_two(y, tail, factor), e = word(bytes + 16) * factor, f = word(bytes + 24);
        uint64_t g = (y + word(end - 32)) * factor, h = (z + word(end - 24)) * factor;
        return of_two(rotate(e + f, 43) + rotate(g, 30) + h, e + rotate(f + a, 18) + g, factor);
    }
    if (length >= 8) {
        uint64_t a = word(bytes) + K2, b = word(end - 8);
        return of_two(rotate(b, 37) * factor + a, (rotate(a, 25) + b) * factor, factor);
    }
    if (length >= 4) return of_two(length + (half(bytes) << 3), half(end - 4), factor);
    if (length == 0) return K2;
    uint64_t low = bytes[0] + ((uint64_t)bytes[length / 2] << 8), high = length + ((uint64_t)end[-1] << 2);
    return mix(low * K2 ^ high * K0) * K2;
}

/* Return `value` modulo `count`, of 0 or more. */
INLINE int64_t modulo(int64_t value, int64_t count) {
    int64_t rest = value % count;
    return rest < 0 ? rest + count : rest;
}

/* Return the place of a key in the two buckets that it may be in, or -1. If it is there twice, the first place. */
INLINE int64_t place_of(const struct names *names, int64_t key, const int64_t buckets[2]) {
    int64_t place = -1;
    for (int which = 1; which >= 0; which--)
        for (int way = WAYS - 1; way >= 0; way--)
            if (names->keys[buckets[which] * WAYS + way] == key) place = buckets[which] * WAYS + way;
    return place;
}

/* ---- what callers see: the same function for several processors. They are compared by what they can do, never by model. */

#if defined(__x86_64__)
V4 static int look_up_v4(const struct feature *f, const struct input *in, int64_t count, int64_t begin, int64_t end) {
    return look_up(f, in, count, begin, end);
}

V3 static int look_up_v3(const struct feature *f, const struct input *in, int64_t count, int64_t begin, int64_t end) {
    return look_up(f, in, count, begin, end);
}
#endif

/* Return the best variant that this processor runs: 0 is the plain build, and it runs every lower one too. */
EXPORT int64_t tpuembed_best_variant(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    int v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
             __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt");
    int v4 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vl");
    return v3 + (v3 && v4);
#else
    return 0;
#endif
}

/* Return the bytes of the structs, so that a caller of another version of this file is found out. */
EXPORT int64_t tpuembed_layout(void) {
    return (int64_t)((sizeof(struct names) * 1000 + sizeof(struct feature)) * 1000 + sizeof(struct input));
}

/* Look up the examples [begin, end) of all features. OUTSIDE: an id of theirs is not a row, and no row was read. DAMAGED: an
 * overlay contradicts itself; the activations have no meaning. */
EXPORT int64_t tpuembed_look_up(
    int64_t variant, const struct feature *features, const struct input *inputs, int64_t count, int64_t begin, int64_t end) {
#if defined(__x86_64__)
    if (variant == 2) return look_up_v4(features, inputs, count, begin, end);
    if (variant == 1) return look_up_v3(features, inputs, count, begin, end);
#endif
    (void)variant;
    return look_up(features, inputs, count, begin, end);
}

/* Let the kernel read all pages that a lookup of the examples [begin, end) will touch, many at once. */
EXPORT void tpuembed_read_ahead(
    const struct pages *pages, const struct feature *features, const struct input *inputs, int64_t count, int64_t begin,
    int64_t end) {
    for (int64_t i = 0; i < count; i++)
        if (features[i].overlay != NULL) advise_ids(pages, &features[i], &inputs[i], begin, end, 1);
    for (int64_t i = 0; i < count; i++) advise_ids(pages, &features[i], &inputs[i], begin, end, 0);
}

/* Find the first id outside of one feature's examples [0, examples), example by example. Return whether there is one. */
EXPORT int64_t tpuembed_find_outside(
    const struct feature *feature, const struct input *input, int64_t examples, struct place *found) {
    int64_t columns = columns_of(feature, input);
    if (feature->policy != FAIL) return 0;
    for (int64_t example = 0; example < examples; example++)
        for (int64_t column = 0; column < columns; column++) {
            int64_t id = input->ids[example * input->id_stride + column];
            if (is_outside(feature, id)) {
                found->example = example, found->id = id;
                return 1;
            }
        }
    return 0;
}

/* Write the row of each name: PADDING, that of an oov bucket, or NOWHERE for a name that is unknown.
 *
 * bytes: strings, one after the other, each behind the salt; `values` then has the length of each without it. NULL if `values`
 * are the names. pages: the pages of the index are advised first; NULL if they are in memory.
 *
 * Return the first name that is NOWHERE, or -1. */
EXPORT int64_t tpuembed_find_names(
    const struct pages *pages, const struct names *names, const unsigned char *bytes, const int64_t *values, int64_t count,
    int64_t *rows) {
    int64_t keys[BLOCK], buckets[BLOCK][2], first_unknown = -1;
    const unsigned char *text[BLOCK];
    for (int64_t start = 0; start < count; start += BLOCK) {
        int64_t size = count - start < BLOCK ? count - start : BLOCK;
        for (int64_t i = 0; i < size; i++) {
            int64_t value = values[start + i];
            keys[i] = value;
            if (bytes != NULL) {
                text[i] = bytes + names->salt_bytes;
                keys[i] = (int64_t)(hash_of(bytes, (uint64_t)(names->salt_bytes + value)) % INT64_MAX);
                bytes = text[i] + value;
            }
            buckets[i][0] = modulo(keys[i], names->buckets);
            buckets[i][1] = (int64_t)((uint64_t)keys[i] * SECOND >> 1) % names->buckets;
            for (int which = 0; which < 2; which++) {
                const int64_t *bucket = names->keys + buckets[i][which] * WAYS;
                PREFETCH(bucket);
                if (pages != NULL) advise(pages, (const unsigned char *)bucket, WAYS * (int64_t)sizeof *bucket);
            }
        }
        for (int64_t i = 0; i < size; i++) {
            int64_t place = rows[start + i] = place_of(names, keys[i], buckets[i]);
            if (place < 0) continue;
            PREFETCH(names->numbers + place);
            if (pages != NULL) advise(pages, (const unsigned char *)(names->numbers + place), sizeof *names->numbers);
        }
        for (int64_t i = 0; i < size; i++) {
            int64_t value = values[start + i], place = rows[start + i], row = NOWHERE;
            int32_t number = place < 0 ? -1 : names->numbers[place];
            if (names->padded && (bytes != NULL ? value == 0 : value == PADDING)) {
                row = PADDING;
            } else if (number >= 0) {
                row = (int64_t)((uint64_t)number + (uint64_t)names->oov_buckets);
            } else if (names->oov_buckets > 0) {
                row = bytes == NULL ? modulo(value, names->oov_buckets)
                                    : (int64_t)(hash_of(text[i], (uint64_t)value) % (uint64_t)names->oov_buckets);
            } else if (first_unknown < 0) {
                first_unknown = start + i;
            }
            rows[start + i] = row;
        }
    }
    return first_unknown;
}
