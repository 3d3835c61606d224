// Micro-kernel of an 8-bit product, both planes: 2 rows of int8 activations x 1 tiles of 16 output rows.
// Tile: per group a 64-byte header (16 f16 scales, 16 u8 zero points, one float that multiplies the scales) and 64-byte
// lines of codes; a line holds 16 rows x 8 k, four k of a row in a 32-bit lane (4 bits: k 0..3 in the low
// nibbles, k 4..7 in the high ones). Activations: panel[k/4][2][4]; scales, sums: [group][2].
// Per group: y += (dot(code, x) - zero * sum(x)) * (weight scale * activation scale). Both terms are integers below
// 2^24, exact in float, so the bits are the same on every ISA level.
// The codes are split: high nibbles in tiles[0..1), low ones in as many tiles behind them, whose lines match.
// Params: QuantMicroParams.
static void quant_q8s_m2_n1(const char* const* tiles, const int8_t* panel, const float* scales, const float* sums,
                         int groups, int group, float* out) {
    const char* w0 = tiles[0];
    const char* fine0 = tiles[1];
    vstore(out + 0, vf(0.0f));
    vstore(out + 16, vf(0.0f));
    for (int g = 0; g < groups; ++g) {
        const char* h0 = w0;
        w0 += 64;
        // Products of up to 32 k are summed in 16 bits, which holds them: of a tile and 2 rows at a time, for registers to suffice.
        // Each tile's lines of the next group are prefetched: those of 1 tile are read before them.
        alignas(64) int32_t ints[32];
        const int ahead = 8 * group + 64;
        for (int t = 0; t < 1; ++t)
        for (int first = 0; first < 2; first += 2) {
            int32_t* sum = ints + 16 * (1 * first + t);
            {
            const char* const lines[] = {w0};
            const char* w = lines[t];
            const int8_t* x = panel + 4 * first;
            for (int i = 0; i < group; i += 32) {
                VI part0 = vi(0), part1 = vi(0);
                const int left = group - i < 32 ? (group - i) / 8 : 4;
                if (left == 4) {
                    {
                    _mm_prefetch(w + ahead + 0, _MM_HINT_T0);
                    const VI raw = viload(w + 0);
                    const VI low = low_nibbles(raw);
                    part0 = chain_u4(part0, low, x + 0 + 0);
                    part1 = chain_u4(part1, low, x + 0 + 4);
                    const VI high = high_nibbles(raw);
                    part0 = chain_u4(part0, high, x + 0 + 8);
                    part1 = chain_u4(part1, high, x + 0 + 12);
                    }
                    {
                    _mm_prefetch(w + ahead + 64, _MM_HINT_T0);
                    const VI raw = viload(w + 64);
                    const VI low = low_nibbles(raw);
                    part0 = chain_u4(part0, low, x + 16 + 0);
                    part1 = chain_u4(part1, low, x + 16 + 4);
                    const VI high = high_nibbles(raw);
                    part0 = chain_u4(part0, high, x + 16 + 8);
                    part1 = chain_u4(part1, high, x + 16 + 12);
                    }
                    {
                    _mm_prefetch(w + ahead + 128, _MM_HINT_T0);
                    const VI raw = viload(w + 128);
                    const VI low = low_nibbles(raw);
                    part0 = chain_u4(part0, low, x + 32 + 0);
                    part1 = chain_u4(part1, low, x + 32 + 4);
                    const VI high = high_nibbles(raw);
                    part0 = chain_u4(part0, high, x + 32 + 8);
                    part1 = chain_u4(part1, high, x + 32 + 12);
                    }
                    {
                    _mm_prefetch(w + ahead + 192, _MM_HINT_T0);
                    const VI raw = viload(w + 192);
                    const VI low = low_nibbles(raw);
                    part0 = chain_u4(part0, low, x + 48 + 0);
                    part1 = chain_u4(part1, low, x + 48 + 4);
                    const VI high = high_nibbles(raw);
                    part0 = chain_u4(part0, high, x + 48 + 8);
                    part1 = chain_u4(part1, high, x + 48 + 12);
                    }
                } else {
                    for (int l = 0; l < left; ++l) {
                    const VI raw = viload(w + 64 * l);
                    const VI low = low_nibbles(raw);
                    part0 = chain_u4(part0, low, x + 16 * l + 0);
                    part1 = chain_u4(part1, low, x + 16 * l + 4);
                    const VI high = high_nibbles(raw);
                    part0 = chain_u4(part0, high, x + 16 * l + 8);
                    part1 = chain_u4(part1, high, x + 16 * l + 12);
                    }
                }
                add_chain<16>(sum + 0, part0, i > 0);
                add_chain<16>(sum + 16, part1, i > 0);
                w += 64 * left, x += 16 * left;
            }
            }
            {
            const char* const lines[] = {fine0};
            const char* w = lines[t];
            const int8_t* x = panel + 4 * first;
            for (int i = 0; i < group; i += 32) {
                VI part0 = vi(0), part1 = vi(0);
                const int left = group - i < 32 ? (group - i) / 8 : 4;
                if (left == 4) {
                    {
                    _mm_prefetch(w + ahead + 0, _MM_HINT_T0);
                    const VI raw = viload(w + 0);
                    const VI low = low_nibbles(raw);
                    part0 = chain_u4(part0, low, x + 0 + 0);
                    part1 = chain_u4(part1, low, x + 0 + 4);
                    const VI high = high_nibbles(raw);
                    part0 = chain_u4(part0, high, x + 0 + 8);
                    part1 = chain_u4(part1, high, x + 0 + 12);
                    }
                    {
                    _mm_prefetch(w + ahead + 64, _MM_HINT_T0);
                    const VI raw = viload(w + 64);
                    const VI low = low_nibbles(raw);
                    part0 = chain_u4(part0, low, x + 16 + 0);
                    part1 = chain_u4(part1, low, x + 16 + 4);
                    const VI high = high_nibbles(raw);
                    part0 = chain_u4(part0, high, x + 16 + 8);
                    part1 = chain_u4(part1, high, x + 16 + 12);
                    }
                    {
                    _mm_prefetch(w + ahead + 128, _MM_HINT_T0);
                    const VI raw = viload(w + 128);
                    const VI low = low_nibbles(raw);
                    part0 = chain_u4(part0, low, x + 32 + 0);
                    part1 = chain_u4(part1, low, x + 32 + 4);
                    const VI high = high_nibbles(raw);
                    part0 = chain_u4(part0, high, x + 32 + 8);
                    part1 = chain_u4(part1, high, x + 32 + 12);
                    }
                    {
                    _mm_prefetch(w + ahead + 192, _MM_HINT_T0);
                    const VI raw = viload(w + 192);
                    const VI low = low_nibbles(raw);
                    part0 = chain_u4(part0, low, x + 48 + 0);
                    part1 = chain_u4(part1, low, x + 48 + 4);
                    const VI high = high_nibbles(raw);
                    part0 = chain_u4(part0, high, x + 48 + 8);
                    part1 = chain_u4(part1, high, x + 48 + 12);
                    }
                } else {
                    for (int l = 0; l < left; ++l) {
                    const VI raw = viload(w + 64 * l);
                    const VI low = low_nibbles(raw);
                    part0 = chain_u4(part0, low, x + 16 * l + 0);
                    part1 = chain_u4(part1, low, x + 16 * l + 4);
                    const VI high = high_nibbles(raw);
                    part0 = chain_u4(part0, high, x + 16 * l + 8);
                    part1 = chain_u4(part1, high, x + 16 * l + 12);
                    }
                }
                add_chain<1>(sum + 0, part0, true);
                add_chain<1>(sum + 16, part1, true);
                w += 64 * left, x += 16 * left;
            }
            }
        }
        w0 += 8 * group;
        fine0 += 8 * group;
        panel += 2 * group;
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
