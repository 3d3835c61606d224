// Micro-kernel of a product with q8_0 blocks: 1 rows of int8 activations x 2 tiles of 16 output rows.
// Tile: per span of 2 groups of 32 k a header of 64 bytes, with the scales of 16 rows next to each other, and 64-byte
// lines of codes; a line holds 16 rows x 4 k, four k of a row in a 32-bit lane, 8 bits of each code. Activations: panel[k/4][1][4]; scales, sums: [group][1].
// Instead of sums of x there are the integers at which the sums of a group begin: minus the zero of all codes times those.
// Params: QuantMicroParams.
static void q8_0_m1_n2(const char* const* tiles, const int8_t* panel, const float* scales, const float* sums,
                         int groups, int group, float* out) {
    const char* w0 = tiles[0];
    group = 32;  // as the compiler now knows
    const char* h0 = w0;
    const char* w1 = tiles[1];
    const char* h1 = w1;
    VF sum0_0 = vf(0.0f);
    VF sum0_1 = vf(0.0f);
    for (int g = 0; g < groups; ++g) {
        if (g % 2 == 0) h0 = w0, w0 += 64;
        if (g % 2 == 0) h1 = w1, w1 += 64;
        VI acc0_0 = set1_quad((const int8_t*)(sums + 0));
        VI acc0_1 = set1_quad((const int8_t*)(sums + 0));
        for (int i = 0; i < group; i += 4) {
            const VI raw0 = viload(w0);
            _mm_prefetch(w0 + 256, _MM_HINT_T0);
            w0 += 64;
            const VI raw1 = viload(w1);
            _mm_prefetch(w1 + 256, _MM_HINT_T0);
            w1 += 64;
            const VI rawx0 = set1_quad(panel + 0);
            acc0_0 = dot_u8(acc0_0, raw0, rawx0);
            acc0_1 = dot_u8(acc0_1, raw1, rawx0);
            panel += 4;
        }
        {
            const VF ws = load_f16((const uint16_t*)h0 + 16 * (g % 2));
            {
                const VF dot = to_float(acc0_0);
                const VF exact = dot;
                const VF step = ws * vf(scales[0]);
                sum0_0 = fma(exact, step, sum0_0);
            }
        }
        {
            const VF ws = load_f16((const uint16_t*)h1 + 16 * (g % 2));
            {
                const VF dot = to_float(acc0_1);
                const VF exact = dot;
                const VF step = ws * vf(scales[0]);
                sum0_1 = fma(exact, step, sum0_1);
            }
        }
        scales += 1;
        sums += 1;
    }
    vstore(out + 0, sum0_0);
    vstore(out + 16, sum0_1);
}
