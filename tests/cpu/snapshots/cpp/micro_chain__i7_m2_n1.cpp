// Micro-kernel of a product of 7 bits: 2 rows of activations x 1 tiles of 16 output rows.
// Tile: per group 16 float scales, 16 float sums of codes, and 64-byte lines of signed codes; a line holds 16 rows x 4 k,
// four k of a row in a 32-bit lane. Activations: panel[k/4][2][4], without sign; scales, zeros: [group][2].
// Per group: y += (dot(code, x) - sum(code) * zero) * (weight scale * activation scale). Both terms are integers below
// 2^24, exact in float, so the bits are the same on every ISA level.
// The products of eight k, which cannot overflow 16 bits, are summed there: a line and the next at a time.
// Params: QuantMicroParams.
static void quant_i7_m2_n1(const char* const* tiles, const int8_t* panel, const float* scales, const float* zeros,
                         int groups, int group, float* out) {
    const char* w0 = tiles[0];
    for (int i = 0; i < 32; i += 16) vstore(out + i, vf(0.0f));
    for (int g = 0; g < groups; ++g) {
        const char* h0 = w0;
        w0 += 128;
        VI acc0_0 = vi(0);
        VI acc1_0 = vi(0);
        for (int i = 0; i < group; i += 8) {
            _mm_prefetch(w0 + 2048, _MM_HINT_T0);
            _mm_prefetch(w0 + 2112, _MM_HINT_T0);
            {
                const __m256i first = load_half(w0 + 0), second = load_half(w0 + 64);
                acc0_0.a = dot_chain(acc0_0.a, panel + 0, first, panel + 8, second);
                acc1_0.a = dot_chain(acc1_0.a, panel + 4, first, panel + 12, second);
            }
            {
                const __m256i first = load_half(w0 + 32), second = load_half(w0 + 96);
                acc0_0.b = dot_chain(acc0_0.b, panel + 0, first, panel + 8, second);
                acc1_0.b = dot_chain(acc1_0.b, panel + 4, first, panel + 12, second);
            }
            w0 += 128;
            panel += 16;
        }
        // The integer sums go to memory here by hand: left to itself g++ 12 spills them in every iteration above.
        alignas(64) int32_t ints[32];
        vistore(ints + 0, acc0_0);
        vistore(ints + 16, acc1_0);
        asm volatile("" : : "r"(ints) : "memory");
        {
            const VF ws = vload((const float*)h0), wz = vload((const float*)h0 + 16);
            const float* sums = zeros;
            {
                const VF dot = to_float(viload(ints + 0));
                const VF exact = fnma(wz, vf(sums[0]), dot);
                float* y = out + 0;
                vstore(y, fma(exact, ws * vf(scales[0]), vload(y)));
            }
            {
                const VF dot = to_float(viload(ints + 16));
                const VF exact = fnma(wz, vf(sums[1]), dot);
                float* y = out + 16;
                vstore(y, fma(exact, ws * vf(scales[1]), vload(y)));
            }
        }
        scales += 2;
        zeros += 2;
    }
}
