// The 3 smallest of the last axis of x[R, 2, 9] in order, and where they are; ties go to the lower index.
// in: x i32; out: values i32, indices i32. Insertion into a sorted list; (row, outer) pairs are shared between threads.
// Params: TopkParams.
static void k0_topk(const Ctx& c) {
    typedef int32_t T;
    constexpr int64_t OUTER = 2, N = 9;
    constexpr int K = 3;
    const Range items = share(c, (int64_t)c.tokens() * OUTER);
    for (int64_t i = items.begin; i < items.end; ++i) {
        const T* x = c.input<const T>(0) + i / OUTER * 18 + i % OUTER * N;
        T* values = c.output<T>(0) + i / OUTER * 6 + i % OUTER * K;
        int32_t* indices = c.output<int32_t>(1) + i / OUTER * 6 + i % OUTER * K;
        int filled = 0;
        for (int64_t j = 0; j < N; ++j) {
            const T v = x[j];
            if (filled == K && !(v < values[K - 1])) continue;
            int at = filled < K ? filled++ : K - 1;
            while (at > 0 && v < values[at - 1]) {
                values[at] = values[at - 1], indices[at] = indices[at - 1];
                --at;
            }
            values[at] = v, indices[at] = (int32_t)j;
        }
    }
}
