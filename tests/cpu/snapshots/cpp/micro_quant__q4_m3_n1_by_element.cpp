// Micro-kernel of a 4-bit product: 3 rows of int8 activations x 1 tiles of 16 output rows.
// Tile: per group a 64-byte header (16 f16 scales, 16 u8 zero points, one float that multiplies the scales) and 64-byte
// lines of codes; a line holds 16 rows x 8 k, four k of a row in a 32-bit lane (4 bits: k 0..3 in the low
// nibbles, k 4..7 in the high ones). Activations: panel[k/4][3][4]; scales, sums: [group][3].
// Per group: y += (dot(code, x) - zero * sum(x)) * (weight scale * activation scale). Both terms are integers below
// 2^24, exact in float, so the bits are the same on every ISA level.
// Params: QuantMicroParams.
static void q4_m3_n1(const char* const* tiles, const int8_t* panel, const float* scales, const float* sums,
                         int groups, int group, float* out) {
    const char* w0 = tiles[0];
    VF sum0_0 = vf(0.0f);
    VF sum1_0 = vf(0.0f);
    VF sum2_0 = vf(0.0f);
    for (int g = 0; g < groups; ++g) {
        const char* h0 = w0;
        w0 += 64;
        VI acc0_0 = vi(0);
        VI acc1_0 = vi(0);
        VI acc2_0 = vi(0);
        for (int i = 0; i < group; i += 8) {
            const VI raw0 = viload(w0);
            _mm_prefetch(w0 + 2048, _MM_HINT_T0);
            w0 += 64;
            const VI low0 = low_nibbles(raw0);
            const __m128i x0 = _mm_loadu_si128((const __m128i*)(panel + 0));
            const __m128i x1 = _mm_loadu_si128((const __m128i*)(panel + 16));  // scales follow where x ends
            acc0_0 = dot_u4_lane<0>(acc0_0, low0, x0);
            acc1_0 = dot_u4_lane<1>(acc1_0, low0, x0);
            acc2_0 = dot_u4_lane<2>(acc2_0, low0, x0);
            const VI high0 = high_nibbles(raw0);
            acc0_0 = dot_u4_lane<3>(acc0_0, high0, x0);
            acc1_0 = dot_u4_lane<0>(acc1_0, high0, x1);
            acc2_0 = dot_u4_lane<1>(acc2_0, high0, x1);
            panel += 24;
        }
        {
            float unit;
            memcpy(&unit, h0 + 48, 4);
            const VF ws = load_f16((const uint16_t*)h0) * vf(unit);
            const VF wz = load_u8((const uint8_t*)h0 + 32);
            {
                const VF dot = to_float(acc0_0);
                const VF exact = fnma(wz, vf(sums[0]), dot);
                const VF step = ws * vf(scales[0]);
                sum0_0 = fma(exact, step, sum0_0);
            }
            {
                const VF dot = to_float(acc1_0);
                const VF exact = fnma(wz, vf(sums[1]), dot);
                const VF step = ws * vf(scales[1]);
                sum1_0 = fma(exact, step, sum1_0);
            }
            {
                const VF dot = to_float(acc2_0);
                const VF exact = fnma(wz, vf(sums[2]), dot);
                const VF step = ws * vf(scales[2]);
                sum2_0 = fma(exact, step, sum2_0);
            }
        }
        scales += 3;
        sums += 3;
    }
    vstore(out + 0, sum0_0);
    vstore(out + 16, sum1_0);
    vstore(out + 32, sum2_0);
}
