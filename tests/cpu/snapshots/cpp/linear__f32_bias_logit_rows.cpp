// y[R, 20] = x[R, 32] W^T + bias, W dense in f32 tiles of 16 rows.
// in: x, W, bias; out: y. Each thread owns a range of tiles, or of rows (part_of).
// Params: LinearParams.
static void k0_linear(const Ctx& c) {
    constexpr int64_t K = 32, N = 20;
    const float* x = c.input<const float>(0);
    const Sink sink = {c.input<const float>(2), c.output<float>(0), 20};
    const Part own = part_of(c, c.logit_rows(), (N + 15) / 16);
    gemm_dense(DENSE_F32, c.input<const char>(1), K * 16 * 4, K, N, own.tiles, (int)(own.rows.end - own.rows.begin),
               [&](int i) { return x + (own.rows.begin + i) * 40; }, [&](int i) { return own.rows.begin + i; }, sink,
               c.scratch, ICC_PANEL_BYTES);
}
