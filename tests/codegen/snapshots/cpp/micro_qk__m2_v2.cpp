// Scores of 2 query rows against 2 x 16 keys: s[r][j] = sum over d of q[r][d] * k[d][j].
// q rows are q_stride apart, k rows and s rows 64 (the keys of a chunk). One chain of additions per score, ascending d.
// Params: AttentionMicroParams.
static void qk_m2_v2(const float* q, int64_t q_stride, const float* k, int dims, float* s) {
    VF acc0_0 = vf(0.0f);
    VF acc0_1 = vf(0.0f);
    VF acc1_0 = vf(0.0f);
    VF acc1_1 = vf(0.0f);
    for (int d = 0; d < dims; ++d) {
        const VF k0 = vload(k + 0);
        const VF k1 = vload(k + 16);
        const VF q0 = vf(q[0 * q_stride + d]);
        acc0_0 = fma(q0, k0, acc0_0);
        acc0_1 = fma(q0, k1, acc0_1);
        const VF q1 = vf(q[1 * q_stride + d]);
        acc1_0 = fma(q1, k0, acc1_0);
        acc1_1 = fma(q1, k1, acc1_1);
        k += 64;
    }
    vstore(s + 0, acc0_0);
    vstore(s + 16, acc0_1);
    vstore(s + 64, acc1_0);
    vstore(s + 80, acc1_1);
}
