// y = (v - mean) / sqrt(var + eps) * w + b over vectors of 20, v = sum = x + r; 1 vectors per row.
// in: x, r, w, b; out: y, sum (sum may be the same memory as x or r). (row, vector) pairs are shared between threads.
// Params: LayerNormParams.
static void k0_add_layer_norm(const Ctx& c) {
    constexpr int64_t D = 20, GROUPS = 1;
    const float* w = c.input<const float>(2);
    const float* b = c.input<const float>(3);
    const Range items = share(c, (int64_t)c.tokens() * GROUPS);
    for (int64_t i = items.begin; i < items.end; ++i) {
        const int64_t row = i / GROUPS, g = i % GROUPS;
        const float* x = c.input<const float>(0) + row * 20 + g * D;
        float* y = c.output<float>(0) + row * 20 + g * D;
        const float* r = c.input<const float>(1) + row * 20 + g * D;
        float* sum = c.output<float>(1) + row * 20 + g * D;
        add_rows(x, r, sum, D);
        x = sum;
        const float mean = row_sum(x, D) / (float)D;
        const float scale = 1.0f / sqrtf(dot_self(x, mean, D) / (float)D + 1e-05f);
        for (int64_t j = 0; j < D; j += 16) {
            const int n = (int)(D - j < 16 ? D - j : 16);
            VF v = (vload_n(x + j, n) - vf(mean)) * vf(scale);
            v = v * vload_n(w + j, n);
            v = v + vload_n(b + j, n);
            vstore_n(y + j, v, n);
        }
    }
}
