# causal_conv(x_ptr: *bf16, w_ptr?: *fp32, b_ptr?: *fp32, y_ptr?: *fp32, state_ptr: *fp32, positions: *i32, slot_mapping: *i32, seq_starts: *i32, block_tables: *i32, max_blocks?: i32)
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
    return begin, end, known, block.to(tl.int64) * 80



@triton.jit
def causal_conv(
    x_ptr, w_ptr, b_ptr, y_ptr, state_ptr,
    positions, slot_mapping, seq_starts, block_tables, max_blocks
):
    """BLOCK channels of one sequence, token by token."""
    begin, end, known, start = state_before(positions, seq_starts, block_tables, max_blocks, tl.program_id(0))
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < CHANNELS
    w0 = tl.load(w_ptr + 0 * CHANNELS + at, mask=inside, other=0.0)
    w1 = tl.load(w_ptr + 1 * CHANNELS + at, mask=inside, other=0.0)
    w2 = tl.load(w_ptr + 2 * CHANNELS + at, mask=inside, other=0.0)
    w3 = tl.load(w_ptr + 3 * CHANNELS + at, mask=inside, other=0.0)
    last0 = tl.load(state_ptr + start + 0 * CHANNELS + at, mask=inside & known, other=0.0)
    last1 = tl.load(state_ptr + start + 1 * CHANNELS + at, mask=inside & known, other=0.0)
    last2 = tl.load(state_ptr + start + 2 * CHANNELS + at, mask=inside & known, other=0.0)
    bias = tl.load(b_ptr + at, mask=inside, other=0.0)
    for offset in range(0, end - begin):
        row = begin.to(tl.int64) + offset
        now = tl.load(x_ptr + row * 72 + at, mask=inside, other=0.0).to(tl.float32)
        total = bias
        total += w0 * last0
        total += w1 * last1
        total += w2 * last2
        total += w3 * now
        tl.store(y_ptr + row * 24 + at, total.to(y_ptr.dtype.element_ty), mask=inside)
        last0 = last1
        last1 = last2
        last2 = now
        slot = tl.load(slot_mapping + row)
        behind = state_ptr + slot.to(tl.int64) * 80 + at
        kept = inside & (slot >= 0)
        tl.store(behind + 0 * CHANNELS, last0, mask=kept)
        tl.store(behind + 1 * CHANNELS, last1, mask=kept)
        tl.store(behind + 2 * CHANNELS, last2, mask=kept)
