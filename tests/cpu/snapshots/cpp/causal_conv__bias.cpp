// y = causal convolution of x along the tokens of each sequence, 24 channels, 4 taps; the state is the last 3 inputs.
// in: x (rows 24 apart), w [4, 24], bias; out: y (rows 24 apart).
// Work items are 64 channels of one sequence, taken from a counter. A token's sum has one order, however its sequence is cut.
// Params: CausalConvParams.
static void k0_causal_conv(const Ctx& c) {
    constexpr int C = 24, K = 4, WIDTH = 64, PARTS = (C + WIDTH - 1) / WIDTH;
    const icc_batch& b = *c.batch;
    const float* x = c.input<const float>(0);
    const float* w = c.input<const float>(1);
    float* y = c.output<float>(0);
    const int64_t items = (int64_t)b.num_seqs * PARTS;
    Items taken(c, items);
    for (int64_t i; taken.take(i);) {
        const int s = (int)(i / PARTS), first = (int)(i % PARTS) * WIDTH;
        const float* before = state_before<32>(c, s);
        for (int at = first; at < first + WIDTH && at < C; at += 16) {
            const int n = tail(C - at);
            VF taps[K], last[K - 1];
            for (int k = 0; k < K; ++k) taps[k] = vload_n(w + k * C + at, n);
            for (int k = 0; k < K - 1; ++k) last[k] = before ? vload_n(before + k * C + at, n) : vf(0.0f);
            const VF bias = vload_n(c.input<const float>(2) + at, n);
            for (int t = b.seq_starts[s]; t < b.seq_starts[s + 1]; ++t) {
                const VF now = vload_n(x + (int64_t)t * 24 + at, n);
                VF sum = bias;
                for (int k = 0; k < K - 1; ++k) sum = fma(taps[k], last[k], sum);
                vstore_n(y + (int64_t)t * 24 + at, fma(taps[K - 1], now, sum), n);
                for (int k = 0; k < K - 2; ++k) last[k] = last[k + 1];
                last[K - 2] = now;
                if (float* behind = state_behind(c, t))
                    for (int k = 0; k < K - 1; ++k) vstore_n(behind + k * C + at, last[k], n);
            }
        }
    }
}
