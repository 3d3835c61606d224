// Loops over one contiguous row that several kernels share. Four partial sums, combined in a fixed order.
#pragma once
#include "vmath.h"

ICC_INLINE int tail(int64_t left) { return (int)(left < 16 ? left : 16); }

// Sixteen numbers times the Hadamard matrix of sixteen: in each of four turns lanes meet those one bit of their number away.
typedef float Sixteen __attribute__((vector_size(64)));
typedef int32_t SixteenLanes __attribute__((vector_size(64)));
ICC_INLINE VF sixteen(VF x) {
    Sixteen v;
    memcpy(&v, &x, 64);
    const SixteenLanes lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const Sixteen other1 = __builtin_shuffle(v, lane ^ 1);
    v = other1 + ((lane & 1) ? -v : v);
    const Sixteen other2 = __builtin_shuffle(v, lane ^ 2);
    v = other2 + ((lane & 2) ? -v : v);
    const Sixteen other4 = __builtin_shuffle(v, lane ^ 4);
    v = other4 + ((lane & 4) ? -v : v);
    const Sixteen other8 = __builtin_shuffle(v, lane ^ 8);
    v = other8 + ((lane & 8) ? -v : v);
    VF y;
    memcpy(&y, &v, 64);
    return y;
}

ICC_INLINE void add_rows(const float* x, const float* r, float* sum, int64_t n) {
    for (int64_t j = 0; j < n; j += 16) {
        const int w = tail(n - j);
        vstore_n(sum + j, vload_n(x + j, w) + vload_n(r + j, w), w);
    }
}

ICC_INLINE float row_sum(const float* x, int64_t n) {
    VF s[4] = {vf(0.0f), vf(0.0f), vf(0.0f), vf(0.0f)};
    int64_t j = 0;
    for (; j + 64 <= n; j += 64)
        for (int u = 0; u < 4; ++u) s[u] = s[u] + vload(x + j + 16 * u);
    for (; j < n; j += 16) s[0] = s[0] + vload_n(x + j, tail(n - j));
    return hsum((s[0] + s[1]) + (s[2] + s[3]));
}

// Sum of (x - shift)^2.
ICC_INLINE float dot_self(const float* x, float shift, int64_t n) {
    VF s[4] = {vf(0.0f), vf(0.0f), vf(0.0f), vf(0.0f)};
    int64_t j = 0;
    for (; j + 64 <= n; j += 64)
        for (int u = 0; u < 4; ++u) {
            const VF v = vload(x + j + 16 * u) - vf(shift);
            s[u] = fma(v, v, s[u]);
        }
    for (; j < n; j += 16) {
        const int w = tail(n - j);
        const VF v = select(lt(iota(), vi(w)), vload_n(x + j, w) - vf(shift), vf(0.0f));
        s[0] = fma(v, v, s[0]);
    }
    return hsum((s[0] + s[1]) + (s[2] + s[3]));
}

ICC_INLINE float dot(const float* x, const float* y, int64_t n) {
    VF s[2] = {vf(0.0f), vf(0.0f)};
    int64_t j = 0;
    for (; j + 32 <= n; j += 32)
        for (int u = 0; u < 2; ++u) s[u] = fma(vload(x + j + 16 * u), vload(y + j + 16 * u), s[u]);
    for (; j < n; j += 16) {
        const int w = tail(n - j);
        s[0] = fma(vload_n(x + j, w), vload_n(y + j, w), s[0]);
    }
    return hsum(s[0] + s[1]);
}

// Rotates the first R dims of one head in place by one row of the tables (R wide); pairs as in compiler/ops/attention.py.
template <int R, bool INTERLEAVED> ICC_INLINE void rotate_head(float* x, const float* cs, const float* sn) {
    for (int i = 0; i < R / 2; ++i) {
        const int a = INTERLEAVED ? 2 * i : i, b = INTERLEAVED ? 2 * i + 1 : i + R / 2;
        const float u = x[a], v = x[b];
        x[a] = u * cs[a] - v * sn[a];
        x[b] = v * cs[b] + u * sn[b];
    }
}

ICC_INLINE int64_t clamp_row(int64_t i, int64_t rows) { return i < 0 ? 0 : i >= rows ? rows - 1 : i; }
