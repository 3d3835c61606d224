// Micro-kernel of a 4-bit product: 3 rows of int8 activations x 2 tiles of 16 output rows.
// Tile: per group a 64-byte header (16 f16 scales, 16 u8 zero points, one float that multiplies the scales) and 64-byte
// lines of codes; a line holds 16 rows x 8 k, four k of a row in a 32-bit lane (4 bits: k 0..3 in the low
// nibbles, k 4..7 in the high ones). Activations: panel[k/4][3][4]; scales, sums: [group][3].
// Per group: y += (dot(code, x) - zero * sum(x)) * (weight scale * activation scale). Both terms are integers below
// 2^24, exact in float, so the bits are the same on every ISA level.
// Params: QuantMicroParams.
static void quant_q4_m3_n2(const char* const* tiles, const int8_t* panel, const float* scales, const float* sums,
                         int groups, int group, float* out) {
    const char* w0 = tiles[0];
    const char* w1 = tiles[1];
    vstore(out + 0, vf(0.0f));
    vstore(out + 16, vf(0.0f));
    vstore(out + 32, vf(0.0f));
    vstore(out + 48, vf(0.0f));
    vstore(out + 64, vf(0.0f));
    vstore(out + 80, vf(0.0f));
    for (int g = 0; g < groups; ++g) {
        const char* h0 = w0;
        w0 += 64;
        const char* h1 = w1;
        w1 += 64;
        // Products of up to 32 k are summed in 16 bits, which holds them: of half a tile at a time, for registers to suffice,
        // with activations that are spread once for all tiles.
        alignas(64) int32_t ints[96] = {};
        for (int i = 0; i < group;) {
            const int lines = group - i < 32 ? (group - i) / 8 : 4;
            __m256i spread[24];
            for (int q = 0; q < 2 * lines; ++q)
                for (int m = 0; m < 3; ++m) spread[3 * q + m] = set1_quad(panel + 4 * (3 * q + m)).a;
            asm volatile("" : : "r"(spread) : "memory");  // else g++ 12 spreads them anew
            const char* const halves[] = {w0, w0 + 32, w1, w1 + 32};
            for (int half = 0; half < 4; ++half) {
                const char* w = halves[half];
                __m256i part0 = _mm256_setzero_si256(), part1 = _mm256_setzero_si256(), part2 = _mm256_setzero_si256();
                if (lines == 4) {
                    {
                    _mm_prefetch(w + 2048, _MM_HINT_T0);
                    const __m256i raw = load_half(w + 0), low = half_nibbles(raw), high = half_nibbles(_mm256_srli_epi16(raw, 4));
                    part0 = chain_u4(part0, low, spread[0 + 0]);
                    part1 = chain_u4(part1, low, spread[0 + 1]);
                    part2 = chain_u4(part2, low, spread[0 + 2]);
                    part0 = chain_u4(part0, high, spread[0 + 3]);
                    part1 = chain_u4(part1, high, spread[0 + 4]);
                    part2 = chain_u4(part2, high, spread[0 + 5]);
                    }
                    {
                    _mm_prefetch(w + 2112, _MM_HINT_T0);
                    const __m256i raw = load_half(w + 64), low = half_nibbles(raw), high = half_nibbles(_mm256_srli_epi16(raw, 4));
                    part0 = chain_u4(part0, low, spread[6 + 0]);
                    part1 = chain_u4(part1, low, spread[6 + 1]);
                    part2 = chain_u4(part2, low, spread[6 + 2]);
                    part0 = chain_u4(part0, high, spread[6 + 3]);
                    part1 = chain_u4(part1, high, spread[6 + 4]);
                    part2 = chain_u4(part2, high, spread[6 + 5]);
                    }
                    {
                    _mm_prefetch(w + 2176, _MM_HINT_T0);
                    const __m256i raw = load_half(w + 128), low = half_nibbles(raw), high = half_nibbles(_mm256_srli_epi16(raw, 4));
                    part0 = chain_u4(part0, low, spread[12 + 0]);
                    part1 = chain_u4(part1, low, spread[12 + 1]);
                    part2 = chain_u4(part2, low, spread[12 + 2]);
                    part0 = chain_u4(part0, high, spread[12 + 3]);
                    part1 = chain_u4(part1, high, spread[12 + 4]);
                    part2 = chain_u4(part2, high, spread[12 + 5]);
                    }
                    {
                    _mm_prefetch(w + 2240, _MM_HINT_T0);
                    const __m256i raw = load_half(w + 192), low = half_nibbles(raw), high = half_nibbles(_mm256_srli_epi16(raw, 4));
                    part0 = chain_u4(part0, low, spread[18 + 0]);
                    part1 = chain_u4(part1, low, spread[18 + 1]);
                    part2 = chain_u4(part2, low, spread[18 + 2]);
                    part0 = chain_u4(part0, high, spread[18 + 3]);
                    part1 = chain_u4(part1, high, spread[18 + 4]);
                    part2 = chain_u4(part2, high, spread[18 + 5]);
                    }
                } else {
                    for (int l = 0; l < lines; ++l) {
                    const __m256i raw = load_half(w + 64 * l), low = half_nibbles(raw), high = half_nibbles(_mm256_srli_epi16(raw, 4));
                    part0 = chain_u4(part0, low, spread[6 * l + 0]);
                    part1 = chain_u4(part1, low, spread[6 * l + 1]);
                    part2 = chain_u4(part2, low, spread[6 * l + 2]);
                    part0 = chain_u4(part0, high, spread[6 * l + 3]);
                    part1 = chain_u4(part1, high, spread[6 * l + 4]);
                    part2 = chain_u4(part2, high, spread[6 * l + 5]);
                    }
                }
                int32_t* sum = ints + 8 * half;
                add_chain(sum + 0, part0);
                add_chain(sum + 32, part1);
                add_chain(sum + 64, part2);
            }
            w0 += 64 * lines;
            w1 += 64 * lines;
            panel += 24 * lines;
            i += 8 * lines;
        }
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
                const VF dot = to_float(viload(ints + 32));
                const VF exact = fnma(wz, vf(sums[1]), dot);
                const VF step = ws * vf(scales[1]);
                vstore(out + 32, fma(exact, step, vload(out + 32)));
            }
            {
                const VF dot = to_float(viload(ints + 64));
                const VF exact = fnma(wz, vf(sums[2]), dot);
                const VF step = ws * vf(scales[2]);
                vstore(out + 64, fma(exact, step, vload(out + 64)));
            }
        }
        {
            float unit;
            memcpy(&unit, h1 + 48, 4);
            const VF ws = load_f16((const uint16_t*)h1) * vf(unit);
            const VF wz = load_u8((const uint8_t*)h1 + 32);
            {
                const VF dot = to_float(viload(ints + 16));
                const VF exact = fnma(wz, vf(sums[0]), dot);
                const VF step = ws * vf(scales[0]);
                vstore(out + 16, fma(exact, step, vload(out + 16)));
            }
            {
                const VF dot = to_float(viload(ints + 48));
                const VF exact = fnma(wz, vf(sums[1]), dot);
                const VF step = ws * vf(scales[1]);
                vstore(out + 48, fma(exact, step, vload(out + 48)));
            }
            {
                const VF dot = to_float(viload(ints + 80));
                const VF exact = fnma(wz, vf(sums[2]), dot);
                const VF step = ws * vf(scales[2]);
                vstore(out + 80, fma(exact, step, vload(out + 80)));
            }
        }
        scales += 3;
        sums += 3;
    }
}
