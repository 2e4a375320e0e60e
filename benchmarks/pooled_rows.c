/* The bound of `benchmarks.lookups`: sums of float32 rows of width 64, without any check. */

#include <stdint.h>

#define DIM 64
#define AHEAD 16

typedef float floats __attribute__((vector_size(64), aligned(4)));

/* tables: of each feature [rows, DIM]. ids: [end, count * hot], out: [end, count * DIM], of which the rows from begin on are used. */
void sum_rows(const float *const *tables, int64_t count, const int64_t *ids, int64_t hot, float *out, int64_t begin, int64_t end) {
    for (int64_t f = 0; f < count; f++) {
        const float *table = tables[f];
        int64_t ahead_row = begin, ahead_column = 0;
        for (int64_t i = -AHEAD, total = (end - begin) * hot; i < 0; i++) {
            if (AHEAD + i >= total) break;
            const char *row = (const char *)(table + ids[ahead_row * count * hot + f * hot + ahead_column] * DIM);
            for (int byte = 0; byte < 256; byte += 64) __builtin_prefetch(row + byte);
            if (++ahead_column == hot) ahead_column = 0, ahead_row++;
        }
        for (int64_t b = begin; b < end; b++) {
            const int64_t *row_ids = ids + b * count * hot + f * hot;
            floats sums[4] = {{0}};
            for (int64_t h = 0; h < hot; h++) {
                if (ahead_row < end) {
                    const char *row = (const char *)(table + ids[ahead_row * count * hot + f * hot + ahead_column] * DIM);
                    for (int byte = 0; byte < 256; byte += 64) __builtin_prefetch(row + byte);
                    if (++ahead_column == hot) ahead_column = 0, ahead_row++;
                }
                const floats *row = (const floats *)(const void *)(table + row_ids[h] * DIM);
                for (int i = 0; i < 4; i++) sums[i] += row[i];
            }
            floats *written = (floats *)(void *)(out + (b * count + f) * DIM);
            for (int i = 0; i < 4; i++) written[i] = sums[i];
        }
    }
}
