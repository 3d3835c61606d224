# attention(q_ptr: *fp16, cos_ptr?: *fp32, sin_ptr?: *fp32, o_ptr: *fp16, peaks_ptr: *fp32, totals_ptr: *fp32, partials_ptr: *fp32, counters_ptr: *i32, kv_ptr: *fp16, context_lens: *i32, block_tables: *i32, max_blocks?: i32)
# grid (1 * ceil(num_seqs / 1), 2, 2), 4 warps, 2 stages

# triton/common.py.jinja


GROUP = tl.constexpr(2)  # query heads per KV head
HEADS = tl.constexpr(2)  # of them, those of one program
KEY_DIM = tl.constexpr(16)
VALUE_DIM = tl.constexpr(24)
ROWS = tl.constexpr(16)  # (token, head) pairs of one program
TILE = tl.constexpr(16)  # keys per step
BLOCK = tl.constexpr(16)  # tokens per page
PAGE = tl.constexpr(1280)  # elements per page
VALUES = tl.constexpr(512)  # where a page's values begin
UNIT = tl.constexpr(0.36067376022224085)  # scores as `sweep` has them, times UNIT, are logarithms to base 2
LOG2E = tl.constexpr(1.4426950408889634)
QK = tl.constexpr(tl.float16)  # element types of the two products
PV = tl.constexpr(tl.float16)


