# choose_scores(q_ptr: *bf16, w_ptr: *bf16, scores_ptr: *fp32, kv_ptr: *u8, scales_ptr: *i32, context_lens: *i32, block_tables: *i32, seq_starts: *i32, positions: *i32, tree_masks: *i32, num_seqs?: i32, max_blocks?: i32)
# grid (1 * ceil(num_tokens / 1) + 1 * ceil(num_seqs / 1), 1, 1), 4 warps, 2 stages

# triton/common.py.jinja


KEY_DIM = tl.constexpr(40)
HEADS = tl.constexpr(64)  # heads of the index that are taken at once, padded
TOKENS = tl.constexpr(1)
ROWS = tl.constexpr(64)  # (token, head) pairs
TILE = tl.constexpr(64)  # keys per step
SEGMENT = tl.constexpr(512)  # keys of one program
COUNT = tl.constexpr(8)  # keys that are chosen
WIDTH = tl.constexpr(256)  # distances
BLOCK = tl.constexpr(16)  # tokens per page
PAGE = tl.constexpr(384)  # elements per page
SCALE_PAGE = tl.constexpr(96)  # the same of scales
KEY_SCALES = tl.constexpr(80)
KEY_WIDTH = tl.constexpr(20)  # bytes of a key
QK = tl.constexpr(tl.bfloat16)  # element type of the products


@triton.jit
def blocks(i, WIDTH: tl.constexpr, FIRST: tl.constexpr, VALUES: tl.constexpr):
    """The size of the block that each element of a piece is in."""
    size = tl.full((WIDTH,), 1, tl.int32)
    if not VALUES and FIRST == 0:
        size = tl.where(i >= 0, 32, size)
    if not VALUES and FIRST == 32:
        size = tl.where(i >= 0, 8, size)
        size = tl.where(i >= 8, 1, size)
    if VALUES and FIRST == 0:
        size = tl.where(i >= 0, 32, size)
    if VALUES and FIRST == 32:
        size = tl.where(i >= 0, 8, size)
        size = tl.where(i >= 8, 1, size)
    return size


@triton.jit
def mix(x, FIRST: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr):
    """Rows [ROWS, WIDTH] of a piece that begins at dim FIRST, of keys or of values, each block transformed; float32."""
    i = tl.arange(0, WIDTH)
    size = blocks(i, WIDTH, FIRST, VALUES)
    start = i & -size
    parity = i[:, None] & i[None, :] & (size - 1)[:, None]
    parity = parity ^ (parity >> 4)
    parity = parity ^ (parity >> 2)
    parity = (parity ^ (parity >> 1)) & 1
    signs = tl.where(start[:, None] == start[None, :], 1 - 2 * parity, 0).to(tl.float32).to(tl.bfloat16)
    # signs are exact in 16 bits, and two halves of x nearly so: products of float32 would be unrolled into registers
    upper = x.to(tl.float32).to(tl.bfloat16)
    lower = (x.to(tl.float32) - upper.to(tl.float32)).to(tl.bfloat16)
    mixed = dot(lower, signs, dot(upper, signs, tl.zeros_like(x).to(tl.float32)))
    return mixed / tl.sqrt(size.to(tl.float32))[None, :]


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
    codes = tl.reshape(tl.join(codes & 15, codes >> 4), (codes.shape[0], codes.shape[1] * 2))
    return (2 * codes.to(tl.int32) - 15).to(tl.float32)


