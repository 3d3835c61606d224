// Micro-kernel of a product with q8_0 blocks: 3 rows of int8 activations x 1 tiles of 16 output rows.
// Tile: per span of 2 groups of 32 k a header of 64 bytes, with the scales of 16 rows next to each other, and 64-byte
// lines of codes; a line holds 16 rows x 4 k, four k of a row in a 32-bit lane, 8 bits of each code. Activations: panel[k/4][3][4]; scales, sums: [group][3].
// Products are summed in 16 bits, 4 k at a time, which cannot overflow. The codes of a group of a tile go to the stack
// first, from where 4 rows at a time read them.
// Params: QuantMicroParams.
static void q8_0_m3_n1(const char* const* tiles, const int8_t* panel, const float* scales, const float* sums,
                         int groups, int group, float* out) {
    const char* w0 = tiles[0];
    group = 32;  // as the compiler now knows
    const char* h0 = w0;
    vstore(out + 0, vf(0.0f));
    vstore(out + 16, vf(0.0f));
    vstore(out + 32, vf(0.0f));
    alignas(64) int8_t codes[512];
    for (int g = 0; g < groups; ++g) {
        if (g % 2 == 0) h0 = w0, w0 += 64;
        {
            {
            const VI raw0 = flip(viload(w0));
            _mm_prefetch(w0 + 2048, _MM_HINT_T0);
            w0 += 64;
            vistore(codes + 0, raw0);
            }
            {
            const VI raw0 = flip(viload(w0));
            _mm_prefetch(w0 + 2048, _MM_HINT_T0);
            w0 += 64;
            vistore(codes + 64, raw0);
            }
            {
            const VI raw0 = flip(viload(w0));
            _mm_prefetch(w0 + 2048, _MM_HINT_T0);
            w0 += 64;
            vistore(codes + 128, raw0);
            }
            {
            const VI raw0 = flip(viload(w0));
            _mm_prefetch(w0 + 2048, _MM_HINT_T0);
            w0 += 64;
            vistore(codes + 192, raw0);
            }
            {
            const VI raw0 = flip(viload(w0));
            _mm_prefetch(w0 + 2048, _MM_HINT_T0);
            w0 += 64;
            vistore(codes + 256, raw0);
            }
            {
            const VI raw0 = flip(viload(w0));
            _mm_prefetch(w0 + 2048, _MM_HINT_T0);
            w0 += 64;
            vistore(codes + 320, raw0);
            }
            {
            const VI raw0 = flip(viload(w0));
            _mm_prefetch(w0 + 2048, _MM_HINT_T0);
            w0 += 64;
            vistore(codes + 384, raw0);
            }
            {
            const VI raw0 = flip(viload(w0));
            _mm_prefetch(w0 + 2048, _MM_HINT_T0);
            w0 += 64;
            vistore(codes + 448, raw0);
            }
            asm volatile("" : : "r"(codes) : "memory");  // else g++ 12 keeps what it has stored, and spills it
            const VF ws = load_f16((const uint16_t*)h0 + 16 * (g % 2));
            const VF wz = vf((float)128);
            {
            VI part0, dot0, part1, dot1, part2, dot2;
            const VI u0 = viload(codes + 0);
            part0 = products_signed(u0, set1_quad(panel + 0));
            dot0 = widen(part0);
            part1 = products_signed(u0, set1_quad(panel + 4));
            dot1 = widen(part1);
            part2 = products_signed(u0, set1_quad(panel + 8));
            dot2 = widen(part2);
            const VI u1 = viload(codes + 64);
            part0 = products_signed(u1, set1_quad(panel + 12));
            dot0 = add_wide(dot0, part0);
            part1 = products_signed(u1, set1_quad(panel + 16));
            dot1 = add_wide(dot1, part1);
            part2 = products_signed(u1, set1_quad(panel + 20));
            dot2 = add_wide(dot2, part2);
            const VI u2 = viload(codes + 128);
            part0 = products_signed(u2, set1_quad(panel + 24));
            dot0 = add_wide(dot0, part0);
            part1 = products_signed(u2, set1_quad(panel + 28));
            dot1 = add_wide(dot1, part1);
            part2 = products_signed(u2, set1_quad(panel + 32));
            dot2 = add_wide(dot2, part2);
            const VI u3 = viload(codes + 192);
            part0 = products_signed(u3, set1_quad(panel + 36));
            dot0 = add_wide(dot0, part0);
            part1 = products_signed(u3, set1_quad(panel + 40));
            dot1 = add_wide(dot1, part1);
            part2 = products_signed(u3, set1_quad(panel + 44));
            dot2 = add_wide(dot2, part2);
            const VI u4 = viload(codes + 256);
            part0 = products_signed(u4, set1_quad(panel + 48));
            dot0 = add_wide(dot0, part0);
            part1 = products_signed(u4, set1_quad(panel + 52));
            dot1 = add_wide(dot1, part1);
            part2 = products_signed(u4, set1_quad(panel + 56));
            dot2 = add_wide(dot2, part2);
            const VI u5 = viload(codes + 320);
            part0 = products_signed(u5, set1_quad(panel + 60));
            dot0 = add_wide(dot0, part0);
            part1 = products_signed(u5, set1_quad(panel + 64));
            dot1 = add_wide(dot1, part1);
            part2 = products_signed(u5, set1_quad(panel + 68));
            dot2 = add_wide(dot2, part2);
            const VI u6 = viload(codes + 384);
            part0 = products_signed(u6, set1_quad(panel + 72));
            dot0 = add_wide(dot0, part0);
            part1 = products_signed(u6, set1_quad(panel + 76));
            dot1 = add_wide(dot1, part1);
            part2 = products_signed(u6, set1_quad(panel + 80));
            dot2 = add_wide(dot2, part2);
            const VI u7 = viload(codes + 448);
            part0 = products_signed(u7, set1_quad(panel + 84));
            dot0 = add_wide(dot0, part0);
            part1 = products_signed(u7, set1_quad(panel + 88));
            dot1 = add_wide(dot1, part1);
            part2 = products_signed(u7, set1_quad(panel + 92));
            dot2 = add_wide(dot2, part2);
            {
                const VF exact = to_float(dot0);
                const VF step = ws * vf(scales[0]);
                vstore(out + 0, fma(exact, step, vload(out + 0)));
            }
            {
                const VF exact = to_float(dot1);
                const VF step = ws * vf(scales[1]);
                vstore(out + 16, fma(exact, step, vload(out + 16)));
            }
            {
                const VF exact = to_float(dot2);
                const VF step = ws * vf(scales[2]);
                vstore(out + 32, fma(exact, step, vload(out + 32)));
            }
            }
        }
        panel += 96;
        scales += 3;
        sums += 3;
    }
}
