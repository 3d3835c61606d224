# gated_scan(q_ptr: *bf16, k_ptr: *bf16, v_ptr: *bf16, decay_ptr?: *fp32, beta_ptr?: *fp32, o_ptr: *bf16, state_ptr: *fp32, positions: *i32, slot_mapping: *i32, seq_starts: *i32, block_tables: *i32, max_blocks?: i32)
# grid (1 * ceil(num_seqs / 1), 4, 1), 4 warps, 2 stages
# triton/common.py.jinja


KEYS = tl.constexpr(32)
BLOCK = tl.constexpr(64)


@triton.jit
def state_before(positions, seq_starts, block_tables, max_blocks, seq):
    """First token of the sequence, the one behind its last, whether there is a state, and where it begins."""
    begin = tl.load(seq_starts + seq)
    end = tl.load(seq_starts + seq + 1)
    position = tl.load(positions + begin, mask=begin < end, other=0)  # a padded step may have sequences of no tokens
    known = position > 0
    block = tl.load(block_tables + seq.to(tl.int64) * max_blocks + (position - 1) // 32, mask=known, other=0)
    return begin, end, known, block.to(tl.int64) * 3840



@triton.jit
def gated_scan(
    q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, o_ptr, state_ptr,
    positions, slot_mapping, seq_starts, block_tables, max_blocks
):
    """BLOCK value columns of one head of one sequence."""
    begin, end, known, start = state_before(positions, seq_starts, block_tables, max_blocks, tl.program_id(0))
    head = tl.program_id(1)
    row = tl.arange(0, KEYS)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    in_row = row < 24
    in_column = column < 40
    inside = in_row[:, None] & in_column[None, :]
    at = head * 960 + row[:, None] * 40 + column[None, :]
    state = tl.load(state_ptr + start + at, mask=inside & known, other=0.0).to(tl.float32)
    key_at = head // 2 * 24 + row
    value_at = head * 40 + column
    for offset in range(0, end - begin):
        token = begin.to(tl.int64) + offset
        q = tl.load(q_ptr + token * 48 + key_at, mask=in_row, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + token * 48 + key_at, mask=in_row, other=0.0).to(tl.float32)
        u = tl.load(v_ptr + token * 160 + value_at, mask=in_column, other=0.0).to(tl.float32)
        state *= tl.exp(tl.load(decay_ptr + token * 4 + head).to(tl.float32))
        u -= tl.sum(state * k[:, None], axis=0)
        u *= tl.load(beta_ptr + token * 4 + head).to(tl.float32)
        state += k[:, None] * u[None, :]
        o = tl.sum(state * q[:, None], axis=0)
        tl.store(o_ptr + token * 160 + value_at, o.to(o_ptr.dtype.element_ty), mask=in_column)
        slot = tl.load(slot_mapping + token)
        tl.store(state_ptr + slot.to(tl.int64) * 3840 + at, state.to(state_ptr.dtype.element_ty), mask=inside & (slot >= 0))
