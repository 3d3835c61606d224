// Micro-kernel of a 4-bit product by AMX: 16 rows of int8 activations x 2 tiles of 16 output rows.
// Lines with bytes are what the instructions multiply: four k of 16 output rows each; others are taken apart into `codes` first.
// Activations: panel[k/depth][16][depth], see panels_amx.h; scales, sums: [group][16]. Integers and the order of
// additions are those of the other levels, so the bits are too.
// Params: QuantMicroParams.
static void quant_q4_m16_n2(const char* const* tiles, const int8_t* panel, const float* scales, const float* sums,
                         int groups, int group, float* out) {
    const char* w0 = tiles[0];
    const char* w1 = tiles[1];
    const int depth = tile_depth(group);
    tile_fence(panel);
    alignas(64) int8_t codes[2][16 * 64];
    alignas(64) int32_t ints[512];
    for (int i = 0; i < 32; ++i) vstore(out + 16 * i, vf(0.0f));
    for (int g = 0; g < groups; ++g) {
        const char* h0 = w0;
        w0 += 64;
        const char* h1 = w1;
        w1 += 64;
        _tile_zero(0);
        _tile_zero(1);
        for (int i = 0; i < group; i += depth) {
            for (int j = 0; j < 16 * depth; j += 128) {
                const VI raw0 = viload(w0);
                w0 += 64;
            const VI low0 = low_nibbles(raw0);
                vistore(codes[0] + j + 0, low0);
            const VI high0 = high_nibbles(raw0);
                vistore(codes[0] + j + 64, high0);
                const VI raw1 = viload(w1);
                w1 += 64;
            const VI low1 = low_nibbles(raw1);
                vistore(codes[1] + j + 0, low1);
            const VI high1 = high_nibbles(raw1);
                vistore(codes[1] + j + 64, high1);
            }
            tile_fence(codes);
            _tile_loadd(4, panel + 0 * depth, depth);
            _tile_loadd(6, codes[0], 64);
            _tile_dpbsud(0, 4, 6);
            _tile_loadd(7, codes[1], 64);
            _tile_dpbsud(1, 4, 7);
            panel += 16 * depth;
        }
        _tile_stored(0, ints + 0, 128);
        _tile_stored(1, ints + 16, 128);
        tile_fence(ints);
        {
            float unit;
            memcpy(&unit, h0 + 48, 4);
            const VF ws = load_f16((const uint16_t*)h0) * vf(unit);
            const VF wz = load_u8((const uint8_t*)h0 + 32);
            for (int m = 0; m < 16; ++m) {
                const int at = (m * 2 + 0) * 16;
                const VF dot = to_float(viload(ints + at));
                const VF exact = fnma(wz, vf(sums[m]), dot);
                const VF step = ws * vf(scales[m]);
                vstore(out + at, fma(exact, step, vload(out + at)));
            }
        }
        {
            float unit;
            memcpy(&unit, h1 + 48, 4);
            const VF ws = load_f16((const uint16_t*)h1) * vf(unit);
            const VF wz = load_u8((const uint8_t*)h1 + 32);
            for (int m = 0; m < 16; ++m) {
                const int at = (m * 2 + 1) * 16;
                const VF dot = to_float(viload(ints + at));
                const VF exact = fnma(wz, vf(sums[m]), dot);
                const VF step = ws * vf(scales[m]);
                vstore(out + at, fma(exact, step, vload(out + at)));
            }
        }
        scales += 16;
        sums += 16;
    }
}
