// y = h of each channel before the token; then h <- max(decay + h, x): 24 channels.
// in: x (rows 24 apart), decay (rows 24 apart); out: y (rows 24 apart).
// Work items are 64 channels of one sequence, taken from a counter. Params: ChannelScanParams.
static void k0_channel_scan(const Ctx& c) {
    constexpr int C = 24, WIDTH = 64, PARTS = (C + WIDTH - 1) / WIDTH;
    const icc_batch& b = *c.batch;
    const int64_t items = (int64_t)b.num_seqs * PARTS;
    Items taken(c, items);
    for (int64_t i; taken.take(i);) {
        const int seq = (int)(i / PARTS), first = (int)(i % PARTS) * WIDTH;
        const float* before = state_before<32>(c, seq);
        for (int at = first; at < first + WIDTH && at < C; at += 16) {
            const int n = tail(C - at);
            VF h = before ? vload_n(before + at, n) : vf(-1e+38f);
            for (int t = b.seq_starts[seq]; t < b.seq_starts[seq + 1]; ++t) {
                const VF x = vload_n(c.input<const float>(0) + (int64_t)t * 24 + at, n);
                vstore_n(c.output<float>(0) + (int64_t)t * 24 + at, h, n);
                const VF decay = vload_n(c.input<const float>(1) + (int64_t)t * 24 + at, n);
                h = vmax(decay + h, x);
                if (float* behind = state_behind(c, t)) vstore_n(behind + at, h, n);
            }
        }
    }
}
