# attention(q_ptr: *bf16, cos_ptr?: *fp32, sin_ptr?: *fp32, alibi_ptr?: *fp32, peaks_ptr: *fp32, totals_ptr: *fp32, partials_ptr: *fp32, kv_ptr: *i8, scales_ptr: *fp32, seq_starts: *i32, context_lens: *i32, block_tables: *i32, positions: *i32, tree_masks: *i32, num_seqs?: i32, max_blocks?: i32)
# grid (1 * ceil(num_tokens / 8) + 1 * ceil(num_seqs / 1), 2, 2), 4 warps, 2 stages

# triton/common.py.jinja


GROUP = tl.constexpr(2)  # query heads per KV head
HEADS = tl.constexpr(2)  # of them, those of one program
KEY_DIM = tl.constexpr(16)
VALUE_DIM = tl.constexpr(24)
ROWS = tl.constexpr(16)  # (token, head) pairs of one program
TILE = tl.constexpr(16)  # keys per step
BLOCK = tl.constexpr(16)  # tokens per page
PAGE = tl.constexpr(1792)  # elements per page
VALUES = tl.constexpr(512)  # where a page's values begin
SCALE_PAGE = tl.constexpr(448)  # the same in float32 elements, for the scales of int8 codes
KEY_SCALES = tl.constexpr(384)
VALUE_SCALES = tl.constexpr(416)
KEY_WIDTH = tl.constexpr(16)  # elements from a key to the next; of a value
VALUE_WIDTH = tl.constexpr(32)
UNIT = tl.constexpr(1.0)  # scores as `sweep` has them, times UNIT, are logarithms to base 2
LOG2E = tl.constexpr(1.4426950408889634)
QK = tl.constexpr(tl.bfloat16)  # element types of the two products
PV = tl.constexpr(tl.bfloat16)


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
    if FIRST < 8:
        if FIRST + WIDTH > 8:
            mask = mask & (d < 8)[None, :]
        low = d % 2 == 0
        partner = d // 2 * 2 + 1 - d % 2
        other = tl.load(x_ptr + start[:, None] + partner[None, :], mask=mask, other=0.0).to(tl.float32)
        angle = tl.minimum(tl.maximum(position, 0), 63).to(tl.int64) * 8
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
def numbers(codes):
    """What the loaded elements of a piece stand for, but for scales and centres; float32."""
    return codes.to(tl.float32)


