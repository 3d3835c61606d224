// y = sum / sqrt(mean(square) + eps) * w over vectors of 16, sum = x + r; 3 vectors per row.
// in: x, r, w; out: y, sum (sum may be the same memory as x or r). (row, vector) pairs are shared between threads.
// Params: RmsNormParams.
static void k0_add_rms_norm(const Ctx& c) {
    constexpr int64_t D = 16, GROUPS = 3;
    const float* w = c.input<const float>(2);
    const Range items = share(c, (int64_t)c.tokens() * GROUPS);
    for (int64_t i = items.begin; i < items.end; ++i) {
        const int64_t row = i / GROUPS, g = i % GROUPS;
        const float* x = c.input<const float>(0) + row * 48 + g * D;
        float* y = c.output<float>(0) + row * 48 + g * D;
        const float* r = c.input<const float>(1) + row * 64 + g * D;
        float* sum = c.output<float>(1) + row * 48 + g * D;
        add_rows(x, r, sum, D);
        x = sum;
        const float scale = 1.0f / sqrtf(dot_self(x, 0.0f, D) / (float)D + 1e-06f);
        for (int64_t j = 0; j < D; j += 16) {
            const int n = (int)(D - j < 16 ? D - j : 16);
            VF v = vload_n(x + j, n) * vf(scale);
            v = v * vload_n(w + j, n);
            vstore_n(y + j, v, n);
        }
    }
}
