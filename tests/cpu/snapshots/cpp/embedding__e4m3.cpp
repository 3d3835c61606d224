// y[R, 40] = W[ids]; ids are clamped into [0, 50). W is e4m3_kg32 (tiles of 16 rows, read in place).
// in: ids i32, W; out: y f32. Rows are shared between threads.
// Params: EmbeddingParams.
static void k0_embedding(const Ctx& c) {
    constexpr int64_t N = 40;
    const int32_t* ids = c.input<const int32_t>(0);
    const char* w = c.input<const char>(1);
    const Range rows = share(c, c.tokens());
    for (int64_t i = rows.begin; i < rows.end; ++i) {
        const int64_t id = clamp_row(ids[i], 50);
        float* y = c.output<float>(0) + i * 40;
        const char* tile = w + id / 16 * 768;
        const int lane = (int)(id % 16);
        for (int64_t first = 0; first < N; first += 32) {
            const int64_t size = N - first < 32 ? N - first : 32;
            const float scale = ((const float*)tile)[lane];
            for (int64_t j = 0; j < size; ++j) y[first + j] = e4m3_value((uint8_t)tile[64 + 16 * j + lane]) * scale;
            tile += 64 + 16 * size;
        }
    }
}
