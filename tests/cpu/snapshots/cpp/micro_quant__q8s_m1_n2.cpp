// Micro-kernel of an 8-bit product, both planes: 1 rows of int8 activations x 2 tiles of 16 output rows.
// Tile: per group a 64-byte header (16 f16 scales, 16 u8 zero points, one float that multiplies the scales) and 64-byte
// lines of codes; a line holds 16 rows x 8 k, four k of a row in a 32-bit lane (4 bits: k 0..3 in the low
// nibbles, k 4..7 in the high ones). Activations: panel[k/4][1][4]; scales, sums: [group][1].
// Per group: y += (dot(code, x) - zero * sum(x)) * (weight scale * activation scale). Both terms are integers below
// 2^24, exact in float, so the bits are the same on every ISA level.
// The codes are split: high nibbles in tiles[0..2), low ones in as many tiles behind them, whose lines match.
// Params: QuantMicroParams.
static void quant_q8s_m1_n2(const char* const* tiles, const int8_t* panel, const float* scales, const float* sums,
                         int groups, int group, float* out) {
    const char* w0 = tiles[0];
    const char* fine0 = tiles[2];
    const char* w1 = tiles[1];
    const char* fine1 = tiles[3];
    VF sum0_0 = vf(0.0f);
    VF sum0_1 = vf(0.0f);
    for (int g = 0; g < groups; ++g) {
        const char* h0 = w0;
        w0 += 64;
        const char* h1 = w1;
        w1 += 64;
        VI acc0_0 = begin_bytes(sums[0]);
        VI acc0_1 = begin_bytes(sums[0]);
        for (int i = 0; i < group; i += 8) {
            const VI raw0 = viload(w0);
            _mm_prefetch(w0 + 2048, _MM_HINT_T0);
            w0 += 64;
            const VI rest0 = viload(fine0);
            _mm_prefetch(fine0 + 2048, _MM_HINT_T0);
            fine0 += 64;
            const VI low0 = join_low(raw0, rest0);
            const VI raw1 = viload(w1);
            _mm_prefetch(w1 + 2048, _MM_HINT_T0);
            w1 += 64;
            const VI rest1 = viload(fine1);
            _mm_prefetch(fine1 + 2048, _MM_HINT_T0);
            fine1 += 64;
            const VI low1 = join_low(raw1, rest1);
            const VI lowx0 = set1_quad(panel + 0);
            acc0_0 = dot_u8(acc0_0, low0, lowx0);
            acc0_1 = dot_u8(acc0_1, low1, lowx0);
            const VI high0 = join_high(raw0, rest0);
            const VI high1 = join_high(raw1, rest1);
            const VI highx0 = set1_quad(panel + 4);
            acc0_0 = dot_u8(acc0_0, high0, highx0);
            acc0_1 = dot_u8(acc0_1, high1, highx0);
            panel += 8;
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
        }
        {
            float unit;
            memcpy(&unit, h1 + 48, 4);
            const VF ws = load_f16((const uint16_t*)h1) * vf(unit);
            const VF wz = load_u8((const uint8_t*)h1 + 32);
            {
                const VF dot = to_float(acc0_1);
                const VF exact = fnma(wz, vf(sums[0]), dot);
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
