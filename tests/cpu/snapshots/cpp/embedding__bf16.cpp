// y[R, 20] = W[ids]; ids are clamped into [0, 50). W is bf16.
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
        const Bf16* row = (const Bf16*)w + id * N;
        for (int64_t j = 0; j < N; j += 16) vstore_n(y + j, vload_n(row + j, tail(N - j)), tail(N - j));
    }
}