@triton.jit
def sweep(
    q0, acc0, peak, total, position, slope, mask_low, mask_high, is_tree, origin, key_positions, begin, end, low, high, kv_ptr, scales_ptr, table_ptr, head, MASKED: tl.constexpr
):
    """Take the keys [begin, end), in tiles from `begin` on, into the softmax of queries [ROWS, piece].

    Accumulators [ROWS, piece], peak and total [ROWS] are its state: the unnormalized output, the highest score and the
    sum of weights. If MASKED, only keys in [low, high) are read and only those that `position` [ROWS] sees count;
    otherwise all keys of the tiles must be visible to all rows. Where is_tree, the keys from `origin` on are a tree's,
    of which a row sees those in its mask of 64 bits; key_positions tells their positions by their places.
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
        # softcap * tanh(score * scale / softcap), to base 2
        score = 5.0 * LOG2E * (1 - 2 / (1 + tl.exp2(score * (0.1 * LOG2E))))
        if MASKED:
            placed = key
            key = tl.where(key < origin, key, tl.load(key_positions + key, mask=known & (key >= origin), other=0))
        else:
            placed = key
        score += slope[:, None] * (key[None, :] - position[:, None]).to(tl.float32)
        if MASKED:
            guess = tl.maximum(placed - origin, 0)
            bits = tl.where((guess < 32)[None, :], mask_low[:, None], mask_high[:, None]) >> (guess % 32)[None, :]
            branch = (placed < origin)[None, :] | ((bits & 1) != 0)
            seen = tl.where(is_tree, branch, placed[None, :] <= position[:, None]) & known[None, :]
            seen = seen & (key[None, :] > position[:, None] - 20)
            seen = seen & (key[None, :] >= (position // 32 * 32)[:, None])
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


TOKENS = tl.constexpr(8)


# triton/find_sequence.py.jinja


@triton.jit
def first_seen(position):
    """The first key that a query at `position` sees."""
    low = 0
    low = tl.maximum(low, position - 19)
    low = tl.maximum(low, position // 32 * 32)
    return low


@triton.jit
def attention(
    q_ptr, cos_ptr, sin_ptr, alibi_ptr, peaks_ptr, totals_ptr, partials_ptr, kv_ptr, scales_ptr, seq_starts, context_lens, block_tables, positions, tree_masks, num_seqs, max_blocks
):
    """One program per TOKENS tokens of a sequence and HEADS query heads of a KV head."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # late tiles see most keys: they go first
    sequence = find_sequence(tile, seq_starts, num_seqs)
    start = tl.load(seq_starts + sequence)
    count = tl.load(seq_starts + sequence + 1) - start
    first = (tile - start // TOKENS - sequence) * TOKENS
    if (first < 0) | (first >= count):
        return
    context = tl.load(context_lens + sequence)
    head = tl.program_id(1) // 1
    row = tl.arange(0, ROWS)
    member = tl.program_id(1) % 1 * HEADS + row % HEADS  # query head within the group
    token = first + row // HEADS
    inside = (token < count) & (row < TOKENS * HEADS) & (member < GROUP)
    query_head = head * GROUP + member
    at = (start + token).to(tl.int64)
    position = tl.load(positions + at, mask=inside, other=0)
    origin = context - count  # the place in the pages of the step's first token
    mask_low = tl.load(tree_masks + 2 * at, mask=inside, other=0)
    mask_high = tl.load(tree_masks + 2 * at + 1, mask=inside, other=0)
    is_tree = tl.load(tree_masks + 2 * start) != 0
    q_at = at * 64 + query_head * KEY_DIM
    q0 = load_rotated(q_ptr, cos_ptr, sin_ptr, q_at, inside, position, 0, 16).to(QK)
    slope = tl.load(alibi_ptr + query_head, mask=inside, other=0.0) * LOG2E
    acc0 = tl.zeros((ROWS, 32), tl.float32)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)

    oldest = tl.where(is_tree, origin, origin + first)  # a guess sees no guess that does not precede it
    high = tl.minimum(origin + first + TOKENS, context)
    low = first_seen(oldest)
    begin = low // TILE * TILE
    whole = tl.maximum((oldest + 1) // TILE * TILE, begin)  # every row of the tile sees the keys from `inner` to there
    table_ptr = block_tables + sequence.to(tl.int64) * max_blocks
    share = tl.maximum(tl.cdiv(tl.cdiv(high - begin, TILE), tl.num_programs(2)), 1) * TILE
    begin += tl.program_id(2) * share
    whole = tl.minimum(tl.maximum(whole, begin), begin + share)
    end = tl.minimum(high, begin + share)
    inner = tl.minimum(tl.cdiv(first_seen(high - 1), TILE) * TILE, whole)
    acc0, peak, total = sweep(q0, acc0, peak, total, position, slope, mask_low, mask_high, is_tree, origin, positions + start - origin, begin, inner, low, high, kv_ptr, scales_ptr, table_ptr, head, True)
    begin = tl.maximum(begin, inner)
    acc0, peak, total = sweep(q0, acc0, peak, total, position, slope, mask_low, mask_high, is_tree, origin, positions + start - origin, begin, whole, low, high, kv_ptr, scales_ptr, table_ptr, head, False)
    acc0, peak, total = sweep(q0, acc0, peak, total, position, slope, mask_low, mask_high, is_tree, origin, positions + start - origin, whole, end, low, high, kv_ptr, scales_ptr, table_ptr, head, True)
    at = (at * 4 + query_head) * tl.num_programs(2) + tl.program_id(2)
    tl.store(peaks_ptr + at, peak, mask=inside)
    tl.store(totals_ptr + at, total, mask=inside)
    to_ptr = partials_ptr + at[:, None] * VALUE_DIM
    d = 0 + tl.arange(0, 32)
    y = acc0
    tl.store(to_ptr + d[None, :], y.to(to_ptr.dtype.element_ty), mask=inside[:, None] & (d < VALUE_DIM)[None, :])
