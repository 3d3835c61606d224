// Micro-kernel of an 8-bit product by AMX: 32 rows of int8 activations x 2 tiles of 16 output rows.
// Lines with bytes are what the instructions multiply: four k of 16 output rows each.
// Activations: panel[k/depth][32][depth], see panels_amx.h; scales, sums: [group][32]. Integers and the order of
// additions are those of the other levels, so the bits are too.
// Params: QuantMicroParams.
static void quant_q8_m32_n2(const char* const* tiles, const int8_t* panel, const float* scales, const float* sums,
                         int groups, int group, float* out) {
    const char* w0 = tiles[0];
    const char* w1 = tiles[1];
    const int depth = tile_depth(group);
    tile_fence(panel);
    alignas(64) int32_t ints[1024];
    for (int i = 0; i < 64; ++i) vstore(out + 16 * i, vf(0.0f));
    for (int g = 0; g < groups; ++g) {
        const char* h0 = w0;
        w0 += 64;
        const char* h1 = w1;
        w1 += 64;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int i = 0; i < group; i += depth) {
            _tile_loadd(4, panel + 0 * depth, depth);
            _tile_loadd(5, panel + 16 * depth, depth);
            _tile_loadd(6, w0, 64);
            _tile_dpbsud(0, 4, 6);
            _tile_dpbsud(2, 5, 6);
            _tile_loadd(7, w1, 64);
            _tile_dpbsud(1, 4, 7);
            _tile_dpbsud(3, 5, 7);
            w0 += 16 * depth;
            w1 += 16 * depth;
            panel += 32 * depth;
        }
        _tile_stored(0, ints + 0, 128);
        _tile_stored(1, ints + 16, 128);
        _tile_stored(2, ints + 512, 128);
        _tile_stored(3, ints + 528, 128);
        tile_fence(ints);
        {
            float unit;
            memcpy(&unit, h0 + 48, 4);
            const VF ws = load_f16((const uint16_t*)h0) * vf(unit);
            const VF wz = load_u8((const uint8_t*)h0 + 32);
            for (int m = 0; m < 32; ++m) {
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
            for (int m = 0; m < 32; ++m) {
                const int at = (m * 2 + 1) * 16;
                const VF dot = to_float(viload(ints + at));
                const VF exact = fnma(wz, vf(sums[m]), dot);
                const VF step = ws * vf(scales[m]);
                vstore(out + at, fma(exact, step, vload(out + at)));
            }
        }
        scales += 32;
        sums += 32;
    }
}
