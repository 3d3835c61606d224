// y = x with src added at index along the last axis of x[R, 2, 7]; indices outside are skipped.
// in: x f32, index i32 [R, 2, 4], src (tensor); out: y. (row, outer) pairs are shared between threads.
// Params: ScatterParams.
static void k0_scatter(const Ctx& c) {
    typedef float T;
    constexpr int64_t OUTER = 2, N = 7, M = 4;
    const Range items = share(c, (int64_t)c.tokens() * OUTER);
    for (int64_t i = items.begin; i < items.end; ++i) {
        const T* x = c.input<const T>(0) + i / OUTER * 14 + i % OUTER * N;
        const int32_t* index = c.input<const int32_t>(1) + i / OUTER * 8 + i % OUTER * M;
        const T* src = c.input<const T>(2) + i / OUTER * 8 + i % OUTER * M;
        T* y = c.output<T>(0) + i / OUTER * 14 + i % OUTER * N;
        memmove(y, x, sizeof(T) * N);
        for (int64_t j = 0; j < M; ++j)
            if (index[j] >= 0 && index[j] < N)
                y[index[j]] += src[j];
    }
}
