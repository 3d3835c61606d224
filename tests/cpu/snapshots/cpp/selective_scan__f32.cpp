// y = s . c with s <- exp(dt a) s + dt x b: 24 channels of 8 states each, which lie [state][channel].
// in: x, dt (rows 24, 24 apart), a [8, 24], b, c (rows 8, 8 apart); out: y (rows 24 apart).
// Work items are 16 channels of one sequence, taken from a counter. Params: SelectiveScanParams.
static void k0_selective_scan(const Ctx& c) {
    constexpr int C = 24, N = 8, WIDTH = 16, PARTS = (C + WIDTH - 1) / WIDTH;
    typedef float E;
    const icc_batch& b = *c.batch;
    const float* a = c.input<const float>(2);
    const int64_t items = (int64_t)b.num_seqs * PARTS;
    Items taken(c, items);
    for (int64_t i; taken.take(i);) {
        const int seq = (int)(i / PARTS), first = (int)(i % PARTS) * WIDTH;
        const E* before = (const E*)state_before<32>(c, seq);
        for (int at = first; at < first + WIDTH && at < C; at += 16) {
            const int n = tail(C - at);
            VF state[N];
            for (int k = 0; k < N; ++k) state[k] = before ? vload_n(before + (int64_t)k * C + at, n) : vf(0.0f);
            for (int t = b.seq_starts[seq]; t < b.seq_starts[seq + 1]; ++t) {
                const VF dt = vload_n(c.input<const float>(1) + (int64_t)t * 24 + at, n);
                const VF dx = dt * vload_n(c.input<const float>(0) + (int64_t)t * 24 + at, n);
                const float* bs = c.input<const float>(3) + (int64_t)t * 8;
                const float* cs = c.input<const float>(4) + (int64_t)t * 8;
                VF y = vf(0.0f);
                for (int k = 0; k < N; ++k) {
                    state[k] = fma(dx, vf(bs[k]), vexp(dt * vload_n(a + (int64_t)k * C + at, n)) * state[k]);
                    y = fma(state[k], vf(cs[k]), y);
                }
                vstore_n(c.output<float>(0) + (int64_t)t * 24 + at, y, n);
                E* behind = (E*)state_behind(c, t);
                for (int k = 0; k < N && behind; ++k) {
                    vstore_n(behind + (int64_t)k * C + at, state[k], n);
                }
            }
        }
    }
}
