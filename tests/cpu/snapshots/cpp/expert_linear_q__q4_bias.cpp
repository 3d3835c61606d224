// y[T, 2, 20] = x W[index]^T + bias[index] with 4-bit weights in groups of 16 and int8 activations.
// W holds 3 experts of quantized tiles, one after the other. in: q, scales, sums ([T, ...]), W, bias, index; out: y.
// Pairs are grouped by expert, so that each expert's weights are read once. Params: ExpertLinearQParams.
static void k0_expert_linear_q(const Ctx& c) {
    constexpr int64_t K = 32, N = 20, TILES = (N + 15) / 16, TOPK = 2;
    const int8_t* q = c.input<const int8_t>(0);
    const float *s = c.input<const float>(1), *sums = c.input<const float>(2);
    const Range tiles = share(c, TILES);
    by_expert<3>(c.input<const int32_t>(5), c.tokens() * TOPK, [&](int e, const int32_t* pairs, int count) {
        float* y = c.output<float>(0);
        if (e < 0) {  // not routed: zeros
            const int64_t from = tiles.begin * 16, to = tiles.end * 16 < N ? tiles.end * 16 : N;
            if (to > from)
                for (int i = 0; i < count; ++i) memset(y + pairs[i] * N + from, 0, 4 * (size_t)(to - from));
            return;
        }
        const Sink sink = {c.input<const float>(4) + e * N, y, N};
        const QuantTiles w(c.input<const char>(3) + e * (TILES * 384), 384, 0, N);
        gemm_quant(QUANT_Q4, w, {q, s, sums, K, 16}, N, tiles, count,
                   [&](int i) { return (int64_t)pairs[i] / TOPK; },
                   [&](int i) { return (int64_t)pairs[i]; }, sink, c.scratch, ICC_PANEL_BYTES);
    });
}
