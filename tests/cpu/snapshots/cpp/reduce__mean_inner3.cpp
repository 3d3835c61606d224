// y[R, 2, 3] = mean over the middle axis of x[R, 2, 7, 3]. NaN wins amax, amin and argmax, as in torch.
// in: x f32; out: y f32. (row, outer) pairs are shared between threads.
// Params: ReduceParams.
static void k0_reduce(const Ctx& c) {
    typedef float T;
    constexpr int64_t OUTER = 2, N = 7, INNER = 3;
    const Range items = share(c, (int64_t)c.tokens() * OUTER);
    for (int64_t i = items.begin; i < items.end; ++i) {
        const T* x = c.input<const T>(0) + i / OUTER * 42 + i % OUTER * (N * INNER);
        auto* y = c.output<float>(0) + i / OUTER * 6 + i % OUTER * INNER;
        for (int64_t j = 0; j < INNER; ++j) {
            T best = x[j];
            for (int64_t k = 1; k < N; ++k) {
                const T v = x[k * INNER + j];
                best += v;
            }
            y[j] = best / (T)N;
        }
    }
}
