// y = each 64 elements of x[R, 3, 64] by their Walsh-Hadamard transform, orthonormal.
// in: x; out: y (may be the same memory). (row, outer) pairs are shared between threads; sums have one order.
// Params: HadamardParams.
static void k0_hadamard(const Ctx& c) {
    constexpr int64_t OUTER = 3, N = 64;
    const Range items = share(c, (int64_t)c.tokens() * OUTER);
    for (int64_t i = items.begin; i < items.end; ++i) {
        const float* x = c.input<const float>(0) + i / OUTER * 192 + i % OUTER * N;
        float* y = c.output<float>(0) + i / OUTER * 192 + i % OUTER * N;
        for (int64_t j = 0; j < N; j += 16) vstore(y + j, sixteen(vload(x + j)) * vf(0.125f));
        for (int64_t half = 16; half < N; half *= 2)
            for (int64_t start = 0; start < N; start += 2 * half)
                for (int64_t j = start; j < start + half; j += 16) {
                    const VF a = vload(y + j), b = vload(y + j + half);
                    vstore(y + j, a + b), vstore(y + j + half, a - b);
                }
    }
}
