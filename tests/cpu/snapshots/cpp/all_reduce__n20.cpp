// y = the sum of the ranks' x[R, 20], added in the order of ranks.
// Each rank copies a piece of x to its slot; when all have, each adds up the slots. A slot is written again only after
// another meeting, at which all have read it.
// Params: AllReduceParams.
static void k0_all_reduce(const Ctx& ctx) {
    const RankCtx& c = static_cast<const RankCtx&>(ctx);
    const Ranks& r = *c.ranks;
    const int64_t total = (int64_t)c.tokens() * 20, piece = r.slot_bytes / (int64_t)sizeof(float);
    for (int64_t first = 0; first < total; first += piece, ++c.turn) {
        const int64_t count = total - first < piece ? total - first : piece;
        c.given += count * (int64_t)sizeof(float);
        const Range own = share(c, count);
        const float* x = c.input<const float>(0) + first;
        float* y = c.output<float>(0) + first;
        memcpy(r.slot(r.rank, c.turn) + own.begin, x + own.begin, (size_t)(own.end - own.begin) * sizeof(float));
        r.meet();
        const float* slot = r.slot(0, c.turn);
        const float* next = r.slot(1, c.turn);
        for (int64_t i = own.begin; i < own.end; ++i) y[i] = slot[i] + next[i];
        for (int rank = 2; rank < r.count; ++rank) {
            next = r.slot(rank, c.turn);
            for (int64_t i = own.begin; i < own.end; ++i) y[i] += next[i];
        }
    }
}
