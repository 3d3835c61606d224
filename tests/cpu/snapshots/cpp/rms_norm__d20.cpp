// y = x / sqrt(mean(square) + eps) * w over vectors of 20; 1 vectors per row.
// in: x, w; out: y (sum may be the same memory as x or r). (row, vector) pairs are shared between threads.
// Params: RmsNormParams.
static void k0_rms_norm(const Ctx& c) {
    constexpr int64_t D = 20, GROUPS = 1;
    const float* w = c.input<const float>(1);
    const Range items = share(c, (int64_t)c.tokens() * GROUPS);
    for (int64_t i = items.begin; i < items.end; ++i) {
        const int64_t row = i / GROUPS, g = i % GROUPS;
        const float* x = c.input<const float>(0) + row * 20 + g * D;
        float* y = c.output<float>(0) + row * 20 + g * D;
        const float scale = 1.0f / sqrtf(dot_self(x, 0.0f, D) / (float)D + 1e-05f);
        for (int64_t j = 0; j < D; j += 16) {
            const int n = (int)(D - j < 16 ? D - j : 16);
            VF v = vload_n(x + j, n) * vf(scale);
            v = v * vload_n(w + j, n);
            vstore_n(y + j, v, n);
        }
    }
}
