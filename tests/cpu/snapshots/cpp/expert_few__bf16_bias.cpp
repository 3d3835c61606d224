// y[T, 20] = x W[index]^T + bias[index]: each row goes through the expert it is routed to, which has few tiles, as A of adapters has.
// W holds 3 experts of dense bf16 tiles, one after the other. in: x, W, bias, index; out: y. Params: ExpertLinearParams.
// Threads take turns in having more of the tiles. Rows of the same expert are one product; the tiles of rows that have theirs alone are lone ones.
// Either way an output is one chain of fused multiply-adds in ascending k.
static void k0_expert_linear(const Ctx& c) {
    constexpr int64_t K = 32, N = 20, TILES = (N + 15) / 16;
    using W = Bf16;
    const float* x = c.input<const float>(0);
    int turn = c.tid;
    LoneProducts<K, W> lone;
    by_expert<3>(c.input<const int32_t>(3), c.tokens(), [&](int e, const int32_t* rows, int count) {
        float* y = c.output<float>(0);
        if (e < 0) {  // not routed: zeros
            if (turn++ % c.threads == 0)
                for (int i = 0; i < count; ++i) memset(y + rows[i] * N, 0, 4 * (size_t)N);
            return;
        }
        const float* bias = c.input<const float>(2) + e * N;
        if (count == 1) {
            for (int64_t tile = 0; tile < TILES; ++tile) {
                if (turn++ % c.threads) continue;
                const int64_t column = tile * 16;
                lone.add({c.input<const W>(1) + (e * TILES + tile) * K * 16, x + rows[0] * 32, bias + column,
                          y + rows[0] * N + column, (int)(N - column < 16 ? N - column : 16)});
            }
            return;
        }
        const int64_t me = turn++ % c.threads;
        const Range tiles{TILES * me / c.threads, TILES * (me + 1) / c.threads};
        const Sink sink = {bias, y, N};
        gemm_dense(DENSE_BF16, c.input<const char>(1) + e * (TILES * K * 16 * 2), K * 16 * 2, K, N, tiles, count,
                   [&](int i) { return x + rows[i] * 32; },
                   [&](int i) { return (int64_t)rows[i]; }, sink, c.scratch, ICC_PANEL_BYTES);
    });
    lone.finish();
}
