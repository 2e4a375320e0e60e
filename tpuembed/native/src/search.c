/* The best candidates for query vectors: rows of an index whose products with a query are largest.
 *
 * A call searches ranges of rows. It keeps the best so far in a heap, and looks at a row's id and tags only if its score would
 * be among them. Of equal scores the lower place is better. Products are added in another order than by TensorFlow.
 *
 * The caller owns all memory, and guarantees what `tpuembed/native/search.py` checks: arrays of the sizes that the fields say,
 * ranges inside of the rows, queries without NaN. C11. No allocation, no thread.
 */

#include <math.h>

#include "rows.h"

#define ROWS 256 /* rows whose scores are computed before they are compared: they stay in the cache for all queries */
#define LANES 8

typedef float lanes __attribute__((vector_size(LANES * sizeof(float))));
typedef float quarter __attribute__((vector_size(4 * sizeof(float))));

/* All fields have 8 bytes, so that every compiler and ctypes agree on the layout. */

struct index {
    const unsigned char *rows; /* stored rows of row_bytes each: row n is the candidate at place n */
    const int64_t *ids;        /* by place; -1 is a place without a candidate */
    const uint64_t *tags;      /* by place; NULL if there are none */
    int64_t storage, dim, row_bytes;
};

struct best { /* a heap, the worst at the front */
    float *scores;
    int64_t *places;
    int64_t size, most;
};

INLINE int is_worse(const struct best *best, int64_t a, int64_t b) {
    if (best->scores[a] != best->scores[b]) return best->scores[a] < best->scores[b];
    return best->places[a] > best->places[b];
}

INLINE void swap(struct best *best, int64_t a, int64_t b) {
    float score = best->scores[a];
    int64_t place = best->places[a];
    best->scores[a] = best->scores[b], best->places[a] = best->places[b];
    best->scores[b] = score, best->places[b] = place;
}

INLINE void sink(struct best *best, int64_t at) {
    for (;;) {
        int64_t child = 2 * at + 1;
        if (child >= best->size) return;
        if (child + 1 < best->size && is_worse(best, child + 1, child)) child++;
        if (!is_worse(best, child, at)) return;
        swap(best, child, at);
        at = child;
    }
}

/* Add a candidate, if it is better than the worst. */
INLINE void offer(struct best *best, float score, int64_t place) {
    if (best->size < best->most) {
        int64_t at = best->size++;
        best->scores[at] = score, best->places[at] = place;
        while (at > 0 && is_worse(best, at, (at - 1) / 2)) swap(best, at, (at - 1) / 2), at = (at - 1) / 2;
        return;
    }
    if (score < best->scores[0] || (score == best->scores[0] && place > best->places[0])) return;
    best->scores[0] = score, best->places[0] = place;
    sink(best, 0);
}

INLINE lanes load(const float *values) {
    lanes loaded;
    memcpy(&loaded, values, sizeof loaded);
    return loaded;
}

INLINE float dot(const float *row, const float *query, int64_t dim) {
    lanes sums[4] = {{0}, {0}, {0}, {0}};
    int64_t i = 0;
    for (; i + 4 * LANES <= dim; i += 4 * LANES)
        for (int j = 0; j < 4; j++) sums[j] += load(row + i + j * LANES) * load(query + i + j * LANES);
    for (; i + LANES <= dim; i += LANES) sums[0] += load(row + i) * load(query + i);
    lanes all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    quarter low = {all[0], all[1], all[2], all[3]}, high = {all[4], all[5], all[6], all[7]}, both = low + high;
    float total = (both[0] + both[1]) + (both[2] + both[3]);
    for (; i < dim; i++) total += row[i] * query[i];
    return total;
}

/* Search the rows [start, stop), at most ROWS, for one query. `values` are their values. */
INLINE void search_rows(
    const struct index *index, struct best *best, const float *values, const float *query, uint64_t wanted, int64_t start,
    int64_t stop) {
    float scores[ROWS];
    for (int64_t row = 0; row < stop - start; row++) scores[row] = dot(values + row * index->dim, query, index->dim);
    for (int64_t place = start; place < stop; place++) {
        float score = scores[place - start];
        if (best->size == best->most && !(score >= best->scores[0])) continue;
        if (!(score > -INFINITY)) continue;
        if (index->ids[place] == -1) continue;
        if (wanted && (index->tags == NULL || (index->tags[place] & wanted) != wanted)) continue;
        offer(best, score, place);
    }
}

#define PARAMETERS                                                                                                    \
    const struct index *index, const float *queries, const uint64_t *wanted, int64_t count, const int64_t *ranges,    \
        int64_t range_count, float *decoded, float *scores, int64_t *places, int64_t *sizes, int64_t most
#define ARGUMENTS index, queries, wanted, count, ranges, range_count, decoded, scores, places, sizes, most

INLINE void search(PARAMETERS) {
    for (int64_t range = 0; range < range_count; range++)
        for (int64_t start = ranges[2 * range]; start < ranges[2 * range + 1]; start += ROWS) {
            int64_t stop = start + ROWS < ranges[2 * range + 1] ? start + ROWS : ranges[2 * range + 1];
            const float *values = (const float *)(const void *)(index->rows + start * index->row_bytes);
            if (index->storage != FLOAT32) {
                for (int64_t row = start; row < stop; row++)
                    decode(decoded + (row - start) * index->dim, index->rows + row * index->row_bytes, index->storage, index->dim);
                values = decoded;
            }
            for (int64_t i = 0; i < count; i++) {
                struct best best = {scores + i * most, places + i * most, sizes[i], most};
                search_rows(
                    index, &best, values, queries + i * index->dim, wanted == NULL ? 0 : wanted[i], start, stop);
                sizes[i] = best.size;
            }
        }
    for (int64_t i = 0; i < count; i++) {
        struct best best = {scores + i * most, places + i * most, sizes[i], most};
        while (best.size > 1) swap(&best, 0, --best.size), sink(&best, 0);
        for (int64_t at = sizes[i]; at < most; at++) scores[i * most + at] = -INFINITY, places[i * most + at] = -1;
    }
}

#if defined(__x86_64__)
V4 static void search_v4(PARAMETERS) { search(ARGUMENTS); }
V3 static void search_v3(PARAMETERS) { search(ARGUMENTS); }
#endif

/* Write the `most` best places of the rows in `ranges`, pairs of a first row and an end, for each of `count` queries, the best
 * first. Missing ones are -1, with the score -infinity.
 *
 * wanted: tags that a candidate needs, for each query; NULL if none does. decoded: ROWS * dim floats. sizes: `count` zeros. */
EXPORT void tpuembed_search(int64_t variant, PARAMETERS) {
#if defined(__x86_64__)
    if (variant == 2) {
        search_v4(ARGUMENTS);
        return;
    }
    if (variant == 1) {
        search_v3(ARGUMENTS);
        return;
    }
#endif
    (void)variant;
    search(ARGUMENTS);
}
