// y[T, 2, 20] = x W[index]^T + bias[index]: each (token, slot) pair goes through the expert it is routed to.
// W holds 3 experts of dense f16 tiles, one after the other. in: x ([T, K]), W, bias, index; out: y.
// Pairs are grouped by expert, so that each expert's weights are read once. Params: ExpertLinearParams.
static void k0_expert_linear(const Ctx& c) {
    constexpr int64_t K = 32, N = 20, TILES = (N + 15) / 16, TOPK = 2;
    const float* x = c.input<const float>(0);
    const Range tiles = share(c, TILES);
    by_expert<3>(c.input<const int32_t>(3), c.tokens() * TOPK, [&](int e, const int32_t* pairs, int count) {
        float* y = c.output<float>(0);
        if (e < 0) {  // not routed: zeros
            const int64_t from = tiles.begin * 16, to = tiles.end * 16 < N ? tiles.end * 16 : N;
            if (to > from)
                for (int i = 0; i < count; ++i) memset(y + pairs[i] * N + from, 0, 4 * (size_t)(to - from));
            return;
        }
        const Sink sink = {c.input<const float>(2) + e * N, y, N};
        gemm_dense(DENSE_F16, c.input<const char>(1) + e * (TILES * K * 16 * 2), K * 16 * 2, K, N, tiles, count,
                   [&](int i) { return x + pairs[i] / TOPK * 32; },
                   [&](int i) { return (int64_t)pairs[i]; }, sink, c.scratch, ICC_PANEL_BYTES);
    });
}
