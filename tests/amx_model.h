// The instructions of AMX that kernels use as plain C, by the names of their intrinsics, for machines without them. It
// traps where the processor would: tiles that are not configured, and shapes that do not fit each other.
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

static __thread struct { uint8_t palette, rows[8]; uint16_t bytes[8]; uint8_t data[8][16][64]; } model_tiles;

static inline void model_check(int fits) {
    if (!fits) __builtin_trap();
}
static inline void model_loadconfig(const void* config) {
    const uint8_t* c = (const uint8_t*)config;
    memset(&model_tiles, 0, sizeof model_tiles);
    memcpy(model_tiles.bytes, c + 16, 16), memcpy(model_tiles.rows, c + 48, 8);
    for (int t = 0; t < 8; ++t) model_check(model_tiles.rows[t] <= 16 && model_tiles.bytes[t] <= 64);
    for (int i = 1; i < 64; ++i) model_check(!((i < 16) | ((i >= 32) & (i < 48)) | (i >= 56)) || !c[i]);
    model_check(c[0] == 1);
    model_tiles.palette = 1;
}
static inline void model_release(void) { memset(&model_tiles, 0, sizeof model_tiles); }
static inline void model_live(int t) { model_check(model_tiles.palette == 1 && model_tiles.rows[t] && model_tiles.bytes[t]); }
static inline void model_zero(int t) {
    model_live(t);
    memset(model_tiles.data[t], 0, 1024);
}
static inline void model_loadd(int t, const void* base, int64_t stride) {
    model_zero(t);
    for (int r = 0; r < model_tiles.rows[t]; ++r) memcpy(model_tiles.data[t][r], (const char*)base + r * stride, model_tiles.bytes[t]);
}
static inline void model_stored(int t, void* base, int64_t stride) {
    model_live(t);
    for (int r = 0; r < model_tiles.rows[t]; ++r) memcpy((char*)base + r * stride, model_tiles.data[t][r], model_tiles.bytes[t]);
}
// sums[m][n] += the four products of a[m][4 k ..] and b[k][4 n ..], for each k; whose bytes are signed is said per side.
static inline void model_dp(int sums, int a, int b, int a_signed, int b_signed) {
    const uint8_t* rows = model_tiles.rows;
    const uint16_t* bytes = model_tiles.bytes;
    model_live(sums), model_live(a), model_live(b);
    model_check(rows[sums] == rows[a] && bytes[sums] == bytes[b] && bytes[a] == 4 * rows[b] && sums != a && sums != b && a != b);
    for (int m = 0; m < rows[sums]; ++m)
        for (int n = 0; n < bytes[sums] / 4; ++n) {
            uint32_t sum;
            memcpy(&sum, &model_tiles.data[sums][m][4 * n], 4);
            for (int k = 0; k < rows[b]; ++k)
                for (int i = 0; i < 4; ++i) {
                    const uint8_t x = model_tiles.data[a][m][4 * k + i], y = model_tiles.data[b][k][4 * n + i];
                    sum += (uint32_t)((a_signed ? (int8_t)x : x) * (b_signed ? (int8_t)y : y));
                }
            memcpy(&model_tiles.data[sums][m][4 * n], &sum, 4);
        }
}
#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbssd
#undef _tile_dpbsud
#undef _tile_dpbusd
#define _tile_loadconfig model_loadconfig
#define _tile_release model_release
#define _tile_zero model_zero
#define _tile_loadd model_loadd
#define _tile_stored model_stored
#define _tile_dpbssd(sums, a, b) model_dp(sums, a, b, 1, 1)
#define _tile_dpbsud(sums, a, b) model_dp(sums, a, b, 1, 0)
#define _tile_dpbusd(sums, a, b) model_dp(sums, a, b, 0, 1)
