// o = S^T q with S <- exp(decay) S + k u^T, u = beta v: 2 heads of 256 x 16, 2 of queries and keys.
// in: q, k (rows 512, 512 apart), v (rows 32 apart), decay (rows 512 apart), beta; out: o (rows 32 apart).
// Work items are 16 value columns of one head of one sequence, taken from a counter; their part of the state stays in
// the nearest cache from the sequence's first token to its last. Both products with the state are sums over its old rows:
//   S^T k = sum e_i k_i S_i,  o = sum e_i q_i S_i + (k . q) u,  S_i <- e_i S_i + k_i u
// A token's sums have one order, however its sequence is cut. Params: GatedScanParams.
static void k0_gated_scan(const Ctx& c) {
    constexpr int H = 2, K = 256, V = 16, WIDTH = 16, N = WIDTH / 16;
    constexpr int PARTS = (V + WIDTH - 1) / WIDTH, ROWS = (K + 15) / 16 * 16;
    struct Work { float e[ROWS], k[ROWS], ek[ROWS], eq[ROWS], state[K * WIDTH]; };
    static_assert(sizeof(Work) <= ICC_SCRATCH_BYTES, "scratch");
    Work& w = *(Work*)c.scratch;
    const icc_batch& b = *c.batch;
    const int64_t items = (int64_t)b.num_seqs * H * PARTS;
    for (int64_t i; (i = c.next->fetch_add(1, std::memory_order_relaxed)) < items;) {
        const int part = (int)(i % PARTS), head = (int)(i / PARTS % H), seq = (int)(i / PARTS / H);
        const int at = part * WIDTH;  // first column
        const int64_t place = (int64_t)head * K * V + at;
        const auto columns = [&](int n) { return V - at - 16 * n < 16 ? V - at - 16 * n : 16; };  // of vector n
        if (const float* before = state_before<16>(c, seq)) {
            for (int r = 0; r < K; ++r)
                for (int n = 0; n < N; ++n)
                    vstore(w.state + r * WIDTH + 16 * n, columns(n) > 0 ? vload_n(before + place + (int64_t)r * V + 16 * n, columns(n)) : vf(0.0f));
        } else {
            memset(w.state, 0, sizeof w.state);
        }
        for (int t = b.seq_starts[seq]; t < b.seq_starts[seq + 1]; ++t) {
            const float* q = c.input<const float>(0) + (int64_t)t * 512 + head / 1 * K;
            const float* k = c.input<const float>(1) + (int64_t)t * 512 + head / 1 * K;
            const float* v = c.input<const float>(2) + (int64_t)t * 32 + (int64_t)head * V + at;
            const float* decay = c.input<const float>(3) + (int64_t)t * 512 + head * K;
            VF both = vf(0.0f);
            for (int r = 0; r < K; r += 16) {
                const int n = K - r < 16 ? K - r : 16;
                const VF kr = vload_n(k + r, n), qr = vload_n(q + r, n);
                const VF e = vexp(vload_n(decay + r, n));
                both = fma(kr, qr, both);
                vstore(w.e + r, e), vstore(w.k + r, kr), vstore(w.ek + r, e * kr), vstore(w.eq + r, e * qr);
            }
            const VF kq = vf(hsum(both));
            VF u[N], o[N];
            for (int n = 0; n < N; ++n) o[n] = vf(0.0f);
            for (int r = 0; r < K; ++r)
                for (int n = 0; n < N; ++n) {
                    const VF x = vload(w.state + r * WIDTH + 16 * n);
                    o[n] = fma(vf(w.eq[r]), x, o[n]);
                }
            for (int n = 0; n < N; ++n) {
                u[n] = columns(n) > 0 ? vload_n(v + 16 * n, columns(n)) : vf(0.0f);
                o[n] = fma(kq, u[n], o[n]);
                if (columns(n) > 0) vstore_n(c.output<float>(0) + (int64_t)t * 32 + (int64_t)head * V + at + 16 * n, o[n], columns(n));
            }
            for (int r = 0; r < K; ++r)
                for (int n = 0; n < N; ++n) {
                    float* x = w.state + r * WIDTH + 16 * n;
                    vstore(x, fma(vf(w.k[r]), u[n], vf(w.e[r]) * vload(x)));
                }
            if (float* behind = state_behind(c, t))
                for (int r = 0; r < K; ++r)
                    for (int n = 0; n < N; ++n)
                        if (columns(n) > 0) vstore_n(behind + place + (int64_t)r * V + 16 * n, vload(w.state + r * WIDTH + 16 * n), columns(n));
        }
    }
}
