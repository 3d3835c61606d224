// y[T, 20] = x W[index]^T + bias[index]: each row goes through the expert it is routed to, which has few tiles, as A of adapters has.
// W holds 3 experts of dense bf16 tiles, one after the other. in: x, W, bias, index; out: y. Params: ExpertLinearParams.
// Threads take turns in having more of the tiles. Rows of the same expert are one product. Rows that have theirs alone are multiplied four at a
// time: a single chain of sums would wait for itself. Either way an output is one chain of fused multiply-adds in ascending k.
static void k0_expert_linear(const Ctx& c) {
    constexpr int64_t K = 32, N = 20, TILES = (N + 15) / 16, AHEAD = 1024;
    using W = const Bf16;
    const float* x = c.input<const float>(0);
    int turn = c.tid, alone = 0;
    int32_t expert[4], row[4];
    const auto multiply_alone = [&] {
        for (int i = alone; i < 4; ++i) expert[i] = expert[0], row[i] = row[0];  // of which nothing is stored
        for (int64_t tile = 0; tile < TILES; ++tile) {
            if (turn++ % c.threads) continue;
            const int n = (int)(N - tile * 16 < 16 ? N - tile * 16 : 16);
            W* w0 = c.input<W>(1) + (expert[0] * TILES + tile) * K * 16;
            const float* x0 = x + row[0] * 32;
            VF sum0 = vf(0.0f);
            W* w1 = c.input<W>(1) + (expert[1] * TILES + tile) * K * 16;
            const float* x1 = x + row[1] * 32;
            VF sum1 = vf(0.0f);
            W* w2 = c.input<W>(1) + (expert[2] * TILES + tile) * K * 16;
            const float* x2 = x + row[2] * 32;
            VF sum2 = vf(0.0f);
            W* w3 = c.input<W>(1) + (expert[3] * TILES + tile) * K * 16;
            const float* x3 = x + row[3] * 32;
            VF sum3 = vf(0.0f);
            for (int64_t k = 0; k < K; ++k) {
                _mm_prefetch((const char*)(w0 + k * 16) + AHEAD, _MM_HINT_T0);
                sum0 = fma(vf(x0[k]), vload(w0 + k * 16), sum0);
                _mm_prefetch((const char*)(w1 + k * 16) + AHEAD, _MM_HINT_T0);
                sum1 = fma(vf(x1[k]), vload(w1 + k * 16), sum1);
                _mm_prefetch((const char*)(w2 + k * 16) + AHEAD, _MM_HINT_T0);
                sum2 = fma(vf(x2[k]), vload(w2 + k * 16), sum2);
                _mm_prefetch((const char*)(w3 + k * 16) + AHEAD, _MM_HINT_T0);
                sum3 = fma(vf(x3[k]), vload(w3 + k * 16), sum3);
            }
            if (alone > 0) {
                sum0 = sum0 + vload_n(c.input<const float>(2) + expert[0] * N + tile * 16, n);
                vstore_n(c.output<float>(0) + row[0] * N + tile * 16, sum0, n);
            }
            if (alone > 1) {
                sum1 = sum1 + vload_n(c.input<const float>(2) + expert[1] * N + tile * 16, n);
                vstore_n(c.output<float>(0) + row[1] * N + tile * 16, sum1, n);
            }
            if (alone > 2) {
                sum2 = sum2 + vload_n(c.input<const float>(2) + expert[2] * N + tile * 16, n);
                vstore_n(c.output<float>(0) + row[2] * N + tile * 16, sum2, n);
            }
            if (alone > 3) {
                sum3 = sum3 + vload_n(c.input<const float>(2) + expert[3] * N + tile * 16, n);
                vstore_n(c.output<float>(0) + row[3] * N + tile * 16, sum3, n);
            }
        }
        alone = 0;
    };
    by_expert<3>(c.input<const int32_t>(3), c.tokens(), [&](int e, const int32_t* rows, int count) {
        float* y = c.output<float>(0);
        if (e < 0) {  // not routed: zeros
            if (turn++ % c.threads == 0)
                for (int i = 0; i < count; ++i) memset(y + rows[i] * N, 0, 4 * (size_t)N);
            return;
        }
        if (count == 1) {
            expert[alone] = e, row[alone] = rows[0];
            if (++alone == 4) multiply_alone();
            return;
        }
        const int64_t me = turn++ % c.threads;
        const Range tiles{TILES * me / c.threads, TILES * (me + 1) / c.threads};
        const Sink sink = {c.input<const float>(2) + e * N, y, N};
        gemm_dense(DENSE_BF16, c.input<const char>(1) + e * (TILES * K * 16 * 2), K * 16 * 2, K, N, tiles, count,
                   [&](int i) { return x + rows[i] * 32; },
                   [&](int i) { return (int64_t)rows[i]; }, sink, c.scratch, ICC_PANEL_BYTES);
    });
    if (alone) multiply_alone();
}
