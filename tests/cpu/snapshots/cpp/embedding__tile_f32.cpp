// y[R, 20] = W[ids]; ids are clamped into [0, 50). W is tile_f32 (tiles of 16 rows, read in place).
// in: ids i32, W; out: y f32. Rows are shared between threads.
// Params: EmbeddingParams.
static void k0_embedding(const Ctx& c) {
    constexpr int64_t N = 20;
    const int32_t* ids = c.input<const int32_t>(0);
    const char* w = c.input<const char>(1);
    const Range rows = share(c, c.tokens());
    for (int64_t i = rows.begin; i < rows.end; ++i) {
        const int64_t id = clamp_row(ids[i], 50);
        float* y = c.output<float>(0) + i * 20;
        const float* tile = (const float*)w + id / 16 * (N * 16) + id % 16;
        for (int64_t j = 0; j < N; ++j) y[j] = value(tile[j * 16]);
    }
}
