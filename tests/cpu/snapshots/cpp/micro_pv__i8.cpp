// Adds to 1 output rows from r on, 2 x 16 columns, of which the last sixteen are 11: o[c] += sum over
// the chunk's keys j of p[j] * v[j][c], ascending j; of integers by pairs of keys, times the scale of the weights.
// FETCH dims of the next chunk's keys are fetched into L2 beside every key. Params: AttentionMicroParams.
template <int FETCH, int VD, int WIDTH, class Work, class T>
static void pv_i8_m1_v2_l11(Work& w, int r, int column, const Chunk<T>& chunk) {
    constexpr int PAIR = 2, BYTES = FETCH * PAIR * sizeof(T) / Cell<T>::PER;
    constexpr int PER = Cell<T>::PER, PART = PER == 1 ? 2 : 1, WIDE = (VD + PER - 1) / PER;  // of a slot's values
    const auto* p = w.p + r * KEYS;
    float* o = w.o + r * WIDTH + column;
    VI acc0_0 = vi(0);
    VI acc0_1 = vi(0);
    for (int u = chunk.low / 16; 16 * u < chunk.high; ++u) {
        const int begin = 0, end = 16;  // the weights of keys that are not seen are zero
        const T* v = chunk.v[u] + begin * VD + column * PART / PER;
        for (int j = begin; j < end; j += PAIR) {
            for (int i = 0; i < BYTES; i += 64) _mm_prefetch((const char*)chunk.next_k[u] + j / PAIR * BYTES + i, _MM_HINT_T1);
            const VI v0 = code_values(v + 0 * PART / PER, WIDE, 16);
            const VI v1 = code_values(v + 16 * PART / PER, WIDE, 11);
            acc0_0 = dot_pairs_at(acc0_0, v0, p + 0 + 16 * u + j);
            acc0_1 = dot_pairs_at(acc0_1, v1, p + 0 + 16 * u + j);
            v += PAIR * WIDE;
        }
    }
    vstore(o + 0 * WIDTH + 0, fma(to_float(acc0_0), vf(w.p_scale[r + 0]), vload(o + 0 * WIDTH + 0)));
    vstore(o + 0 * WIDTH + 16, fma(to_float(acc0_1), vf(w.p_scale[r + 0]), vload(o + 0 * WIDTH + 16)));
}