@triton.jit
def span(bits):
    """The two half floats, a scale and a centre, that lie in an integer; float32."""
    scale = (bits & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    centre = ((bits >> 16) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    return scale.to(tl.float32), centre.to(tl.float32)


# triton/find_sequence.py.jinja


@triton.jit
def load_queries(q_ptr, at, inside, FIRST: tl.constexpr, SIZE: tl.constexpr):
    """[ROWS, SIZE]: a piece of the queries that begin at `at`."""
    d = FIRST + tl.arange(0, SIZE)
    q = tl.load(q_ptr + at[:, None] + d[None, :], mask=inside[:, None] & (d < KEY_DIM)[None, :], other=0)
    return mix(q, FIRST, SIZE, False).to(QK)


@triton.jit
def choose_scores(
    q_ptr, w_ptr, scores_ptr, kv_ptr, scales_ptr, context_lens, block_tables, seq_starts, positions, tree_masks, num_seqs, max_blocks
):
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # late tiles see most keys: they go first
    sequence = find_sequence(tile, seq_starts, num_seqs)
    start = tl.load(seq_starts + sequence)
    count = tl.load(seq_starts + sequence + 1) - start
    first = (tile - start // TOKENS - sequence) * TOKENS
    if (first < 0) | (first >= count):
        return
    context = tl.load(context_lens + sequence)
    origin = context - count  # the place in the pages of the step's first token
    begin = tl.program_id(1) * SEGMENT
    end = tl.minimum(begin + SEGMENT, tl.minimum(origin + first + TOKENS, context))
    if (context <= COUNT) | (begin >= end):
        return
    token = first + tl.arange(0, TOKENS)
    there = token < count
    at = (start + token).to(tl.int64)
    position = tl.load(positions + at, mask=there, other=-1)
    mask_low = tl.load(tree_masks + 2 * at, mask=there, other=0)
    mask_high = tl.load(tree_masks + 2 * at + 1, mask=there, other=0)
    is_tree = tl.load(tree_masks + 2 * start) != 0
    key_positions = positions + start - origin
    row = tl.arange(0, ROWS)
    row_at = (start + first + row // HEADS).to(tl.int64)
    head = 0 + row % HEADS
    inside = (first + row // HEADS < count) & (head < 70)
    q_at = row_at * 2800 + head * KEY_DIM
    q0_0 = load_queries(q_ptr, q_at, inside, 0, 32)
    q0_1 = load_queries(q_ptr, q_at, inside, 32, 16)
    summed0 = tl.zeros((ROWS,), tl.float32)
    summed0 += tl.sum(q0_0.to(tl.float32), axis=1)
    summed0 += tl.sum(q0_1.to(tl.float32), axis=1)
    w0 = tl.load(w_ptr + row_at * 80 + head, mask=inside, other=0).to(tl.float32)
    head = 64 + row % HEADS
    inside = (first + row // HEADS < count) & (head < 70)
    q_at = row_at * 2800 + head * KEY_DIM
    q1_0 = load_queries(q_ptr, q_at, inside, 0, 32)
    q1_1 = load_queries(q_ptr, q_at, inside, 32, 16)
    summed1 = tl.zeros((ROWS,), tl.float32)
    summed1 += tl.sum(q1_0.to(tl.float32), axis=1)
    summed1 += tl.sum(q1_1.to(tl.float32), axis=1)
    w1 = tl.load(w_ptr + row_at * 80 + head, mask=inside, other=0).to(tl.float32)
    table_ptr = block_tables + sequence.to(tl.int64) * max_blocks
    for low in tl.range(begin, end, TILE):
        placed = low + tl.arange(0, TILE)
        known = placed < end
        page = tl.load(table_ptr + placed // BLOCK, mask=known, other=0).to(tl.int64)
        slot = placed % BLOCK
        key_at = page * PAGE + slot * KEY_WIDTH
        k0 = numbers(load_piece(kv_ptr, key_at, known, 0, 16, KEY_WIDTH)).to(QK)
        k1 = numbers(load_piece(kv_ptr, key_at, known, 16, 8, KEY_WIDTH)).to(QK)
        scale, centre = span(tl.load(scales_ptr + KEY_SCALES + page * SCALE_PAGE + slot, mask=known, other=0))
        score = tl.zeros((TOKENS, TILE), tl.float32)
        product = tl.zeros((ROWS, TILE), tl.float32)
        product = dot(q0_0, tl.trans(k0), product)
        product = dot(q0_1, tl.trans(k1), product)
        product = product * scale[None, :] + summed0[:, None] * centre[None, :]
        product = tl.maximum(product, 0.0) * w0[:, None]
        score += tl.sum(tl.reshape(product, (TOKENS, HEADS, TILE)), axis=1)
        product = tl.zeros((ROWS, TILE), tl.float32)
        product = dot(q1_0, tl.trans(k0), product)
        product = dot(q1_1, tl.trans(k1), product)
        product = product * scale[None, :] + summed1[:, None] * centre[None, :]
        product = tl.maximum(product, 0.0) * w1[:, None]
        score += tl.sum(tl.reshape(product, (TOKENS, HEADS, TILE)), axis=1)
        guess = tl.maximum(placed - origin, 0)
        bits = tl.where((guess < 32)[None, :], mask_low[:, None], mask_high[:, None]) >> (guess % 32)[None, :]
        branch = (placed < origin)[None, :] | ((bits & 1) != 0)
        seen = tl.where(is_tree, branch, placed[None, :] <= position[:, None]) & known[None, :]
        key = tl.where(placed < origin, placed, tl.load(key_positions + placed, mask=known & (placed >= origin), other=0))
        column = position[:, None] - key[None, :]
        seen = seen & there[:, None] & (column >= 0) & (column < WIDTH)
        tl.store(scores_ptr + at[:, None] * WIDTH + column, score, mask=seen)
