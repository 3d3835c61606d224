// o = S^T q with S <- exp(decay) S + k u^T, u = beta (v - S^T k): 4 heads of 24 x 40, 2 of queries and keys.
// in: q, k (rows 48, 48 apart), v (rows 160 apart), decay (rows 4 apart), beta; out: o (rows 160 apart).
// Chunks of 8 tokens, which begin at positions that are multiples of 8. With S0 the matrix behind the chunk before,
// W0 the decay since then, and w_j that since token j of the chunk:
//   u_t = beta (v_t - S0^T (W0 k_t) - sum_j<t w_j (k_j . k_t) u_j),  o_t = S0^T (W0 q_t) + sum_j<=t w_j (k_j . q_t) u_j
// so that a prompt is products with S0, which only the chunk's end changes: S0 <- W0 S0 + sum_j w_j k_j u_j^T. The state of a
// sequence is S0, in tiles of 32 columns, and the k_j, u_j, w_j and W0 of the chunk it is in: a token reads S0 and writes a row.
// Every sum has one order, however its sequence is cut. Work items are heads of a sequence, taken from a counter. Params: GatedScanParams.
static void k0_gated_scan(const Ctx& c) {
    constexpr int H = 4, K = 24, V = 40, CHUNK = 8, TILE = 32, COLUMNS = 64;
    constexpr int ROWS = 32, SIDES = 2;  // of products with S0: keys too, or queries only
    constexpr int DECAYS = 16;
    struct Pending { float k[CHUNK][ROWS], u[CHUNK][COLUMNS], w[16], w0[DECAYS]; };  // w: of scalar decays, else the k are decayed
    typedef float E;
    constexpr int64_t HEAD = 2336, MATRIX = 1536;
    static_assert(sizeof(Pending) == 4 * (HEAD - MATRIX) && sizeof(E) * K * COLUMNS == 4 * MATRIX, "state");
    struct Work {
        Pending p;
        float rows[SIDES * CHUNK][ROWS], products[SIDES * CHUNK][TILE], with_k[CHUNK][CHUNK], with_q[CHUNK][CHUNK];
        E state[K * COLUMNS];
    };
    static_assert(sizeof(Work) <= ICC_SCRATCH_BYTES, "scratch");
    Work& w = *(Work*)c.scratch;
    const icc_batch& b = *c.batch;
    const int64_t items = (int64_t)b.num_seqs * H;
    Items taken(c, items);
    for (int64_t i; taken.take(i);) {
        const int head = (int)(i % H), seq = (int)(i / H), begin = b.seq_starts[seq], end = b.seq_starts[seq + 1];
        int count = b.positions[begin] % CHUNK;  // tokens of the chunk that S0 does not have
        const E* s0 = w.state;
        const float* pending = nullptr;  // a block that has the first `count` of them
        if (const float* before = state_before<32>(c, seq)) {
            s0 = (const E*)(before + head * HEAD);
            pending = before + head * HEAD + MATRIX;
            if (count) {
                const Pending& known = *(const Pending*)pending;
                memcpy(w.p.k, known.k, 4 * (size_t)count * ROWS);
                memcpy(w.p.u, known.u, 4 * (size_t)count * COLUMNS);
                memcpy(w.p.w, known.w, sizeof w.p.w + sizeof w.p.w0);
            }
        } else {
            memset(w.state, 0, sizeof w.state);
        }
        int stored = count;  // of them, those that `pending` has
        for (int t = begin; t < end;) {
            if (count == 0)
                for (int r = 0; r < DECAYS; r += 16) vstore(w.p.w0 + r, vf(1.0f));
            int n = 1;  // tokens up to the chunk's end, or one behind which the state is left
            while (n < CHUNK - count && t + n < end && b.slot_mapping[t + n - 1] < 0) ++n;
            for (int x = 0; x < n; ++x) {
                const float* q = c.input<const float>(0) + (int64_t)(t + x) * 48 + head / 2 * K;
                const float* k = c.input<const float>(1) + (int64_t)(t + x) * 48 + head / 2 * K;
                const float* decay = c.input<const float>(3) + (int64_t)(t + x) * 4 + head;
                const int at = count + x;
                const VF e = vexp(vf(*decay)), w0 = e * vload(w.p.w0);
                vstore(w.p.w0, w0);
                vstore(w.p.w, e * vload(w.p.w));
                w.p.w[at] = 1.0f;
                VF kq[CHUNK], kk[CHUNK];
                for (int j = 0; j <= at; ++j) kq[j] = vf(0.0f), kk[j] = vf(0.0f);
                for (int r = 0; r < K; r += 16) {
                    const int m = tail(K - r);
                    const VF kr = vload_n(k + r, m), qr = vload_n(q + r, m);
                    vstore(w.p.k[at] + r, kr);
                    vstore(w.rows[SIDES * x] + r, w0 * qr);
                    vstore(w.rows[2 * x + 1] + r, w0 * kr);
                    for (int j = 0; j <= at; ++j) {
                        const VF other = vload(w.p.k[j] + r);
                        kq[j] = fma(other, qr, kq[j]), kk[j] = fma(other, kr, kk[j]);
                    }
                }
                for (int j = 0; j <= at; ++j) {
                    w.with_q[x][j] = w.p.w[j] * hsum(kq[j]);
                    w.with_k[x][j] = w.p.w[j] * hsum(kk[j]);
                }
            }
            for (int first = 0; first < V; first += TILE) {
                state_products<SIDES, K, TILE>(n, w.rows[0], ROWS, s0 + first * K, w.products[0]);
                for (int x = 0; x < n; ++x)
                    for (int l = 0; l < TILE && first + l < V; l += 16) {
                        const int m = tail(V - first - l), at = first + l;
                        VF u = vload_n(c.input<const float>(2) + (int64_t)(t + x) * 160 + (int64_t)head * V + at, m);
                        VF o = vload(w.products[SIDES * x] + l);
                        u = u - vload(w.products[2 * x + 1] + l);
                        for (int j = 0; j < count + x; ++j) {
                            const VF other = vload(w.p.u[j] + at);
                            o = fma(vf(w.with_q[x][j]), other, o), u = fnma(vf(w.with_k[x][j]), other, u);
                        }
                        u = u * vf(c.input<const float>(4)[(int64_t)(t + x) * 4 + head]);
                        vstore(w.p.u[count + x] + at, u);
                        o = fma(vf(w.with_q[x][count + x]), u, o);
                        vstore_n(c.output<float>(0) + (int64_t)(t + x) * 160 + (int64_t)head * V + at, o, m);
                    }
            }
            count += n, t += n;
            float* behind = state_behind(c, t - 1);
            if (behind) behind += head * HEAD;
            if (count == CHUNK) {
                for (int j = 0; j < CHUNK; ++j)
                    for (int r = 0; r < ROWS; r += 16) vstore(w.p.k[j] + r, vf(w.p.w[j]) * vload(w.p.k[j] + r));
                E* to = behind ? (E*)behind : w.state;
                for (int at = 0; at < COLUMNS; at += 16)
                    state_update<K, CHUNK, TILE, false>(s0 + at / TILE * TILE * K + at % TILE, to + at / TILE * TILE * K + at % TILE, w.p.w0, w.p.k[0], ROWS, w.p.u[0] + at, COLUMNS);
                s0 = to, pending = nullptr, count = stored = 0;
            } else if (behind) {
                Pending& left = *(Pending*)(behind + MATRIX);
                if (s0 != (const E*)behind) memcpy(behind, s0, sizeof w.state);
                if (pending != behind + MATRIX) stored = 0;
                memcpy(left.k[stored], w.p.k[stored], 4 * (size_t)(count - stored) * ROWS);
                memcpy(left.u[stored], w.p.u[stored], 4 * (size_t)(count - stored) * COLUMNS);
                memcpy(left.w, w.p.w, sizeof w.p.w + sizeof w.p.w0);
                pending = behind + MATRIX, stored = count;
            }
        }
    }
}
