# attention(q_ptr?: *fp32, sinks_ptr?: *fp32, o_ptr?: *fp32, kv_ptr: *i8, scales_ptr: *fp32, context_lens: *i32, block_tables: *i32, max_blocks?: i32)
# grid (1 * ceil(num_seqs / 1), 2, 1), 4 warps, 2 stages

# triton/common.py.jinja


GROUP = tl.constexpr(2)  # query heads per KV head
HEADS = tl.constexpr(2)  # of them, those of one program
KEY_DIM = tl.constexpr(16)
VALUE_DIM = tl.constexpr(24)
ROWS = tl.constexpr(16)  # (token, head) pairs of one program
TILE = tl.constexpr(16)  # keys per step
BLOCK = tl.constexpr(24)  # tokens per page
PAGE = tl.constexpr(2688)  # elements per page
VALUES = tl.constexpr(768)  # where a page's values begin
SCALE_PAGE = tl.constexpr(672)  # the same in float32 elements, for the scales of int8 codes
KEY_SCALES = tl.constexpr(576)
VALUE_SCALES = tl.constexpr(624)
KEY_WIDTH = tl.constexpr(16)  # elements from a key to the next; of a value
VALUE_WIDTH = tl.constexpr(32)
UNIT = tl.constexpr(0.36067376022224085)  # scores as `sweep` has them, times UNIT, are logarithms to base 2
LOG2E = tl.constexpr(1.4426950408889634)
QK = tl.constexpr(tl.bfloat16)  # element types of the two products
PV = tl.constexpr(tl.bfloat16)


@triton.jit
def load_rotated(
    x_ptr, start, inside, position, FIRST: tl.constexpr, WIDTH: tl.constexpr
):
    """float32 [rows, WIDTH]: dims from FIRST on of the rows that begin at element `start` of x, rotated to `position`.

    Zeros beyond the last dim and where not inside.
    """
    d = FIRST + tl.arange(0, WIDTH)
    mask = inside[:, None]
    if FIRST + WIDTH > 16:
        mask = mask & (d < 16)[None, :]
    x = tl.load(x_ptr + start[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
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
def numbers(codes):
    """What the loaded elements of a piece stand for, but for scales and centres; float32."""
    return codes.to(tl.float32)


@triton.jit
def sweep(
    q0, acc0, peak, total, position, begin, end, low, high, kv_ptr, scales_ptr, table_ptr, head, MASKED: tl.constexpr
):
    """Take the keys [begin, end), in tiles from `begin` on, into the softmax of queries [ROWS, piece].

    Accumulators [ROWS, piece], peak and total [ROWS] are its state: the unnormalized output, the highest score and the
    sum of weights. If MASKED, only keys in [low, high) are read and only those that `position` [ROWS] sees count;
    otherwise all keys of the tiles must be visible to all rows.
    """
    # page numbers are loaded one tile ahead, so that the loads of keys and values wait for no other load
    ahead = begin + tl.arange(0, TILE)
    page = tl.load(table_ptr + ahead // BLOCK, mask=ahead < high, other=0)
    for start in tl.range(begin, end, TILE):
        key = start + tl.arange(0, TILE)
        if MASKED:
            known = (key >= low) & (key < high)
        else:
            known = tl.full((TILE,), True, tl.int1)
        here = page.to(tl.int64)
        slot = head * BLOCK + key % BLOCK
        ahead = key + TILE
        page = tl.load(table_ptr + ahead // BLOCK, mask=ahead < high, other=0)
        at = here * PAGE + slot * KEY_WIDTH
        score = tl.zeros((ROWS, TILE), tl.float32)
        k = load_piece(kv_ptr, at, known, 0, 16, KEY_WIDTH)
        k = numbers(k).to(QK)
        score = dot(q0, tl.trans(k), score)
        at = here * PAGE + VALUES + slot * VALUE_WIDTH
        v0 = load_piece(kv_ptr, at, known, 0, 32, VALUE_WIDTH)
        at = here * SCALE_PAGE + slot
        score *= tl.load(scales_ptr + KEY_SCALES + at, mask=known, other=0.0)[None, :]
        value_scale = tl.load(scales_ptr + VALUE_SCALES + at, mask=known, other=0.0)
        if MASKED:
            seen = (key[None, :] <= position[:, None]) & known[None, :]
            seen = seen & (key[None, :] > position[:, None] - 4)
            score = tl.where(seen, score, float("-inf"))
        top = tl.maximum(peak, tl.max(score, axis=1) * UNIT)
        base = tl.where(top == float("-inf"), 0.0, top)  # a row may not have seen anything yet
        weight = tl.exp2(score * UNIT - base[:, None])
        shrink = tl.exp2(peak - base)
        total = total * shrink + tl.sum(weight, axis=1)
        weight *= value_scale[None, :]
        weight = weight.to(PV)
        acc0 = dot(weight, numbers(v0).to(PV), acc0 * shrink[:, None])
        peak = top
    return acc0, peak, total



@triton.jit
def attention(
    q_ptr, sinks_ptr, o_ptr, kv_ptr, scales_ptr, context_lens, block_tables, max_blocks
):
    """One program per sequence, HEADS query heads of a KV head, and split of the keys."""
    sequence = tl.program_id(0)
    context = tl.load(context_lens + sequence)
    low = 0
    low = tl.maximum(low, context - 4)
    begin = low // TILE * TILE
    end = context
    head = tl.program_id(1) // 1
    row = tl.arange(0, ROWS)
    member = tl.program_id(1) % 1 * HEADS + row  # query head within the group
    inside = (row < HEADS) & (member < GROUP)
    query_head = head * GROUP + member
    position = tl.zeros((ROWS,), tl.int32) + (context - 1)
    q_at = sequence.to(tl.int64) * 64 + query_head * KEY_DIM
    q0 = load_rotated(q_ptr, q_at, inside, position, 0, 16).to(QK)
    acc0 = tl.zeros((ROWS, 32), tl.float32)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    table_ptr = block_tables + sequence.to(tl.int64) * max_blocks
    acc0, peak, total = sweep(
        q0, acc0, peak, total, position, begin, end, low, end, kv_ptr, scales_ptr, table_ptr, head, True
    )

    # dependent: next
    total += tl.exp2(tl.load(sinks_ptr + query_head, mask=inside, other=0.0) * LOG2E - peak)
    share = 1 / tl.maximum(total, 1e-30)[:, None]  # 0 where nothing is seen
    to_ptr = o_ptr + (sequence.to(tl.int64) * 96 + query_head * VALUE_DIM)[:, None]
    d = 0 + tl.arange(0, 32)
    mask = inside[:, None] & (d < VALUE_DIM)[None, :]
    tl.store(to_ptr + d[None, :], (acc0 * share).to(to_ptr.dtype.element_ty), mask=mask)
