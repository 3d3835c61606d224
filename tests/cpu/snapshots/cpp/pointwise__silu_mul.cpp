// One generated elementwise chain over [R, 4, 6], sixteen elements of the last axis at a time.
// in: float strides [6, 1], float strides [0, 1]; out: float.
// Pieces of up to 1024 elements of the last axis are shared between threads. Params: PointwiseParams.
static void k0_pointwise(const Ctx& c) {
    constexpr int64_t LAST = 6, PIECE = 1024, PIECES = (LAST + PIECE - 1) / PIECE, LINES = 4;
    const Range items = share(c, (int64_t)c.tokens() * LINES * PIECES);
    for (int64_t i = items.begin; i < items.end; ++i) {
        const int64_t row = i / (LINES * PIECES), line = i / PIECES % LINES, from = i % PIECES * PIECE;
        const int64_t count = LAST - from < PIECE ? LAST - from : PIECE;
        (void)line;
        const float* a0 = c.input<const float>(0) + row * 24 + (line / 1 % 4 * 6) + from * 1;
        const float* a1 = c.input<const float>(1) + row * 0 + 0 + from * 1;
        float* y0 = c.output<float>(0) + row * 24 + (line / 1 % 4 * 6) + from * 1;
        const auto chain = [&](int64_t j, int n) __attribute__((always_inline)) {
            const VF v0 = load_f<1>(a0, j, n);
            const VF v1 = load_f<1>(a1, j, n);
            const VF t0 = vsilu(v0);
            const VF t1 = (t0 * v1);
            store_f<1>(y0, j, n, t1);
        };
        int64_t j = 0;
        for (; j + 16 <= count; j += 16) chain(j, 16);
        if (j < count) chain(j, (int)(count - j));
    }
}
