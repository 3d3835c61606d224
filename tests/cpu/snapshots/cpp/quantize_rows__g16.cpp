// Symmetric int8 per row and group of 16: q = round(x * 127 / max|x|), scale = max|x| / 127, sum of q.
// in: x [R, 32]; out: q i8 [R, 32], scales f32 [R, 2], sums f32 [R, 2] (integers).
// A group is a multiple of 16 long; (row, group) pairs are shared between threads. Params: QuantizeRowsParams.
static void k0_quantize_rows(const Ctx& c) {
    constexpr int64_t K = 32, GROUP = 16, GROUPS = K / GROUP;
    const Range items = share(c, (int64_t)c.tokens() * GROUPS);
    for (int64_t i = items.begin; i < items.end; ++i) {
        const int64_t row = i / GROUPS, g = i % GROUPS;
        const float* x = c.input<const float>(0) + row * 32 + g * GROUP;
        int8_t* q = c.output<int8_t>(0) + row * K + g * GROUP;
        VF top = vf(0.0f), poison = vf(0.0f);
        for (int64_t j = 0; j < GROUP; j += 16) {
            const VF v = vload(x + j);
            top = max_raw(top, vabs(v));
            poison = fma(v, vf(0.0f), poison);  // NaN as soon as one value is NaN or infinite
        }
        const bool finite = hsum(poison) == 0.0f;
        const float peak = hmax(top);
        const float inverse = finite && peak > 1e-30f ? 127.0f / peak : 0.0f;  // a smaller peak counts as zero
        VI sum = vi(0);
        for (int64_t j = 0; j < GROUP; j += 16) {
            const VI v = to_int_nearest(vload(x + j) * vf(inverse));
            sum = sum + v;
            store_low8(q + j, v);
        }
        c.output<float>(1)[i] = finite ? peak / 127.0f : NAN;
        c.output<float>(2)[i] = finite ? hsum(to_float(sum)) : 0.0f;
    }
}
