// Writes this step's K and V to the paged cache: 2 heads, 16 + 24 dims, i8, blocks of 16.
// in: k (rows 32 apart), v (rows 48 apart), cos, sin [0, 0]. (token, head) pairs are shared between threads.
// Params: KvWriteParams.
static void k0_kv_write(const Ctx& c) {
    constexpr int HEADS = 2, KD = 16, VD = 24, BLOCK = 16;
    const icc_batch& b = *c.batch;
    const Range items = share(c, (int64_t)c.tokens() * HEADS);
    for (int64_t i = items.begin; i < items.end; ++i) {
        const int64_t t = i / HEADS, slot = b.slot_mapping[t];
        const int head = (int)(i % HEADS), at = (int)(slot % BLOCK);
        if (slot < 0) continue;
        const KvBlock<int8_t, HEADS, KD, VD, BLOCK> block{c.kv + slot / BLOCK * c.kv_block_bytes};
        alignas(64) float k[KD];  // g++ 12 at -O1 stores vectors to one of 12 or 20 dims as if its place were a multiple of 16, which it was not
        memcpy(k, c.input<const float>(0) + t * 32 + head * KD, sizeof k);
        const float* v = c.input<const float>(1) + t * 48 + head * VD;
        store_kv([&](int d) -> int8_t& { return block.key(head, at, d); }, k, KD, block.key_scale(head) + at, block.key_centre(head) + at);
        store_kv([&](int d) -> int8_t& { return block.value(head, at, d); }, v, VD, block.value_scale(head) + at, block.value_centre(head) + at);
    }
}
