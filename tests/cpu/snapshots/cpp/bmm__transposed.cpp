// c[R, 2, 3, 17] = a[R, 2, 3, 9] b[R, 2, N, K]^T; a row stride of 0 is one matrix for all rows.
// in: a, b; out: c. (row, batch, m) items are shared between threads.
// Params: BmmParams.
static void k0_bmm(const Ctx& c) {
    constexpr int64_t B = 2, M = 3, K = 9, N = 17;
    const Range items = share(c, (int64_t)c.tokens() * B * M);
    for (int64_t i = items.begin; i < items.end; ++i) {
        const int64_t row = i / (B * M), batch = i / M % B, m = i % M;
        const float* a = c.input<const float>(0) + row * 54 + (batch * M + m) * K;
        const float* b = c.input<const float>(1) + row * 306 + batch * K * N;
        float* y = c.output<float>(0) + row * 102 + (batch * M + m) * N;
        for (int64_t j = 0; j < N; ++j) y[j] = dot(a, b + j * K, K);
    }
}
