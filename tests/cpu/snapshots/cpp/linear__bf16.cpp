// y[R, 20] = x[R, 32] W^T, W dense in bf16 tiles of 16 rows.
// in: x, W, bias; out: y. Each thread owns a range of tiles.
// Params: LinearParams.
static void k0_linear(const Ctx& c) {
    constexpr int64_t K = 32, N = 20;
    const float* x = c.input<const float>(0);
    const Sink sink = {nullptr, c.output<float>(0), 20};
    gemm_dense(DENSE_BF16, c.input<const char>(1), K * 16 * 2, K, N, share(c, (N + 15) / 16), c.tokens(),
               [&](int i) { return x + i * (int64_t)32; }, [](int i) { return (int64_t)i; }, sink,
               c.scratch, ICC_PANEL_BYTES);
}
