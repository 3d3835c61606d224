// y[R, 32] = W[ids]; ids are clamped into [0, 50). W is q8s (tiles of 16 rows, read in place).
// in: ids i32, W; out: y f32. Rows are shared between threads.
// Params: EmbeddingParams.
static void k0_embedding(const Ctx& c) {
    constexpr int64_t N = 32;
    const int32_t* ids = c.input<const int32_t>(0);
    const char* w = c.input<const char>(1);
    const Range rows = share(c, c.tokens());
    for (int64_t i = rows.begin; i < rows.end; ++i) {
        const int64_t id = clamp_row(ids[i], 50);
        float* y = c.output<float>(0) + i * 32;
        const char* tile = w + id / 16 * 384;
        const int lane = (int)(id % 16);
        for (int64_t g = 0; g < N / 16; ++g) {
            uint16_t half;
            float unit;
            memcpy(&half, tile + 2 * lane, 2);
            memcpy(&unit, tile + 48, 4);
            const float scale = f16_value(half) * unit, zero = (float)(uint8_t)tile[32 + lane];
            const uint8_t* codes = (const uint8_t*)tile + 64 + 4 * lane;
            const uint8_t* fine = (const uint8_t*)w + 1536 + (id / 16 * N + g * 16) * 8 + 4 * lane;
            for (int j = 0; j < 16; ++j) {
                const uint8_t pair = codes[j / 8 * 64 + j % 4];
                const int high = j % 8 < 4 ? pair & 15 : pair >> 4;
                const uint8_t rest = fine[j / 8 * 64 + j % 4];
                const int code = high << 4 | (j % 8 < 4 ? rest & 15 : rest >> 4);
                y[g * 16 + j] = ((float)code - zero) * scale;
            }
            tile += 64 + 16 * 8;
        }
    }
}
