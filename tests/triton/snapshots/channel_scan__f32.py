# channel_scan(x_ptr?: *fp32, decay_ptr?: *fp32, y_ptr?: *fp32, state_ptr: *fp32, positions: *i32, slot_mapping: *i32, seq_starts: *i32, block_tables: *i32, max_blocks?: i32)
# grid (1 * ceil(num_seqs / 1), 1, 1), 4 warps, 2 stages
# triton/common.py.jinja


CHANNELS = tl.constexpr(24)
BLOCK = tl.constexpr(32)


@triton.jit
def state_before(positions, seq_starts, block_tables, max_blocks, seq):
    """First token of the sequence, the one behind its last, whether there is a state, and where it begins."""
    begin = tl.load(seq_starts + seq)
    end = tl.load(seq_starts + seq + 1)
    position = tl.load(positions + begin, mask=begin < end, other=0)  # a padded step may have sequences of no tokens
    known = position > 0
    block = tl.load(block_tables + seq.to(tl.int64) * max_blocks + (position - 1) // 32, mask=known, other=0)
    return begin, end, known, block.to(tl.int64) * 32



@triton.jit
def channel_scan(
    x_ptr, decay_ptr, y_ptr, state_ptr,
    positions, slot_mapping, seq_starts, block_tables, max_blocks
):
    """BLOCK channels of one sequence, token by token."""
    begin, end, known, start = state_before(positions, seq_starts, block_tables, max_blocks, tl.program_id(0))
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < CHANNELS
    h = tl.load(state_ptr + start + at, mask=inside & known, other=0.0)
    for offset in range(0, end - begin):
        row = begin.to(tl.int64) + offset
        x = tl.load(x_ptr + row * 24 + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(y_ptr + row * 24 + at, h.to(y_ptr.dtype.element_ty), mask=inside)
        decay = tl.load(decay_ptr + row * 24 + at, mask=inside, other=0.0).to(tl.float32)
        h = decay * h + x
        slot = tl.load(slot_mapping + row)
        tl.store(state_ptr + slot.to(tl.int64) * 32 + at, h, mask=inside & (slot >= 0))
