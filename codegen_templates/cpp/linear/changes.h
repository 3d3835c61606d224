// What the adapter of each row adds to a product (S-LoRA), for the part of the product that the calling thread has made.
#pragma once
#include "gemm.h"

struct Low { const float* x; int64_t stride; };  // A x of each row

// y[r][begin + c] += up[slot][c] low[r] + shift[slot][c] for c < N, in all rows that have a slot. up: SLOTS times dense tiles of 16 columns.
// Rows that follow each other with the same slot are taken four at a time. What is added is one chain of fused multiply-adds in ascending k,
// then the shift, whatever other rows there are. begin: a multiple of 16, so that no other thread writes these columns.
template <int64_t K, int64_t N, int32_t SLOTS, class W>
static void add_change(const Part& own, int64_t begin, Low low, const W* up, const float* shift, const int32_t* slots, const Sink& sink) {
    constexpr int64_t TILES = (N + 15) / 16;
    const int64_t first = own.tiles.begin - begin / 16, last = own.tiles.end - begin / 16;
    const Range tiles = {first > 0 ? first : 0, last < TILES ? last : TILES};
    for (int64_t row = own.rows.begin, next; row < own.rows.end; row = next) {
        const int32_t slot = slots[row];
        for (next = row + 1; next < own.rows.end && slots[next] == slot; ++next) {}
        if (slot < 0 || slot >= SLOTS) continue;
        for (int64_t t = tiles.begin; t < tiles.end; ++t) {
            const W* w = up + (slot * TILES + t) * K * 16;
            const int n = (int)(N - t * 16 < 16 ? N - t * 16 : 16);
            const VF add = vload_n(shift + slot * N + t * 16, n);
            int64_t r = row;
            for (; r + 4 <= next; r += 4) {
                const float* x = low.x + r * low.stride;
                VF sum[4] = {vf(0.0f), vf(0.0f), vf(0.0f), vf(0.0f)};
                for (int64_t k = 0; k < K; ++k) {
                    const VF v = vload(w + k * 16);
                    for (int j = 0; j < 4; ++j) sum[j] = fma(vf(x[j * low.stride + k]), v, sum[j]);
                }
                for (int j = 0; j < 4; ++j) {
                    float* to = sink.y + (r + j) * sink.y_stride + begin + t * 16;
                    vstore_n(to, vload_n(to, n) + (sum[j] + add), n);
                }
            }
            for (; r < next; ++r) {
                const float* x = low.x + r * low.stride;
                VF sum = vf(0.0f);
                for (int64_t k = 0; k < K; ++k) {
                    _mm_prefetch((const char*)(w + k * 16) + 2048, _MM_HINT_T0);
                    sum = fma(vf(x[k]), vload(w + k * 16), sum);
                }
                float* to = sink.y + r * sink.y_stride + begin + t * 16;
                vstore_n(to, vload_n(to, n) + (sum + add), n);
            }
        }
    }
}
