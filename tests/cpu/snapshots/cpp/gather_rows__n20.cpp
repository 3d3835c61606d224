// x[R, 20] = the rows of each rank, in place; of fewer rows than 32 every rank has all of them already.
// Each rank copies a piece of its rows to its slot; when all have, each takes those of the others. See all_reduce.
// Params: GatherRowsParams.
static void k0_all_gather_rows(const Ctx& ctx) {
    const RankCtx& c = static_cast<const RankCtx&>(ctx);
    const Ranks& r = *c.ranks;
    const int64_t rows = c.tokens(), piece = r.slot_bytes / (int64_t)sizeof(float);
    if (rows < 32) return;
    float* x = c.output<float>(0);
    const Range mine = own_rows(r, r.rank, rows, 32);
    const int64_t most = (rows + r.count - 1) / r.count * 20;  // elements of the rank that has the most
    for (int64_t first = 0; first < most; first += piece, ++c.turn) {
        const auto count = [&](Range own) {  // of a rank's elements, how many are in this piece
            const int64_t left = (own.end - own.begin) * 20 - first;
            return left < 0 ? 0 : left < piece ? left : piece;
        };
        const Range given = share(c, count(mine));
        c.given += count(mine) * (int64_t)sizeof(float);
        memcpy(r.slot(r.rank, c.turn) + given.begin, x + mine.begin * 20 + first + given.begin, (size_t)(given.end - given.begin) * sizeof(float));
        r.meet();
        for (int rank = 0; rank < r.count; ++rank) {
            if (rank == r.rank) continue;
            const Range own = own_rows(r, rank, rows, 32);
            const Range taken = share(c, count(own));
            memcpy(x + own.begin * 20 + first + taken.begin, r.slot(rank, c.turn) + taken.begin, (size_t)(taken.end - taken.begin) * sizeof(float));
        }
    }
}