@triton.jit
def load_rotated(
    x_ptr, cos_ptr, sin_ptr, start, inside, position, FIRST: tl.constexpr, WIDTH: tl.constexpr
):
    """float32 [rows, WIDTH]: dims from FIRST on of the rows that begin at element `start` of x, rotated to `position`.

    Zeros beyond the last dim and where not inside.
    """
    d = FIRST + tl.arange(0, WIDTH)
    mask = inside[:, None]
    if FIRST + WIDTH > 16:
        mask = mask & (d < 16)[None, :]
    x = tl.load(x_ptr + start[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    if FIRST < 16:
        if FIRST + WIDTH > 16:
            mask = mask & (d < 16)[None, :]
        low = d < 8
        partner = tl.where(low, d + 8, d - 8)
        partner = tl.max_contiguous(tl.multiple_of(partner, 8), 8)
        other = tl.load(x_ptr + start[:, None] + partner[None, :], mask=mask, other=0.0).to(tl.float32)
        angle = tl.minimum(tl.maximum(position, 0), 63).to(tl.int64) * 16
        cos = tl.load(cos_ptr + angle[:, None] + d[None, :], mask=mask, other=1.0)
        sin = tl.load(sin_ptr + angle[:, None] + d[None, :], mask=mask, other=0.0)
        x = x * cos + tl.where(low[None, :], -other, other) * sin
    return x



@triton.jit
def load_piece(kv_ptr, at, known, FIRST: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr):
    """[TILE, WIDTH]: elements from FIRST on of the vectors that begin at `at`; zeros where not known."""
    d = FIRST + tl.arange(0, WIDTH)
    mask = known[:, None]
    if FIRST + WIDTH > DIM:
        mask = mask & (d < DIM)[None, :]
    return tl.load(kv_ptr + at[:, None] + d[None, :], mask=mask, other=0)


@triton.jit
def sweep(
    q0, acc0, peak, total, position, begin, end, low, high, kv_ptr, table_ptr, head, MASKED: tl.constexpr
):
    """Take the keys [begin, end), in tiles from `begin` on, into the softmax of queries [ROWS, piece].

    Accumulators [ROWS, piece], peak and total [ROWS] are its state: the unnormalized output, the highest score and the
    sum of weights. If MASKED, only keys in [low, high) are read and only those that `position` [ROWS] sees count;
    otherwise all keys of the tiles must be visible to all rows.
    """
    # page numbers are loaded one tile ahead, so that the loads of keys and values wait for no other load
    last = tl.minimum(end, high)
    page = tl.load(table_ptr + begin // BLOCK, mask=begin < last, other=0)
    for start in tl.range(begin, end, TILE):
        key = start + tl.arange(0, TILE)
        if MASKED:
            known = (key >= low) & (key < high)
        else:
            known = tl.full((TILE,), True, tl.int1)
        here = page.to(tl.int64)
        slot = head * BLOCK + start % 16 + tl.arange(0, TILE)
        page = tl.load(table_ptr + (start + 16) // 16, mask=start + 16 < last, other=0)
        at = here * PAGE + slot * KEY_DIM
        score = tl.zeros((ROWS, TILE), tl.float32)
        k = load_piece(kv_ptr, at, known, 0, 16, KEY_DIM)
        score = dot(q0, tl.trans(k), score)
        at = here * PAGE + VALUES + slot * VALUE_DIM
        v0 = load_piece(kv_ptr, at, known, 0, 32, VALUE_DIM)
        if MASKED:
            seen = (key[None, :] <= position[:, None]) & known[None, :]
            score = tl.where(seen, score, float("-inf"))
        top = tl.maximum(peak, tl.max(score, axis=1) * UNIT)
        base = tl.where(top == float("-inf"), 0.0, top)  # a row may not have seen anything yet
        weight = tl.exp2(score * UNIT - base[:, None])
        shrink = tl.exp2(peak - base)
        total = total * shrink + tl.sum(weight, axis=1)
        weight = weight.to(PV)
        acc0 = dot(weight, v0, acc0 * shrink[:, None])
        peak = top
    return acc0, peak, total



SPLITS = tl.constexpr(64)  # at most
MERGED = tl.constexpr(64)  # splits whose states are read at once
MEMBERS = tl.constexpr(2)  # HEADS, padded


@triton.jit
def merge(o_ptr, peaks_ptr, totals_ptr, partials_ptr, sequence, head, used):
    """o of this program's query heads, from the states of all splits that were used."""
    row = tl.arange(0, MEMBERS)
    member = tl.program_id(1) % 1 * HEADS + row
    inside = (row < HEADS) & (member < GROUP)
    query_head = head * GROUP + member
    states = ((sequence * 4 + query_head) * tl.num_programs(2))[:, None]
    every = tl.arange(0, SPLITS)[None, :]
    there = inside[:, None] & (every < used)
    peaks = tl.load(peaks_ptr + states + every, mask=there, other=float("-inf"))
    totals = tl.load(totals_ptr + states + every, mask=there, other=0.0)
    top = tl.maximum(tl.max(peaks, axis=1), -1e38)  # finite, also where nothing is seen
    whole = tl.sum(totals * tl.exp2(peaks - top[:, None]), axis=1)
    to_ptr = o_ptr + (sequence.to(tl.int64) * 96 + query_head * VALUE_DIM)[:, None]
    d = 0 + tl.arange(0, 32)
    y = tl.zeros((MEMBERS, 32), tl.float32)
    for first in range(0, used, MERGED):
        split = first + tl.arange(0, MERGED)[None, :]
        known = inside[:, None] & (split < used)
        keep = tl.exp2(tl.load(peaks_ptr + states + split, mask=known, other=float("-inf")) - top[:, None])
        mask = known[:, :, None] & (d < VALUE_DIM)[None, None, :]
        part = tl.load(partials_ptr + (states + split)[:, :, None] * VALUE_DIM + d[None, None, :], mask=mask, other=0.0)
        y += tl.sum(part * keep[:, :, None], axis=1)
    y /= tl.maximum(whole, 1e-30)[:, None]
    in_row = inside[:, None] & (d < VALUE_DIM)[None, :]
    tl.store(to_ptr + d[None, :], y.to(o_ptr.dtype.element_ty), mask=in_row)


@triton.jit
def attention(
    q_ptr, cos_ptr, sin_ptr, o_ptr, peaks_ptr, totals_ptr, partials_ptr, counters_ptr, kv_ptr, context_lens, block_tables, max_blocks
):
    """One program per sequence, HEADS query heads of a KV head, and split of the keys."""
    sequence = tl.program_id(0)
    context = tl.load(context_lens + sequence)
    low = 0
    begin = low // TILE * TILE
    end = context
    share = tl.maximum(tl.cdiv(tl.cdiv(end - begin, TILE), tl.num_programs(2)), 1) * TILE
    used = tl.minimum(tl.maximum(tl.cdiv(end - begin, share), 1), tl.num_programs(2))  # one writes o also where nothing is seen
    if tl.program_id(2) >= used:
        return
    begin += tl.program_id(2) * share
    end = tl.minimum(end, begin + share)
    head = tl.program_id(1) // 1
    row = tl.arange(0, ROWS)
    member = tl.program_id(1) % 1 * HEADS + row  # query head within the group
    inside = (row < HEADS) & (member < GROUP)
    query_head = head * GROUP + member
    position = tl.zeros((ROWS,), tl.int32) + (context - 1)
    q_at = sequence.to(tl.int64) * 64 + query_head * KEY_DIM
    q0 = load_rotated(q_ptr, cos_ptr, sin_ptr, q_at, inside, position, 0, 16).to(QK)
    acc0 = tl.zeros((ROWS, 32), tl.float32)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    table_ptr = block_tables + sequence.to(tl.int64) * max_blocks
    acc0, peak, total = sweep(
        q0, acc0, peak, total, position, begin, end, low, end, kv_ptr, table_ptr, head, True
    )

    # dependent: next
    states = (sequence * 4 + query_head) * tl.num_programs(2)
    at = states + tl.program_id(2)
    tl.store(peaks_ptr + at, peak, mask=inside)
    tl.store(totals_ptr + at, total, mask=inside)
    d = 0 + tl.arange(0, 32)
    mask = inside[:, None] & (d < VALUE_DIM)[None, :]
    tl.store(partials_ptr + at[:, None] * VALUE_DIM + d[None, :], (acc0), mask=mask)
    tl.debug_barrier()  # all that this program wrote comes before it counts
    counter_ptr = counters_ptr + sequence * tl.num_programs(1) + tl.program_id(1)
    if tl.atomic_add(counter_ptr, 1) == used - 1:
        tl.store(counter_ptr, 0)
        merge(o_ptr, peaks_ptr, totals_ptr, partials_ptr, sequence, head, used)
