# gated_chunks(q_ptr?: *fp32, k_ptr?: *fp32, v_ptr?: *fp32, decay_ptr?: *fp32, o_ptr?: *fp32, state_ptr: *fp32, positions: *i32, slot_mapping: *i32, seq_starts: *i32, block_tables: *i32, max_blocks?: i32)
# grid (1 * ceil(num_seqs / 1), 2, 1), 4 warps, 2 stages

# triton/common.py.jinja


CHUNK = tl.constexpr(16)
PART = tl.constexpr(16)
BLOCK = tl.constexpr(16)
HEADS = tl.constexpr(2)
SEQS = tl.constexpr(4)


@triton.jit
def state_before(positions, seq_starts, block_tables, max_blocks, seq):
    """First token of the sequence, the one behind its last, whether there is a state, and where it begins."""
    begin = tl.load(seq_starts + seq)
    end = tl.load(seq_starts + seq + 1)
    position = tl.load(positions + begin, mask=begin < end, other=0)  # a padded step may have sequences of no tokens
    known = position > 0
    block = tl.load(block_tables + seq.to(tl.int64) * max_blocks + (position - 1) // 32, mask=known, other=0)
    return begin, end, known, block.to(tl.int64) * 512



@triton.jit
def product(a, b):
    """a b of float32 as three products of bf16: to 2^-16 of the largest, in half the registers of TF32's."""
    if INTERPRETED:
        result = tl.dot(a, b, input_precision="ieee")
    else:
        result = tl.dot(a, b, input_precision="bf16x3")
    return result


@triton.jit
def gated_chunks(
    q_ptr, k_ptr, v_ptr, decay_ptr, o_ptr, state_ptr,
    positions, slot_mapping, seq_starts, block_tables, max_blocks
):
    """BLOCK value columns of one head of one sequence."""
    begin, end, known, start = state_before(positions, seq_starts, block_tables, max_blocks, tl.program_id(0))
    head = tl.program_id(1)
    lane = tl.arange(0, CHUNK)
    row = tl.arange(0, PART)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    in_column = column < 16
    at = head * 256 + row[:, None] * 16 + column[None, :]
    in_row0 = row < 16 - 0 * PART
    inside0 = in_row0[:, None] & in_column[None, :]
    state0 = tl.load(state_ptr + start + at + 0 * PART * 16, mask=inside0 & known, other=0.0).to(tl.float32)
    upto = lane[:, None] >= lane[None, :]
    for number in range(begin // CHUNK, (end + CHUNK - 1) // CHUNK):
        place = number * CHUNK + lane
        token = place.to(tl.int64)
        own = (place >= begin) & (place < end)
        keys = head // 2 * 16 + row[None, :]
        q_at = q_ptr + token[:, None] * 16 + keys
        k_at = k_ptr + token[:, None] * 16 + keys
        values = head * 16 + column[None, :]
        keep = own[:, None] & in_column[None, :]
        u = tl.load(v_ptr + token[:, None] * 32 + values, mask=keep, other=0.0).to(tl.float32)
        decay = tl.load(decay_ptr + token * 2 + head, mask=own, other=0.0).to(tl.float32)
        total = tl.cumsum(decay, 0)
        since = tl.exp(total)[:, None]
        o = tl.zeros([CHUNK, BLOCK], tl.float32)
        weight = tl.zeros([CHUNK, CHUNK], tl.float32)
        keep = own[:, None] & in_row0[None, :]
        k = tl.load(k_at + 0 * PART, mask=keep, other=0.0).to(tl.float32)
        q = tl.load(q_at + 0 * PART, mask=keep, other=0.0).to(tl.float32)
        weight += product(q, tl.trans(k))
        o += product(q, state0)
        weight *= tl.where(upto, tl.exp(tl.where(upto, total[:, None] - total[None, :], 0.0)), 0.0)
        o = o * since + product(weight, u)
        keep = own[:, None] & in_column[None, :]
        tl.store(o_ptr + token[:, None] * 32 + values, o.to(o_ptr.dtype.element_ty), mask=keep)
        # the states that are left behind tokens of the chunk
        slot = tl.load(slot_mapping + token, mask=own, other=-1)
        left = tl.min(tl.where(slot >= 0, lane, CHUNK), axis=0)
        while left < CHUNK:
            here = tl.sum(tl.where(lane == left, total, 0.0), axis=0)
            rest = tl.where(lane <= left, tl.exp(tl.where(lane <= left, here - total, 0.0)), 0.0)
            block = tl.sum(tl.where((lane == left) & (slot >= 0), slot, 0), axis=0)
            behind_at = state_ptr + block.to(tl.int64) * 512 + at
            k = tl.load(k_at + 0 * PART, mask=own[:, None] & in_row0[None, :], other=0.0).to(tl.float32)
            behind = state0 * tl.exp(here) + product(tl.trans(k * rest[:, None]), u)
            tl.store(behind_at + 0 * PART * 16, behind.to(state_ptr.dtype.element_ty), mask=inside0)
            left = tl.min(tl.where((slot >= 0) & (lane > left), lane, CHUNK), axis=0)
        whole = tl.sum(decay, axis=0)
        rest = tl.exp(whole - total)[:, None]
        k = tl.load(k_at + 0 * PART, mask=own[:, None] & in_row0[None, :], other=0.0).to(tl.float32)
        state0 = state0 * tl.exp(whole) + product(tl.trans(k * rest), u)
