// Micro-kernel of a product with q4_k blocks: 1 rows of int8 activations x 2 tiles of 16 output rows.
// Tile: per span of 8 groups of 32 k a header of 320 bytes, with the scales of 16 rows next to each other, and 64-byte
// lines of codes; a line holds 16 rows x 8 k, four k of a row in a 32-bit lane, 4 bits of each code. Activations: panel[k/4][1][4]; scales, sums: [group][1].
// Products are summed in 16 bits, 32 k at a time, which cannot overflow.
// Params: QuantMicroParams.
static void q4_k_m1_n2(const char* const* tiles, const int8_t* panel, const float* scales, const float* sums,
                         int groups, int group, float* out) {
    const char* w0 = tiles[0];
    group = 32;  // as the compiler now knows
    const char* h0 = w0;
    const char* w1 = tiles[1];
    const char* h1 = w1;
    VF sum0_0 = vf(0.0f);
    VF sum0_1 = vf(0.0f);
    for (int g = 0; g < groups; ++g) {
        if (g % 8 == 0) h0 = w0, w0 += 320;
        {
            VI part0, dot0;
            {
            const VI raw0 = viload(w0);
            _mm_prefetch(w0 + 256, _MM_HINT_T0);
            w0 += 64;
            const VI low0 = low_nibbles(raw0);
            part0 = products(low0, set1_quad(panel + 0));
            const VI high0 = high_nibbles(raw0);
            part0 = add16(part0, products(high0, set1_quad(panel + 4)));
            }
            {
            const VI raw0 = viload(w0);
            _mm_prefetch(w0 + 256, _MM_HINT_T0);
            w0 += 64;
            const VI low0 = low_nibbles(raw0);
            part0 = add16(part0, products(low0, set1_quad(panel + 8)));
            const VI high0 = high_nibbles(raw0);
            part0 = add16(part0, products(high0, set1_quad(panel + 12)));
            }
            {
            const VI raw0 = viload(w0);
            _mm_prefetch(w0 + 256, _MM_HINT_T0);
            w0 += 64;
            const VI low0 = low_nibbles(raw0);
            part0 = add16(part0, products(low0, set1_quad(panel + 16)));
            const VI high0 = high_nibbles(raw0);
            part0 = add16(part0, products(high0, set1_quad(panel + 20)));
            }
            {
            const VI raw0 = viload(w0);
            _mm_prefetch(w0 + 256, _MM_HINT_T0);
            w0 += 64;
            const VI low0 = low_nibbles(raw0);
            part0 = add16(part0, products(low0, set1_quad(panel + 24)));
            const VI high0 = high_nibbles(raw0);
            part0 = add16(part0, products(high0, set1_quad(panel + 28)));
            dot0 = widen(part0);
            }
            const VF wd = load_f16((const uint16_t*)h0) * load_u8((const uint8_t*)h0 + 64 + 16 * (g % 8));
            const VF wz = load_f16((const uint16_t*)(h0 + 32) + 0) * load_u8((const uint8_t*)h0 + 192 + 16 * (g % 8));
            const VF ws = vf(1.0f);
            {
                const VF dot = to_float(dot0);
                const VF exact = fnma(wz, vf(sums[0]), wd * dot);
                const VF step = ws * vf(scales[0]);
                sum0_0 = fma(exact, step, sum0_0);
            }
        }
        if (g % 8 == 0) h1 = w1, w1 += 320;
        {
            VI part0, dot0;
            {
            const VI raw1 = viload(w1);
            _mm_prefetch(w1 + 256, _MM_HINT_T0);
            w1 += 64;
            const VI low1 = low_nibbles(raw1);
            part0 = products(low1, set1_quad(panel + 0));
            const VI high1 = high_nibbles(raw1);
            part0 = add16(part0, products(high1, set1_quad(panel + 4)));
            }
            {
            const VI raw1 = viload(w1);
            _mm_prefetch(w1 + 256, _MM_HINT_T0);
            w1 += 64;
            const VI low1 = low_nibbles(raw1);
            part0 = add16(part0, products(low1, set1_quad(panel + 8)));
            const VI high1 = high_nibbles(raw1);
            part0 = add16(part0, products(high1, set1_quad(panel + 12)));
            }
            {
            const VI raw1 = viload(w1);
            _mm_prefetch(w1 + 256, _MM_HINT_T0);
            w1 += 64;
            const VI low1 = low_nibbles(raw1);
            part0 = add16(part0, products(low1, set1_quad(panel + 16)));
            const VI high1 = high_nibbles(raw1);
            part0 = add16(part0, products(high1, set1_quad(panel + 20)));
            }
            {
            const VI raw1 = viload(w1);
            _mm_prefetch(w1 + 256, _MM_HINT_T0);
            w1 += 64;
            const VI low1 = low_nibbles(raw1);
            part0 = add16(part0, products(low1, set1_quad(panel + 24)));
            const VI high1 = high_nibbles(raw1);
            part0 = add16(part0, products(high1, set1_quad(panel + 28)));
            dot0 = widen(part0);
            }
            const VF wd = load_f16((const uint16_t*)h1) * load_u8((const uint8_t*)h1 + 64 + 16 * (g % 8));
            const VF wz = load_f16((const uint16_t*)(h1 + 32) + 0) * load_u8((const uint8_t*)h1 + 192 + 16 * (g % 8));
            const VF ws = vf(1.0f);
            {
                const VF dot = to_float(dot0);
                const VF exact = fnma(wz, vf(sums[0]), wd * dot);
                const VF step = ws * vf(scales[0]);
                sum0_1 = fma(exact, step, sum0_1);
            }
        }
        panel += 32;
        scales += 1;
        sums += 1;
    }
    vstore(out + 0, sum0_0);
    vstore(out + 16, sum0_1);
}
