// Scores of 2 query rows from r on against a chunk of 64 keys: s[j] = sum over d of q[d] * k[j / 16][d][j % 16], one chain of
// additions per score, ascending d. Each step fetches its share of the next chunk's
// values into L2: they lie in blocks anywhere, where the hardware cannot guess them, and all at once would stall. Not into
// L1: the few misses that it can have under way at a time read only two thirds as fast (measured on Zen 4).
// Params: AttentionMicroParams.
template <bool FETCH, int KD, int VD, class Work, class T>
static void qk_m2_v2(Work& w, int r, const Chunk<T>& chunk) {
    constexpr int PAIR = 1, DIMS = (KD + PAIR - 1) / PAIR * PAIR;
    constexpr int64_t STEP = 16 * VD * PAIR * sizeof(T) / KD / Cell<T>::PER;  // bytes of values of sixteen keys, per step over the dims
    const auto* q = w.q + r * DIMS;
    float* s = w.s + r * KEYS;
    {
    const T* k0 = chunk.k[0];
    const T* k1 = chunk.k[1];
    VF acc0_0 = vf(0.0f);
    VF acc0_1 = vf(0.0f);
    VF acc1_0 = vf(0.0f);
    VF acc1_1 = vf(0.0f);
    for (int d = 0; d < DIMS; d += PAIR) {
        if (FETCH) _mm_prefetch((const char*)chunk.next_v[0] + d / PAIR * STEP, _MM_HINT_T1);
        if (FETCH) _mm_prefetch((const char*)chunk.next_v[1] + d / PAIR * STEP, _MM_HINT_T1);
        const VF x0 = vload(k0);
        k0 += next_keys<T>(d);
        const VF x1 = vload(k1);
        k1 += next_keys<T>(d);
        const VF q0 = vf(q[0 * DIMS + d]);
        acc0_0 = fma(q0, x0, acc0_0);
        acc0_1 = fma(q0, x1, acc0_1);
        const VF q1 = vf(q[1 * DIMS + d]);
        acc1_0 = fma(q1, x0, acc1_0);
        acc1_1 = fma(q1, x1, acc1_1);
    }
    vstore(s + 0, acc0_0);
    vstore(s + 16, acc0_1);
    vstore(s + 64, acc1_0);
    vstore(s + 80, acc1_1);
    }
    {
    const T* k0 = chunk.k[2];
    const T* k1 = chunk.k[3];
    VF acc0_0 = vf(0.0f);
    VF acc0_1 = vf(0.0f);
    VF acc1_0 = vf(0.0f);
    VF acc1_1 = vf(0.0f);
    for (int d = 0; d < DIMS; d += PAIR) {
        if (FETCH) _mm_prefetch((const char*)chunk.next_v[2] + d / PAIR * STEP, _MM_HINT_T1);
        if (FETCH) _mm_prefetch((const char*)chunk.next_v[3] + d / PAIR * STEP, _MM_HINT_T1);
        const VF x0 = vload(k0);
        k0 += next_keys<T>(d);
        const VF x1 = vload(k1);
        k1 += next_keys<T>(d);
        const VF q0 = vf(q[0 * DIMS + d]);
        acc0_0 = fma(q0, x0, acc0_0);
        acc0_1 = fma(q0, x1, acc0_1);
        const VF q1 = vf(q[1 * DIMS + d]);
        acc1_0 = fma(q1, x0, acc1_0);
        acc1_1 = fma(q1, x1, acc1_1);
    }
    vstore(s + 32, acc0_0);
    vstore(s + 48, acc0_1);
    vstore(s + 96, acc1_0);
    vstore(s + 112, acc1_1);
    }
}
