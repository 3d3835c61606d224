// y[R, 2, 9] = x[..., index[..., j]] along the last axis of x[R, 9]; indices are clamped.
// in: x f32, index i32 of 4 experts, the expert of each line i32; out: y. (row, outer) pairs are shared between threads.
// Params: GatherParams.
static void k0_gather(const Ctx& c) {
    typedef float T;
    constexpr int64_t OUTER = 2, N = 9, M = 9;
    const Range items = share(c, (int64_t)c.tokens() * OUTER);
    for (int64_t i = items.begin; i < items.end; ++i) {
        const T* x = c.input<const T>(0) + i / OUTER * 9;
        const int32_t expert = c.input<const int32_t>(2)[i / OUTER * 2 + i % OUTER];
        const int32_t* index = c.input<const int32_t>(1) + clamp_row(expert, 4) * M;
        T* y = c.output<T>(0) + i / OUTER * 18 + i % OUTER * M;
        for (int64_t j = 0; j < M; ++j) y[j] = x[clamp_row(index[j], N)];
    }
}
