// Adds to 2 output rows, 1 x 16 columns: o[r][c] += sum over keys j of p[r][j] * v[j][c], ascending j.
// p rows are 64 apart, o rows `width`, v rows `stride`. Each key fetches AHEAD bytes from `ahead` on into L2.
// Params: AttentionMicroParams.
template <int AHEAD, class T>
static void pv_m2_v1(const float* p, const T* v, int64_t stride, int keys, float* o, int64_t width, const char* ahead) {
    VF acc0_0 = vload(o + 0 * width + 0);
    VF acc1_0 = vload(o + 1 * width + 0);
    for (int j = 0; j < keys; ++j) {
        for (int i = 0; i < AHEAD; i += 64) _mm_prefetch(ahead + j * AHEAD + i, _MM_HINT_T1);
        const VF v0 = vload(v + 0);
        const VF p0 = vf(p[0 + j]);
        acc0_0 = fma(p0, v0, acc0_0);
        const VF p1 = vf(p[64 + j]);
        acc1_0 = fma(p1, v0, acc1_0);
        v += stride;
    }
    vstore(o + 0 * width + 0, acc0_0);
    vstore(o + 1 * width + 0, acc1_0);
}
