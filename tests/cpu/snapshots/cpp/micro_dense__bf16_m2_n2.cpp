// Micro-kernel of a dense product: 2 activation rows x 2 tiles of 16 output rows, over all of K.
// Weights: tile[k][16] of Bf16. Activations: panel[k][2] float. Result: out[2][2][16].
// Every output is one chain of fused multiply-adds in ascending k, whatever mr and nt are.
// Accumulators are named because g++ keeps an array of them on the stack.
// Params: DenseMicroParams.
static void dense_bf16_m2_n2(const char* const* tiles, const float* panel, int64_t k, float* out) {
    const Bf16* w0 = (const Bf16*)tiles[0];
    const Bf16* w1 = (const Bf16*)tiles[1];
    VF acc0_0 = vf(0.0f);
    VF acc0_1 = vf(0.0f);
    VF acc1_0 = vf(0.0f);
    VF acc1_1 = vf(0.0f);
#pragma GCC unroll 4
    for (int64_t i = 0; i < k; ++i) {
        const VF b0 = vload(w0);
        _mm_prefetch((const char*)w0 + 2048, _MM_HINT_T0);
        w0 += 16;
        const VF b1 = vload(w1);
        _mm_prefetch((const char*)w1 + 2048, _MM_HINT_T0);
        w1 += 16;
        const VF x0 = vf(panel[0]);
        acc0_0 = fma(x0, b0, acc0_0);
        acc0_1 = fma(x0, b1, acc0_1);
        const VF x1 = vf(panel[1]);
        acc1_0 = fma(x1, b0, acc1_0);
        acc1_1 = fma(x1, b1, acc1_1);
        panel += 2;
    }
    vstore(out + 0, acc0_0);
    vstore(out + 16, acc0_1);
    vstore(out + 32, acc1_0);
    vstore(out + 48, acc1_1);
}
