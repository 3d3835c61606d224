// y = the sum of the ranks' x[R, 20], added in the order of ranks: of each rank the rows that are its own; of fewer
// rows than 32 all.
// Each rank copies a piece of x to its slot; when all have, each adds up what is its own. See all_reduce.
// Params: ReduceScatterParams.
static void k0_reduce_scatter(const Ctx& ctx) {
    const RankCtx& c = static_cast<const RankCtx&>(ctx);
    const Ranks& r = *c.ranks;
    const int64_t total = (int64_t)c.tokens() * 20, piece = r.slot_bytes / (int64_t)sizeof(float);
    const Range mine = own_rows(r, r.rank, c.tokens(), 32);
    for (int64_t first = 0; first < total; first += piece, ++c.turn) {
        const int64_t count = total - first < piece ? total - first : piece;
        c.given += count * (int64_t)sizeof(float);
        const Range given = share(c, count);
        const float* x = c.input<const float>(0) + first;
        float* y = c.output<float>(0) + first;
        memcpy(r.slot(r.rank, c.turn) + given.begin, x + given.begin, (size_t)(given.end - given.begin) * sizeof(float));
        r.meet();
        const int64_t low = mine.begin * 20 - first, high = mine.end * 20 - first;
        const int64_t begin = low > 0 ? low : 0, end = high < count ? high : count;
        const Range part = share(c, end > begin ? end - begin : 0);
        const float* slot = r.slot(0, c.turn) + begin;
        const float* next = r.slot(1, c.turn) + begin;
        for (int64_t i = part.begin; i < part.end; ++i) y[begin + i] = slot[i] + next[i];
        for (int rank = 2; rank < r.count; ++rank) {
            next = r.slot(rank, c.turn) + begin;
            for (int64_t i = part.begin; i < part.end; ++i) y[begin + i] += next[i];
        }
    }
}
