// y[R, 2, 3, 7] = the ranks' x[R, 2, 7], line by line.
// Params: AllGatherParams.
static void k0_all_gather(const Ctx& ctx) {
    constexpr int64_t N = 7, RANKS = 3;
    const RankCtx& c = static_cast<const RankCtx&>(ctx);
    const Ranks& r = *c.ranks;
    const int64_t total = (int64_t)c.tokens() * 2 * N, piece = r.slot_bytes / (int64_t)sizeof(float);
    for (int64_t first = 0; first < total; first += piece, ++c.turn) {
        const int64_t count = total - first < piece ? total - first : piece;
        c.given += count * (int64_t)sizeof(float);
        const Range own = share(c, count);
        const float* x = c.input<const float>(0) + first;
        memcpy(r.slot(r.rank, c.turn) + own.begin, x + own.begin, (size_t)(own.end - own.begin) * sizeof(float));
        r.meet();
        for (int64_t rank = 0; rank < RANKS; ++rank) {
            const float* slot = r.slot((int)rank, c.turn);
            for (int64_t i = own.begin; i < own.end;) {
                const int64_t line = (first + i) / N, at = (first + i) % N;
                const int64_t run = N - at < own.end - i ? N - at : own.end - i;
                memcpy(c.output<float>(0) + (line * RANKS + rank) * N + at, slot + i, (size_t)run * sizeof(float));
                i += run;
            }
        }
    }
}
