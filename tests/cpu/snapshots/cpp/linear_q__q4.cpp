// y[R, 20] = x W^T: W in 4-bit tiles, groups of 16; x as int8 with a scale and a sum per group.
// in: q i8 [R, 32], scales f32 [R, 2], sums f32 [R, 2], W, bias; out: y.
// Each thread owns a range of tiles, or of rows (part_of). Params: LinearQParams.
static void k0_linear_q(const Ctx& c) {
    constexpr int64_t K = 32, N = 20;
    const int8_t* q = c.input<const int8_t>(0);
    const float *s = c.input<const float>(1), *sums = c.input<const float>(2);
    const Sink sink = {nullptr, c.output<float>(0), 20};
    const QuantTiles w(c.input<const char>(3), 384, 0, N);
    const QuantRows x = {q, s, sums, K, 16};
    const int rows = c.tokens();
    const Part own = part_of(c, rows, w.count);
    const auto row = [&](int i) { return own.rows.begin + i; };
    gemm_quant(QUANT_Q4, w, x, N, own.tiles, (int)(own.rows.end - own.rows.begin), row, row, sink, c.scratch, ICC_PANEL_BYTES);
}
