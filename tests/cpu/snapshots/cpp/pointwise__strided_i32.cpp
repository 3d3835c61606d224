// One generated elementwise chain over [R, 4, 6], sixteen elements of the last axis at a time.
// in: int32_t strides [1, 4]; out: int32_t.
// Pieces of up to 1024 elements of the last axis are shared between threads. Params: PointwiseParams.
static void k0_pointwise(const Ctx& c) {
    constexpr int64_t LAST = 6, PIECE = 1024, PIECES = (LAST + PIECE - 1) / PIECE, LINES = 4;
    const Range items = share(c, (int64_t)c.tokens() * LINES * PIECES);
    for (int64_t i = items.begin; i < items.end; ++i) {
        const int64_t row = i / (LINES * PIECES), line = i / PIECES % LINES, from = i % PIECES * PIECE;
        const int64_t count = LAST - from < PIECE ? LAST - from : PIECE;
        (void)line;
        const int32_t* a0 = c.input<const int32_t>(0) + row * 24 + (line / 1 % 4 * 1) + from * 4;
        int32_t* y0 = c.output<int32_t>(0) + row * 24 + (line / 1 % 4 * 6) + from * 1;
        const auto chain = [&](int64_t j, int n) __attribute__((always_inline)) {
            const VI v0 = load_i<4>(a0, j, n);
            const VI t0 = vremainder(v0, vi(3));
            const VI t1 = select(is_true(t0), v0, vi(-1));
            store_i<1>(y0, j, n, t1);
        };
        int64_t j = 0;
        for (; j + 16 <= count; j += 16) chain(j, 16);
        if (j < count) chain(j, (int)(count - j));
    }
}
