// y = running sum over the last axis of x[R, 2, 9].
// in: x f32; out: y. (row, outer) pairs are shared between threads.
// Params: CumsumParams.
static void k0_cumsum(const Ctx& c) {
    typedef float T;
    constexpr int64_t OUTER = 2, N = 9;
    const Range items = share(c, (int64_t)c.tokens() * OUTER);
    for (int64_t i = items.begin; i < items.end; ++i) {
        const T* x = c.input<const T>(0) + i / OUTER * 18 + i % OUTER * N;
        T* y = c.output<T>(0) + i / OUTER * 18 + i % OUTER * N;
        T sum = 0;
        for (int64_t j = 0; j < N; ++j) y[j] = sum += x[j];
    }
}
