// Where the recurrent state of a sequence lies: a block of the layer holds one, as its kernel lays it out.
#pragma once
#include "team.h"

ICC_INLINE float* state_block(const Ctx& c, int64_t block) { return (float*)(c.kv + block * c.kv_block_bytes); }

// The state behind the token before those of sequence `s`; null where there is none.
template <int BLOCK> ICC_INLINE const float* state_before(const Ctx& c, int s) {
    const icc_batch& b = *c.batch;
    const int position = b.positions[b.seq_starts[s]];
    return position > 0 ? state_block(c, b.block_tables[(int64_t)s * b.max_blocks + (position - 1) / BLOCK]) : nullptr;
}

// Where the state behind token `t` is to be left; null where it is not.
ICC_INLINE float* state_behind(const Ctx& c, int t) {
    const int32_t block = c.batch->slot_mapping[t];
    return block < 0 ? nullptr : state_block(c, block);
}
