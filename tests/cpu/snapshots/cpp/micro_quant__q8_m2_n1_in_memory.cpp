// Micro-kernel of an 8-bit product: 2 rows of int8 activations x 1 tiles of 16 output rows.
// Tile: per group a 64-byte header (16 f16 scales, 16 u8 zero points, one float that multiplies the scales) and 64-byte
// lines of codes; a line holds 16 rows x 4 k, four k of a row in a 32-bit lane (4 bits: k 0..3 in the low
// nibbles, k 4..7 in the high ones). Activations: panel[k/4][2][4]; scales, sums: [group][2].
// Per group: y += (dot(code, x) - zero * sum(x)) * (weight scale * activation scale). Both terms are integers below
// 2^24, exact in float, so the bits are the same on every ISA level.
// Params: QuantMicroParams.
static void quant_q8_m2_n1(const char* const* tiles, const int8_t* panel, const float* scales, const float* sums,
                         int groups, int group, float* out) {
    const char* w0 = tiles[0];
    vstore(out + 0, vf(0.0f));
    vstore(out + 16, vf(0.0f));
    for (int g = 0; g < groups; ++g) {
        const char* h0 = w0;
        w0 += 64;
        VI acc0_0 = begin_bytes(sums[0]);
        VI acc1_0 = begin_bytes(sums[1]);
        for (int i = 0; i < group; i += 4) {
            const VI raw0 = viload(w0);
            _mm_prefetch(w0 + 2048, _MM_HINT_T0);
            w0 += 64;
            acc0_0 = dot_u8_at(acc0_0, raw0, panel + 0);
            acc1_0 = dot_u8_at(acc1_0, raw0, panel + 4);
            panel += 8;
        }
        // The integer sums go to memory here by hand: left to itself g++ 12 spills them in every iteration above.
        alignas(64) int32_t ints[32];
        vistore(ints + 0, acc0_0);
        vistore(ints + 16, acc1_0);
        asm volatile("" : : "r"(ints) : "memory");
        {
            float unit;
            memcpy(&unit, h0 + 48, 4);
            const VF ws = load_f16((const uint16_t*)h0) * vf(unit);
            const VF wz = load_u8((const uint8_t*)h0 + 32);
            {
                const VF dot = to_float(viload(ints + 0));
                const VF exact = fnma(wz, vf(sums[0]), dot);
                const VF step = ws * vf(scales[0]);
                vstore(out + 0, fma(exact, step, vload(out + 0)));
            }
            {
                const VF dot = to_float(viload(ints + 16));
                const VF exact = fnma(wz, vf(sums[1]), dot);
                const VF step = ws * vf(scales[1]);
                vstore(out + 16, fma(exact, step, vload(out + 16)));
            }
        }
        scales += 2;
        sums += 2;
    }
}
