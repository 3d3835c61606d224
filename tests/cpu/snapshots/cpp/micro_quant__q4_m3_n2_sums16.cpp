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
        // Products of up to 32 k are summed in 16 bits, which holds them: of a tile and 3 rows at a time, for registers to suffice.
        // Each tile's lines of the next group are prefetched: those of 2 tiles are read before them.
        alignas(64) int32_t ints[96];
        const int ahead = 8 * group + 64;
        for (int t = 0; t < 2; ++t)
        for (int first = 0; first < 3; first += 3) {
            int32_t* sum = ints + 16 * (2 * first + t);
            {
            const char* const lines[] = {w0, w1};
            const char* w = lines[t];
            const int8_t* x = panel + 4 * first;
            for (int i = 0; i < group; i += 32) {
                VI part0 = vi(0), part1 = vi(0), part2 = vi(0);
                const int left = group - i < 32 ? (group - i) / 8 : 4;
                if (left == 4) {
                    {
                    _mm_prefetch(w + ahead + 0, _MM_HINT_T0);
                    const VI raw = viload(w + 0);
                    const VI low = low_nibbles(raw);
                    part0 = chain_u4(part0, low, x + 0 + 0);
                    part1 = chain_u4(part1, low, x + 0 + 4);
                    part2 = chain_u4(part2, low, x + 0 + 8);
                    const VI high = high_nibbles(raw);
                    part0 = chain_u4(part0, high, x + 0 + 12);
                    part1 = chain_u4(part1, high, x + 0 + 16);
                    part2 = chain_u4(part2, high, x + 0 + 20);
                    }
                    {
                    _mm_prefetch(w + ahead + 64, _MM_HINT_T0);
                    const VI raw = viload(w + 64);
                    const VI low = low_nibbles(raw);
                    part0 = chain_u4(part0, low, x + 24 + 0);
                    part1 = chain_u4(part1, low, x + 24 + 4);
                    part2 = chain_u4(part2, low, x + 24 + 8);
                    const VI high = high_nibbles(raw);
                    part0 = chain_u4(part0, high, x + 24 + 12);
                    part1 = chain_u4(part1, high, x + 24 + 16);
                    part2 = chain_u4(part2, high, x + 24 + 20);
                    }
                    {
                    _mm_prefetch(w + ahead + 128, _MM_HINT_T0);
                    const VI raw = viload(w + 128);
                    const VI low = low_nibbles(raw);
                    part0 = chain_u4(part0, low, x + 48 + 0);
                    part1 = chain_u4(part1, low, x + 48 + 4);
                    part2 = chain_u4(part2, low, x + 48 + 8);
                    const VI high = high_nibbles(raw);
                    part0 = chain_u4(part0, high, x + 48 + 12);
                    part1 = chain_u4(part1, high, x + 48 + 16);
                    part2 = chain_u4(part2, high, x + 48 + 20);
                    }
                    {
                    _mm_prefetch(w + ahead + 192, _MM_HINT_T0);
                    const VI raw = viload(w + 192);
                    const VI low = low_nibbles(raw);
                    part0 = chain_u4(part0, low, x + 72 + 0);
                    part1 = chain_u4(part1, low, x + 72 + 4);
                    part2 = chain_u4(part2, low, x + 72 + 8);
                    const VI high = high_nibbles(raw);
                    part0 = chain_u4(part0, high, x + 72 + 12);
                    part1 = chain_u4(part1, high, x + 72 + 16);
                    part2 = chain_u4(part2, high, x + 72 + 20);
                    }
                } else {
                    for (int l = 0; l < left; ++l) {
                    const VI raw = viload(w + 64 * l);
                    const VI low = low_nibbles(raw);
                    part0 = chain_u4(part0, low, x + 24 * l + 0);
                    part1 = chain_u4(part1, low, x + 24 * l + 4);
                    part2 = chain_u4(part2, low, x + 24 * l + 8);
                    const VI high = high_nibbles(raw);
                    part0 = chain_u4(part0, high, x + 24 * l + 12);
                    part1 = chain_u4(part1, high, x + 24 * l + 16);
                    part2 = chain_u4(part2, high, x + 24 * l + 20);
                    }
                }
                add_chain<1>(sum + 0, part0, i > 0);
                add_chain<1>(sum + 32, part1, i > 0);
                add_chain<1>(sum + 64, part2, i > 0);
                w += 64 * left, x += 24 * left;
            }
            }
        }
        w0 += 8 * group;
        w1 += 8 * group;
        panel += 3 * group;
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
