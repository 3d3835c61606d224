// Micro-kernel of an 8-bit product: 12 rows of int8 activations x a tile of 16 output rows, by instructions that multiply matrices.
// The tile is what micro-kernels with fewer rows read. Its codes go to the stack, eight k of a row side by side, from where
// blocks of rows read them. Activations: panel[k/8][12][8]; scales, sums: [group][12]. Sums of a group are integers, and
// what is made of them is what the others make, so that the bits are theirs.
// Params: QuantMicroParams.
static void quant_q8_m12_n1(const char* const* tiles, const int8_t* panel, const float* scales, const float* sums,
                         int groups, int group, float* out) {
    const char* w0 = tiles[0];
    for (int m = 0; m < 12; ++m) vstore(out + 16 * m, vf(0.0f));
    alignas(64) int8_t codes[16 * MATRIX_K];
    alignas(64) int32_t ints[16 * 12];
    for (int g = 0; g < groups; ++g) {
        const char* h0 = w0;
        w0 += 64;
        for (int first = 0; first < group; first += MATRIX_K) {
            const int count = group - first < MATRIX_K ? group - first : MATRIX_K;
            int8_t* to = codes;
            for (int i = 0; i < count; i += 8, to += 128) {
                VI quads[2];
                {
                    const VI raw0 = viload(w0);
                    _mm_prefetch(w0 + 2048, _MM_HINT_T0);
                    w0 += 64;
                    quads[0] = raw0;
                }
                {
                    const VI raw0 = viload(w0);
                    _mm_prefetch(w0 + 2048, _MM_HINT_T0);
                    w0 += 64;
                    quads[1] = raw0;
                }
                store_eights(to + 0, quads[0], quads[1]);
            }
            multiply_matrices<uint8x16_t, 12, false>(codes, panel, count / 8, ints, first > 0, sums);
            panel += 12 * count;
        }
        {
            float unit;
            memcpy(&unit, h0 + 48, 4);
            const VF ws = load_f16((const uint16_t*)h0) * vf(unit);
            const VF wz = load_u8((const uint8_t*)h0 + 32);
            for (int m = 0; m < 12; ++m) {
                const VF dot = to_float(viload(ints + 16 * m));
                const VF exact = fnma(wz, vf(sums[m]), dot);
                vstore(out + 16 * m, fma(exact, ws * vf(scales[m]), vload(out + 16 * m)));
            }
        }
        scales += 12;
        sums += 12;
    }
}
