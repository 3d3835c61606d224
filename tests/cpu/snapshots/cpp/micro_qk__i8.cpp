// Scores of 1 query rows from r on against a chunk of 64 keys: s[j] = sum over d of q[d] * k[j / 16][d][j % 16], one chain of
// additions per score, ascending d; of integers by pairs of dims, times the query's scale. Each step fetches its share of the next chunk's
// values into L2: they lie in blocks anywhere, where the hardware cannot guess them, and all at once would stall. Not into
// L1: the few misses that it can have under way at a time read only two thirds as fast (measured on Zen 4).
// Params: AttentionMicroParams.
template <bool FETCH, int KD, int VD, class Work, class T>
static void qk_i8_m1_v4(Work& w, int r, const Chunk<T>& chunk) {
    constexpr int PAIR = 2, DIMS = (KD + PAIR - 1) / PAIR * PAIR;
    constexpr int64_t STEP = 16 * VD * PAIR * sizeof(T) / KD / Cell<T>::PER;  // bytes of values of sixteen keys, per step over the dims
    const auto* q = w.q + r * DIMS;
    float* s = w.s + r * KEYS;
    const T* k0 = chunk.k[0];
    const T* k1 = chunk.k[1];
    const T* k2 = chunk.k[2];
    const T* k3 = chunk.k[3];
    VI acc0_0 = vi(0);
    VI acc0_1 = vi(0);
    VI acc0_2 = vi(0);
    VI acc0_3 = vi(0);
    for (int d = 0; d < DIMS; d += PAIR) {
        if (FETCH) _mm_prefetch((const char*)chunk.next_v[0] + d / PAIR * STEP, _MM_HINT_T1);
        if (FETCH) _mm_prefetch((const char*)chunk.next_v[1] + d / PAIR * STEP, _MM_HINT_T1);
        if (FETCH) _mm_prefetch((const char*)chunk.next_v[2] + d / PAIR * STEP, _MM_HINT_T1);
        if (FETCH) _mm_prefetch((const char*)chunk.next_v[3] + d / PAIR * STEP, _MM_HINT_T1);
        const VI x0 = code_keys(k0, d, d + 1 < KD);
        k0 += next_keys<T>(d);
        const VI x1 = code_keys(k1, d, d + 1 < KD);
        k1 += next_keys<T>(d);
        const VI x2 = code_keys(k2, d, d + 1 < KD);
        k2 += next_keys<T>(d);
        const VI x3 = code_keys(k3, d, d + 1 < KD);
        k3 += next_keys<T>(d);
        acc0_0 = dot_pairs_at(acc0_0, x0, q + 0 * DIMS + d);
        acc0_1 = dot_pairs_at(acc0_1, x1, q + 0 * DIMS + d);
        acc0_2 = dot_pairs_at(acc0_2, x2, q + 0 * DIMS + d);
        acc0_3 = dot_pairs_at(acc0_3, x3, q + 0 * DIMS + d);
    }
    vstore(s + 0, to_float(acc0_0) * vf(w.q_scale[r + 0]));
    vstore(s + 16, to_float(acc0_1) * vf(w.q_scale[r + 0]));
    vstore(s + 32, to_float(acc0_2) * vf(w.q_scale[r + 0]));
    vstore(s + 48, to_float(acc0_3) * vf(w.q_scale[r + 0]));
}
