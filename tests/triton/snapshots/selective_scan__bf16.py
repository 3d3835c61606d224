# selective_scan(x_ptr: *bf16, dt_ptr?: *fp32, a_ptr?: *fp32, b_ptr?: *fp32, c_ptr?: *fp32, y_ptr: *bf16, state_ptr: *fp32, positions: *i32, slot_mapping: *i32, seq_starts: *i32, block_tables: *i32, max_blocks?: i32)
# grid (1 * ceil(num_seqs / 1), 1, 1), 4 warps, 2 stages
# triton/common.py.jinja


CHANNELS = tl.constexpr(24)
STATES = tl.constexpr(8)
BLOCK = tl.constexpr(32)


@triton.jit
def state_before(positions, seq_starts, block_tables, max_blocks, seq):
    """First token of the sequence, the one behind its last, whether there is a state, and where it begins."""
    begin = tl.load(seq_starts + seq)
    end = tl.load(seq_starts + seq + 1)
    position = tl.load(positions + begin, mask=begin < end, other=0)  # a padded step may have sequences of no tokens
    known = position > 0
    block = tl.load(block_tables + seq.to(tl.int64) * max_blocks + (position - 1) // 32, mask=known, other=0)
    return begin, end, known, block.to(tl.int64) * 192



@triton.jit
def selective_scan(
    x_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, y_ptr, state_ptr, positions, slot_mapping, seq_starts, block_tables, max_blocks
):
    """BLOCK channels of one sequence."""
    begin, end, known, start = state_before(positions, seq_starts, block_tables, max_blocks, tl.program_id(0))
    n = tl.arange(0, STATES)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_states = n < 8
    in_channels = channel < CHANNELS
    inside = in_states[:, None] & in_channels[None, :]
    at = n[:, None] * CHANNELS + channel[None, :]
    a = tl.load(a_ptr + at, mask=inside, other=0.0)
    state = tl.load(state_ptr + start + at, mask=inside & known, other=0.0).to(tl.float32)
    for offset in range(0, end - begin):
        token = begin.to(tl.int64) + offset
        x = tl.load(x_ptr + token * 24 + channel, mask=in_channels, other=0.0).to(tl.float32)
        dt = tl.load(dt_ptr + token * 24 + channel, mask=in_channels, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + token * 8 + n, mask=in_states, other=0.0).to(tl.float32)
        c = tl.load(c_ptr + token * 8 + n, mask=in_states, other=0.0).to(tl.float32)
        state = tl.exp(dt[None, :] * a) * state + (dt * x)[None, :] * b[:, None]
        y = tl.sum(state * c[:, None], axis=0)
        tl.store(y_ptr + token * 24 + channel, y.to(y_ptr.dtype.element_ty), mask=in_channels)
        slot = tl.load(slot_mapping + token)
        tl.store(state_ptr + slot.to(tl.int64) * 192 + at, state.to(state_ptr.dtype.element_ty), mask=inside & (slot >= 0))
