// Where the recurrent state of a sequence lies: a block of the layer holds one, as its kernel lays it out.
#pragma once
#include "team.h"

ICC_INLINE float* state_block(const Ctx& c, int64_t block) { return (float*)(c.kv + block * c.kv_block_bytes); }

// The state behind the token before those of sequence `s`; null where there is none.
template <int BLOCK> ICC_INLINE const float* state_before(const Ctx& c, int s) {
    const icc_batch& b = *c.batch;
    const int position = b.positions[b.seq_starts[s]];
    return position > 0 ? state_block(c, b.block_tables[(int64_t)s * b.max_blocks + (position - 1) / BLOCK]) : nullptr;
}

// Where the state behind token `t` is to be left; null where it is not.
ICC_INLINE float* state_behind(const Ctx& c, int t) {
    const int32_t block = c.batch->slot_mapping[t];
    return block < 0 ? nullptr : state_block(c, block);
}

// E: how a state's elements are kept, float or Bf16.
// FETCH: asks for what is a page ahead, where a tile is read once: the hardware does not look beyond a page.
// products[n * SIDES][TILE] = rows[n * SIDES][K] by a tile of the state [K][TILE]. A sum goes through the tile's rows in order.
template <int R, int N, int K, int TILE, bool FETCH, class E>
ICC_INLINE void state_products_of(const float* rows, int stride, const E* tile, float* products) {
    VF sum[R][N];
    for (int i = 0; i < R; ++i)
        for (int n = 0; n < N; ++n) sum[i][n] = vf(0.0f);
    for (int r = 0; r < K; ++r) {
        VF x[N];
        if (FETCH)
            for (int l = 0; l < TILE * (int)sizeof(E); l += 64) _mm_prefetch((const char*)(tile + r * TILE) + 4096 + l, _MM_HINT_T0);
        for (int n = 0; n < N; ++n) x[n] = vload(tile + r * TILE + 16 * n);
        for (int i = 0; i < R; ++i)
            for (int n = 0; n < N; ++n) sum[i][n] = fma(vf(rows[i * stride + r]), x[n], sum[i][n]);
    }
    for (int i = 0; i < R; ++i)
        for (int n = 0; n < N; ++n) vstore(products + i * TILE + 16 * n, sum[i][n]);
}
template <int SIDES, int K, int TILE, class E>
ICC_INLINE void state_products(int n, const float* rows, int stride, const E* tile, float* products) {
    int i = 0;
    for (; i + 4 <= n * SIDES; i += 4)
        for (int l = 0; l < TILE; l += 16)
            state_products_of<4, 1, K, TILE, false>(rows + i * stride, stride, tile + l, products + i * TILE + l);
    for (; i < n * SIDES; i += SIDES)
        state_products_of<SIDES, TILE / 16, K, TILE, true>(rows + i * stride, stride, tile, products + i * TILE);
}

// Sixteen columns of a tile: to = decay from + sum_j k_j u_j^T, the tokens in order.
template <int R, int COUNT, int TILE, bool BY_ROW, class E>
ICC_INLINE void state_update_rows(const E* from, E* to, const float* decay, const float* k, int k_stride, const float* u, int u_stride) {
    VF x[R];
    for (int r = 0; r < R; ++r) x[r] = vf(decay[BY_ROW ? r : 0]) * vload(from + r * TILE);
    for (int j = 0; j < COUNT; ++j) {
        const VF v = vload(u + j * u_stride);
        for (int r = 0; r < R; ++r) x[r] = fma(vf(k[j * k_stride + r]), v, x[r]);
    }
    for (int r = 0; r < R; ++r) vstore(to + r * TILE, x[r]);
}
template <int K, int COUNT, int TILE, bool BY_ROW, class E>
ICC_INLINE void state_update(const E* from, E* to, const float* decay, const float* k, int k_stride, const float* u, int u_stride) {
    int r = 0;
    for (; r + 4 <= K; r += 4)
        state_update_rows<4, COUNT, TILE, BY_ROW>(from + r * TILE, to + r * TILE, decay + (BY_ROW ? r : 0), k + r, k_stride, u, u_stride);
    for (; r < K; ++r)
        state_update_rows<1, COUNT, TILE, BY_ROW>(from + r * TILE, to + r * TILE, decay + (BY_ROW ? r : 0), k + r, k_stride, u, u_stride);
}
