# gated_chunks(q_ptr: *bf16, k_ptr: *bf16, v_ptr: *bf16, decay_ptr?: *fp32, beta_ptr?: *fp32, o_ptr: *bf16, solved_ptr: *fp32, state_ptr: *fp32, positions: *i32, slot_mapping: *i32, seq_starts: *i32, block_tables: *i32, max_blocks?: i32)
# grid (1 * ceil(num_seqs / 1), 4, 3), 4 warps, 2 stages

# triton/common.py.jinja


CHUNK = tl.constexpr(16)
PART = tl.constexpr(64)
BLOCK = tl.constexpr(16)
HEADS = tl.constexpr(4)
SEQS = tl.constexpr(4)


@triton.jit
def state_before(positions, seq_starts, block_tables, max_blocks, seq):
    """First token of the sequence, the one behind its last, whether there is a state, and where it begins."""
    begin = tl.load(seq_starts + seq)
    end = tl.load(seq_starts + seq + 1)
    position = tl.load(positions + begin, mask=begin < end, other=0)  # a padded step may have sequences of no tokens
    known = position > 0
    block = tl.load(block_tables + seq.to(tl.int64) * max_blocks + (position - 1) // 32, mask=known, other=0)
    return begin, end, known, block.to(tl.int64) * 11520



@triton.jit
def product(a, b):
    """a b of float32 as three products of bf16: to 2^-16 of the largest, in half the registers of TF32's."""
    if INTERPRETED:
        result = tl.dot(a, b, input_precision="ieee")
    else:
        result = tl.dot(a, b, input_precision="bf16x3")
    return result


@triton.jit
def gated_solve(k_ptr, decay_ptr, beta_ptr, solved_ptr, seq_starts, num_tokens, num_seqs):
    """One chunk of one head, by forward substitution: row i of the inverse needs those above it."""
    head = tl.program_id(1)
    lane = tl.arange(0, CHUNK)
    place = tl.program_id(0) * CHUNK + lane
    token = place.to(tl.int64)
    in_tokens = place < num_tokens
    row = tl.arange(0, PART)
    key_at = k_ptr + token[:, None] * 144 + head // 2 * 72 + row[None, :]
    a = tl.zeros([CHUNK, CHUNK], tl.float32)
    for first in tl.static_range(0, 72, PART):
        keep = in_tokens[:, None] & (first + row < 72)[None, :]
        k = tl.load(key_at + first, mask=keep, other=0.0).to(tl.float32)
        a += product(k, tl.trans(k))
    total = tl.cumsum(tl.load(decay_ptr + token * 4 + head, mask=in_tokens, other=0.0).to(tl.float32), 0)
    number = tl.arange(0, SEQS)
    starts = tl.load(seq_starts + number, mask=number < num_seqs, other=2147483647)
    seq = tl.sum((place[:, None] >= starts[None, :]).to(tl.int32), axis=1)
    before = (lane[:, None] < lane[None, :]) & (seq[:, None] == seq[None, :])  # row j, column t
    weight = tl.exp(tl.where(before, total[None, :] - total[:, None], 0.0))
    weight *= tl.load(beta_ptr + token * 4 + head, mask=in_tokens, other=0.0).to(tl.float32)[None, :]
    a = tl.where(before, a * weight, 0.0)  # A transposed
    solved = (lane[:, None] == lane[None, :]).to(tl.float32)
    for i in range(1, CHUNK):
        factors = tl.sum(tl.where((lane == i)[None, :], a, 0.0), axis=1)
        sums = tl.sum(factors[:, None] * solved, axis=0)
        solved -= tl.where((lane == i)[:, None], sums[None, :], 0.0)
    at = (token[:, None] * HEADS + head) * CHUNK + lane[None, :]
    tl.store(solved_ptr + at, solved, mask=in_tokens[:, None])


@triton.jit
def gated_chunks(
    q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, o_ptr, solved_ptr, state_ptr,
    positions, slot_mapping, seq_starts, block_tables, max_blocks
):
    """BLOCK value columns of one head of one sequence."""
    begin, end, known, start = state_before(positions, seq_starts, block_tables, max_blocks, tl.program_id(0))
    head = tl.program_id(1)
    lane = tl.arange(0, CHUNK)
    row = tl.arange(0, PART)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    in_column = column < 40
    at = head * 2880 + row[:, None] * 40 + column[None, :]
    in_row0 = row < 72 - 0 * PART
    inside0 = in_row0[:, None] & in_column[None, :]
    state0 = tl.load(state_ptr + start + at + 0 * PART * 40, mask=inside0 & known, other=0.0).to(tl.float32)
    in_row1 = row < 72 - 1 * PART
    inside1 = in_row1[:, None] & in_column[None, :]
    state1 = tl.load(state_ptr + start + at + 1 * PART * 40, mask=inside1 & known, other=0.0).to(tl.float32)
    upto = lane[:, None] >= lane[None, :]
    for number in range(begin // CHUNK, (end + CHUNK - 1) // CHUNK):
        place = number * CHUNK + lane
        token = place.to(tl.int64)
        own = (place >= begin) & (place < end)
        keys = head // 2 * 72 + row[None, :]
        q_at = q_ptr + token[:, None] * 144 + keys
        k_at = k_ptr + token[:, None] * 144 + keys
        values = head * 40 + column[None, :]
        keep = own[:, None] & in_column[None, :]
        u = tl.load(v_ptr + token[:, None] * 160 + values, mask=keep, other=0.0).to(tl.float32)
        decay = tl.load(decay_ptr + token * 4 + head, mask=own, other=0.0).to(tl.float32)
        total = tl.cumsum(decay, 0)
        since = tl.exp(total)[:, None]
        o = tl.zeros([CHUNK, BLOCK], tl.float32)
        weight = tl.zeros([CHUNK, CHUNK], tl.float32)
        keep = own[:, None] & in_row0[None, :]
        k0 = tl.load(k_at + 0 * PART, mask=keep, other=0.0).to(tl.float32)
        q = tl.load(q_at + 0 * PART, mask=keep, other=0.0).to(tl.float32)
        weight += product(q, tl.trans(k0))
        o += product(q, state0)
        u -= product(k0, state0) * since
        keep = own[:, None] & in_row1[None, :]
        k1 = tl.load(k_at + 1 * PART, mask=keep, other=0.0).to(tl.float32)
        q = tl.load(q_at + 1 * PART, mask=keep, other=0.0).to(tl.float32)
        weight += product(q, tl.trans(k1))
        o += product(q, state1)
        u -= product(k1, state1) * since
        u *= tl.load(beta_ptr + token * 4 + head, mask=own, other=0.0).to(tl.float32)[:, None]
        solved_at = (token[:, None] * HEADS + head) * CHUNK + lane[None, :]
        u = product(tl.load(solved_ptr + solved_at, mask=own[:, None] & own[None, :], other=0.0), u)
        weight *= tl.where(upto, tl.exp(tl.where(upto, total[:, None] - total[None, :], 0.0)), 0.0)
        o = o * since + product(weight, u)
        keep = own[:, None] & in_column[None, :]
        tl.store(o_ptr + token[:, None] * 160 + values, o.to(o_ptr.dtype.element_ty), mask=keep)
        # the states that are left behind tokens of the chunk
        slot = tl.load(slot_mapping + token, mask=own, other=-1)
        left = tl.min(tl.where(slot >= 0, lane, CHUNK), axis=0)
        while left < CHUNK:
            here = tl.sum(tl.where(lane == left, total, 0.0), axis=0)
            rest = tl.where(lane <= left, tl.exp(tl.where(lane <= left, here - total, 0.0)), 0.0)
            block = tl.sum(tl.where((lane == left) & (slot >= 0), slot, 0), axis=0)
            behind_at = state_ptr + block.to(tl.int64) * 11520 + at
            behind = state0 * tl.exp(here) + product(tl.trans(k0 * rest[:, None]), u)
            tl.store(behind_at + 0 * PART * 40, behind.to(state_ptr.dtype.element_ty), mask=inside0)
            behind = state1 * tl.exp(here) + product(tl.trans(k1 * rest[:, None]), u)
            tl.store(behind_at + 1 * PART * 40, behind.to(state_ptr.dtype.element_ty), mask=inside1)
            left = tl.min(tl.where((slot >= 0) & (lane > left), lane, CHUNK), axis=0)
        whole = tl.sum(decay, axis=0)
        rest = tl.exp(whole - total)[:, None]
        state0 = state0 * tl.exp(whole) + product(tl.trans(k0 * rest), u)
        state1 = state1 * tl.exp(whole) + product(tl.trans(k1 * rest), u)
