// The 64 of the cached keys before each token that the 6 heads of an index score highest, 16 dims, f16 cache in blocks of 16.
// in: q (rows 96 apart), w (rows 0 apart); out: o [200] (rows 200 apart), by distance. Work items are (token, segment of
// its context), then tokens. See choose.h. Params: ChooseKeysParams.
struct k0_choose_keys_shape {
    typedef Half T;
    static constexpr int KD = 16, HEADS = 6, BLOCK = 16, COUNT = 64, WIDTH = 200;
    static constexpr bool MIXED = false;
    static constexpr float LEFT_OUT = -30000.0f;
};

static void k0_choose_keys(const Ctx& c) {
    typedef KeyChoice<k0_choose_keys_shape> Choice;
    static_assert(sizeof(typename Choice::Work) <= ICC_SCRATCH_BYTES, "scratch");
    const icc_batch& b = *c.batch;
    auto& work = *(typename Choice::Work*)c.scratch;
    const auto row = [&](int64_t t) { return c.output<float>(0) + t * 200; };
    int longest = 0;
    for (int s = 0; s < b.num_seqs; ++s) longest = b.context_lens[s] > longest ? b.context_lens[s] : longest;
    const int64_t parts = longest > 64 ? (longest + CHOICE_SEGMENT - 1) / CHOICE_SEGMENT : 0;
    int seq = 0;
    Items taken(c, c.tokens() * parts);
    for (int64_t i; taken.take(i);) {
        const int t = (int)(i / parts), low = (int)(i % parts) * CHOICE_SEGMENT, position = b.positions[t];
        if (position < 64 || low > position) continue;
        if (t < b.seq_starts[seq]) seq = 0;  // most items ascend
        while (b.seq_starts[seq + 1] <= t) ++seq;
        const int root = b.seq_starts[seq], high = low + CHOICE_SEGMENT <= position ? low + CHOICE_SEGMENT : position + 1;
        const bool tree = b.parents && root + 1 < b.seq_starts[seq + 1] && b.parents[root + 1] >= 0;
        Choice::scores(work, c, b.block_tables + (int64_t)seq * b.max_blocks, t, tree ? b.positions[root] : INT_MAX, low, high,
                       c.input<const float>(0) + (int64_t)t * 96, c.input<const float>(1) + (int64_t)t * 0, row(t));
    }
    c.barrier->wait(c.tid);
    const Range tokens = share(c, c.tokens());
    for (int64_t t = tokens.begin; t < tokens.end; ++t) Choice::choose(work, b.positions[t], row(t));
}
