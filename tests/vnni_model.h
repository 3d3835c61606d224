// The two instructions of AVX-VNNI as plain C, by the names of their intrinsics, for machines without them.
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

static inline __m256i model_dpbusd(__m256i acc, __m256i u, __m256i s) {
    int32_t sums[8];
    uint8_t x[32];
    int8_t y[32];
    memcpy(sums, &acc, 32), memcpy(x, &u, 32), memcpy(y, &s, 32);
    for (int i = 0; i < 32; ++i) sums[i / 4] += x[i] * y[i];
    memcpy(&acc, sums, 32);
    return acc;
}
static inline __m256i model_dpwssd(__m256i acc, __m256i a, __m256i b) {
    int32_t sums[8];
    int16_t x[16], y[16];
    memcpy(sums, &acc, 32), memcpy(x, &a, 32), memcpy(y, &b, 32);
    for (int i = 0; i < 16; ++i) sums[i / 2] += x[i] * y[i];
    memcpy(&acc, sums, 32);
    return acc;
}
#undef _mm256_dpbusd_epi32
#undef _mm256_dpwssd_epi32
#define _mm256_dpbusd_epi32 model_dpbusd
#define _mm256_dpwssd_epi32 model_dpwssd
