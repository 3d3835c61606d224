// y[R, 20] on each rank of stage 1 = x[R, 20] of its counterpart in stage 0.
// Params: TransferParams.
static void k0_transfer(const Ctx& ctx) {
    const RankCtx& c = static_cast<const RankCtx&>(ctx);
    if (c.tid) return;
    const int64_t nbytes = (int64_t)c.tokens() * 20 * (int64_t)sizeof(float);
    const StageRanks& r = static_cast<const StageRanks&>(*c.ranks);
    char* data = r.stage == 1 ? (char*)c.output<float>(0) : (char*)c.input<const float>(0);
    transfer(r, c.turn, 1, data, nbytes);
}
