// y[T, 20] += x W[index]^T + bias[index] of the expert that each row is routed to; other rows stay as they are.
// W holds 3 experts of dense bf16 tiles, one after the other. in: x [T, K], W, bias, y, index; out: y.
// K is small (the rank of an adapter): a row's tile is summed in a register. Threads share the tiles. Params: ExpertLinearParams.
static void k0_expert_linear(const Ctx& c) {
    constexpr int64_t K = 8, N = 20, TILES = (N + 15) / 16;
    const int32_t* index = c.input<const int32_t>(4);
    const Range tiles = share(c, TILES);
    for (int64_t i = 0; i < c.tokens(); ++i) {
        const int64_t e = index[i];
        if (e < 0 || e >= 3) continue;
        const float* x = c.input<const float>(0) + i * 8;
        float* y = c.output<float>(0) + i * 20;
        const Bf16* w = c.input<const Bf16>(1) + e * TILES * K * 16;
        for (int64_t t = tiles.begin; t < tiles.end; ++t) {
            const int n = (int)(N - t * 16 < 16 ? N - t * 16 : 16);
            VF sum = vload_n(y + t * 16, n);
            sum = sum + vload_n(c.input<const float>(2) + e * N + t * 16, n);
            for (int64_t k = 0; k < K; ++k) {
                _mm_prefetch((const char*)(w + (t * K + k) * 16) + 2048, _MM_HINT_T0);
                sum = fma(vf(x[k]), vload(w + (t * K + k) * 16), sum);
            }
            vstore_n(y + t * 16, sum, n);
        }
    }
}
