// Micro-kernel of a product with scaled 8-bit floats: 2 activation rows x 1 tiles of 16 output rows, over all of K.
// Weights: per tile the scales of 16 rows as float, then codes[k][16]. Activations: panel[k][2] float.
// Result: out[2][1][16]. Within a block every output is one chain of fused multiply-adds in ascending k, of
// numbers that vload gives without a power of two, which is exact; the chain's end is multiplied by scale and power.
// Params: DenseMicroParams.
static void m2_n1(const char* const* tiles, const float* panel, int64_t k, float* out) {
    const E4m3* w0 = (const E4m3*)tiles[0];
    {
        const int64_t size = k;
        const float* h0 = (const float*)w0;
        w0 += 64;
        VF acc0_0 = vf(0.0f);
        VF acc1_0 = vf(0.0f);
        int64_t i = 0;
        for (; i + 4 <= size; i += 4) {  // a cache line of each tile
            _mm_prefetch((const char*)w0 + 256, _MM_HINT_T0);
            {
                const VF b0 = vload(w0 + 0);
                const VF x0 = vf(panel[0]);
                acc0_0 = fma(x0, b0, acc0_0);
                const VF x1 = vf(panel[1]);
                acc1_0 = fma(x1, b0, acc1_0);
            }
            {
                const VF b0 = vload(w0 + 16);
                const VF x0 = vf(panel[2]);
                acc0_0 = fma(x0, b0, acc0_0);
                const VF x1 = vf(panel[3]);
                acc1_0 = fma(x1, b0, acc1_0);
            }
            {
                const VF b0 = vload(w0 + 32);
                const VF x0 = vf(panel[4]);
                acc0_0 = fma(x0, b0, acc0_0);
                const VF x1 = vf(panel[5]);
                acc1_0 = fma(x1, b0, acc1_0);
            }
            {
                const VF b0 = vload(w0 + 48);
                const VF x0 = vf(panel[6]);
                acc0_0 = fma(x0, b0, acc0_0);
                const VF x1 = vf(panel[7]);
                acc1_0 = fma(x1, b0, acc1_0);
            }
            w0 += 64;
            panel += 8;
        }
        for (; i < size; ++i) {
            const VF b0 = vload(w0 + 0);
            const VF x0 = vf(panel[0]);
            acc0_0 = fma(x0, b0, acc0_0);
            const VF x1 = vf(panel[1]);
            acc1_0 = fma(x1, b0, acc1_0);
            w0 += 16;
            panel += 2;
        }
        {
            const VF scale = vload(h0) * vf(E4M3_UNIT);
            vstore(out + 0, acc0_0 * scale);
            vstore(out + 16, acc1_0 * scale);
        }
    }
}
