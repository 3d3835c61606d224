// y = softmax(x) over the last axis of x[R, 2, 17].
// in: x; out: y (may be the same memory). (row, outer) pairs are shared between threads.
// Params: SoftmaxParams.
static void k0_softmax(const Ctx& c) {
    constexpr int64_t OUTER = 2, N = 17;
    const Range items = share(c, (int64_t)c.tokens() * OUTER);
    for (int64_t i = items.begin; i < items.end; ++i) {
        const float* x = c.input<const float>(0) + i / OUTER * 34 + i % OUTER * N;
        float* y = c.output<float>(0) + i / OUTER * 34 + i % OUTER * N;
        VF top = vf(-INFINITY);
        for (int64_t j = 0; j < N; j += 16) {
            const VB live = lt(iota(), vi(tail(N - j)));
            top = max_raw(top, select(live, vload_n(x + j, tail(N - j)), vf(-INFINITY)));
        }
        const float peak = hmax(top);
        VF sum = vf(0.0f);
        for (int64_t j = 0; j < N; j += 16) {
            const int w = tail(N - j);
            const VF e = vexp(vload_n(x + j, w) - vf(peak));
            sum = sum + select(lt(iota(), vi(w)), e, vf(0.0f));
            vstore_n(y + j, e, w);
        }
        const VF total = vf(hsum(sum));
        for (int64_t j = 0; j < N; j += 16) vstore_n(y + j, vload_n(y + j, tail(N - j)) / total, tail(N - j));
    }
}
