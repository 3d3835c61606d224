// Products of one row and one tile of dense weights each, up to four side by side: a chain of sums alone waits for itself.
#pragma once
#include "gemm.h"

// y[c] = sum of x[k] w[k][c], + bias[c] if there is one, for c < n. w: a dense tile of 16 columns.
template <class W> struct LoneProduct { const W* w; const float* x; const float* bias; float* y; int n; };

// COUNT of them. A sum is one chain of fused multiply-adds in ascending k, whatever COUNT is.
template <int COUNT, int64_t K, class W> static void multiply_lone(const LoneProduct<W>* products) {
    constexpr int64_t AHEAD = 1024;  // bytes
    const W* w[COUNT];
    const float* x[COUNT];
    VF sum[COUNT];
    for (int i = 0; i < COUNT; ++i) w[i] = products[i].w, x[i] = products[i].x, sum[i] = vf(0.0f);
    for (int64_t k = 0; k < K; ++k)
        for (int i = 0; i < COUNT; ++i) {
            _mm_prefetch((const char*)(w[i] + k * 16) + AHEAD, _MM_HINT_T0);
            sum[i] = fma(vf(x[i][k]), vload(w[i] + k * 16), sum[i]);
        }
    for (int i = 0; i < COUNT; ++i) {
        const LoneProduct<W>& p = products[i];
        vstore_n(p.y, p.bias ? sum[i] + vload_n(p.bias, p.n) : sum[i], p.n);
    }
}

// Those that a thread has still to do: as many as are multiplied together.
template <int64_t K, class W> struct LoneProducts {
    LoneProduct<W> waiting[4];
    int count = 0;

    void add(const LoneProduct<W>& product) {
        waiting[count++] = product;
        if (count == 4) finish();
    }

    void finish() {
        if (count == 1) multiply_lone<1, K>(waiting);
        if (count == 2) multiply_lone<2, K>(waiting);
        if (count == 3) multiply_lone<3, K>(waiting);
        if (count == 4) multiply_lone<4, K>(waiting);
        count = 0;
    }
};
