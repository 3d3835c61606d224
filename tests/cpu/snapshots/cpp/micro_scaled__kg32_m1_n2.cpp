// Micro-kernel of a product with scaled 8-bit floats: 1 activation rows x 2 tiles of 16 output rows, over all of K.
// Weights: per block of 32 k the scales of 16 rows as float, then codes[k][16]. Activations: panel[k][1] float.
// Result: out[1][2][16]. Within a block every output is one chain of fused multiply-adds in ascending k, of
// numbers that vload gives without a power of two, which is exact; the chain's end is multiplied by scale and power.
// Params: DenseMicroParams.
static void m1_n2(const char* const* tiles, const float* panel, int64_t k, float* out) {
    const E4m3* w0 = (const E4m3*)tiles[0];
    const E4m3* w1 = (const E4m3*)tiles[1];
    vstore(out + 0, vf(0.0f));
    vstore(out + 16, vf(0.0f));
    for (int64_t left = k; left > 0; left -= 32) {
        const int64_t size = left < 32 ? left : 32;
        const float* h0 = (const float*)w0;
        w0 += 64;
        const float* h1 = (const float*)w1;
        w1 += 64;
        VF acc0_0 = vf(0.0f);
        VF acc0_1 = vf(0.0f);
        int64_t i = 0;
        for (; i + 4 <= size; i += 4) {  // a cache line of each tile
            _mm_prefetch((const char*)w0 + 256, _MM_HINT_T0);
            _mm_prefetch((const char*)w1 + 256, _MM_HINT_T0);
            {
                const VF b0 = vload(w0 + 0);
                const VF b1 = vload(w1 + 0);
                const VF x0 = vf(panel[0]);
                acc0_0 = fma(x0, b0, acc0_0);
                acc0_1 = fma(x0, b1, acc0_1);
            }
            {
                const VF b0 = vload(w0 + 16);
                const VF b1 = vload(w1 + 16);
                const VF x0 = vf(panel[1]);
                acc0_0 = fma(x0, b0, acc0_0);
                acc0_1 = fma(x0, b1, acc0_1);
            }
            {
                const VF b0 = vload(w0 + 32);
                const VF b1 = vload(w1 + 32);
                const VF x0 = vf(panel[2]);
                acc0_0 = fma(x0, b0, acc0_0);
                acc0_1 = fma(x0, b1, acc0_1);
            }
            {
                const VF b0 = vload(w0 + 48);
                const VF b1 = vload(w1 + 48);
                const VF x0 = vf(panel[3]);
                acc0_0 = fma(x0, b0, acc0_0);
                acc0_1 = fma(x0, b1, acc0_1);
            }
            w0 += 64;
            w1 += 64;
            panel += 4;
        }
        for (; i < size; ++i) {
            const VF b0 = vload(w0 + 0);
            const VF b1 = vload(w1 + 0);
            const VF x0 = vf(panel[0]);
            acc0_0 = fma(x0, b0, acc0_0);
            acc0_1 = fma(x0, b1, acc0_1);
            w0 += 16;
            w1 += 16;
            panel += 1;
        }
        {
            const VF scale = vload(h0) * vf(E4M3_UNIT);
            vstore(out + 0, fma(acc0_0, scale, vload(out + 0)));
        }
        {
            const VF scale = vload(h1) * vf(E4M3_UNIT);
            vstore(out + 16, fma(acc0_1, scale, vload(out + 16)));
        }
    }
}
