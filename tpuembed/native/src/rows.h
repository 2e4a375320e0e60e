/* Stored rows and their values, for lookup.c and search.c. */

#ifndef TPUEMBED_ROWS_H
#define TPUEMBED_ROWS_H

#include <stdint.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "stored rows are little-endian"
#endif

#if defined(__GNUC__)
#define INLINE static inline __attribute__((always_inline))
#define PREFETCH(place) __builtin_prefetch(place, 0, 3)
#define PREFETCH_TO_WRITE(place) __builtin_prefetch(place, 1, 3)
#define POPCOUNT(bits) __builtin_popcountll(bits)
#define EXPORT __attribute__((visibility("default")))
#else
#error "needs GCC or Clang"
#endif

enum { FLOAT32, BFLOAT16, FLOAT16, INT8 };

#if defined(__x86_64__)
#define V4 __attribute__((target("avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx2,fma,bmi,bmi2,f16c,popcnt")))
#define V3 __attribute__((target("avx2,fma,bmi,bmi2,f16c,popcnt")))
#endif

INLINE float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE float bfloat16_value(uint16_t stored) { return from_bits((uint32_t)stored << 16); }

INLINE float float16_value(uint16_t stored) {
    uint32_t sign = (uint32_t)(stored & 0x8000) << 16, rest = (uint32_t)(stored & 0x7fff) << 13;
    uint32_t normal = rest + ((uint32_t)(127 - 15) << 23);
    /* A subnormal is a multiple of 2^-24: put it below the leading 1 of 2^-14, and subtract that. */
    float small = from_bits(rest + ((uint32_t)(127 - 14) << 23)) - from_bits((uint32_t)(127 - 14) << 23);
    uint32_t small_bits;
    memcpy(&small_bits, &small, sizeof small);
    uint32_t exponent = rest >> 23;
    uint32_t bits = exponent == 0 ? small_bits : exponent == 31 ? rest | 0x7f800000 : normal;
    return from_bits(sign | bits);
}

INLINE void scale_and_centre(const unsigned char *row, int64_t dim, float *scale, float *centre) {
    memcpy(scale, row + dim, sizeof *scale);
    memcpy(centre, row + dim + sizeof *scale, sizeof *centre);
}

/* Write the values of a stored row. */
INLINE void decode(float *restrict out, const unsigned char *row, int64_t storage, int64_t dim) {
    if (storage == FLOAT32) {
        memcpy(out, row, (size_t)dim * sizeof *out);
    } else if (storage == BFLOAT16) {
        const uint16_t *values = (const uint16_t *)(const void *)row;
        for (int64_t i = 0; i < dim; i++) out[i] = bfloat16_value(values[i]);
    } else if (storage == FLOAT16) {
        const uint16_t *values = (const uint16_t *)(const void *)row;
        for (int64_t i = 0; i < dim; i++) out[i] = float16_value(values[i]);
    } else {
        const int8_t *codes = (const int8_t *)row;
        float scale, centre;
        scale_and_centre(row, dim, &scale, &centre);
        for (int64_t i = 0; i < dim; i++) out[i] = (float)codes[i] * scale + centre;
    }
}

#endif
