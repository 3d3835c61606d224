// Adds to 2 output rows from r on, 1 x 16 columns: o[c] += sum over
// the chunk's keys j of p[j] * v[j][c], ascending j.
// FETCH dims of the next chunk's keys are fetched into L2 beside every key. Params: AttentionMicroParams.
template <int FETCH, int VD, int WIDTH, class Work, class T>
static void pv_m2_v1(Work& w, int r, int column, const Chunk<T>& chunk) {
    constexpr int PAIR = 1, BYTES = FETCH * PAIR * sizeof(T) / Cell<T>::PER;
    const auto* p = w.s + r * KEYS;
    float* o = w.o + r * WIDTH + column;
    VF acc0_0 = vload(o + 0 * WIDTH + 0);
    VF acc1_0 = vload(o + 1 * WIDTH + 0);
    for (int u = chunk.low / 16; 16 * u < chunk.high; ++u) {
        const int begin = chunk.low > 16 * u ? chunk.low - 16 * u : 0, end = chunk.high - 16 * u < 16 ? chunk.high - 16 * u : 16;
        const T* v = chunk.v[u] + begin * VD + column * PAIR;
        for (int j = begin; j < end; j += PAIR) {
            for (int i = 0; i < BYTES; i += 64) _mm_prefetch((const char*)chunk.next_k[u] + j / PAIR * BYTES + i, _MM_HINT_T1);
            const VF v0 = vload(v + 0);
            const VF p0 = vf(p[0 + 16 * u + j]);
            acc0_0 = fma(p0, v0, acc0_0);
            const VF p1 = vf(p[64 + 16 * u + j]);
            acc1_0 = fma(p1, v0, acc1_0);
            v += PAIR * VD;
        }
    }
    vstore(o + 0 * WIDTH + 0, acc0_0);
    vstore(o + 1 * WIDTH + 0, acc1_0);
}
