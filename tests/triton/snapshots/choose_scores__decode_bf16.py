# choose_scores(q_ptr: *bf16, w_ptr: *bf16, scores_ptr: *fp32, kv_ptr: *bf16, context_lens: *i32, block_tables: *i32, max_blocks?: i32)
# grid (1 * ceil(num_seqs / 1), 1, 1), 4 warps, 2 stages

# triton/common.py.jinja


KEY_DIM = tl.constexpr(32)
HEADS = tl.constexpr(16)  # heads of the index that are taken at once, padded
TOKENS = tl.constexpr(1)
ROWS = tl.constexpr(16)  # (token, head) pairs
TILE = tl.constexpr(64)  # keys per step
SEGMENT = tl.constexpr(512)  # keys of one program
COUNT = tl.constexpr(8)  # keys that are chosen
WIDTH = tl.constexpr(256)  # distances
BLOCK = tl.constexpr(16)  # tokens per page
PAGE = tl.constexpr(512)  # elements per page
QK = tl.constexpr(tl.bfloat16)  # element type of the products


@triton.jit
def load_piece(kv_ptr, at, known, FIRST: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr):
    """[TILE, WIDTH]: elements from FIRST on of the vectors that begin at `at`; zeros where not known."""
    d = FIRST + tl.arange(0, WIDTH)
    mask = known[:, None]
    if FIRST + WIDTH > DIM:
        mask = mask & (d < DIM)[None, :]
    return tl.load(kv_ptr + at[:, None] + d[None, :], mask=mask, other=0)


@triton.jit
def load_queries(q_ptr, at, inside, FIRST: tl.constexpr, SIZE: tl.constexpr):
    """[ROWS, SIZE]: a piece of the queries that begin at `at`."""
    d = FIRST + tl.arange(0, SIZE)
    q = tl.load(q_ptr + at[:, None] + d[None, :], mask=inside[:, None] & (d < KEY_DIM)[None, :], other=0)
    return q.to(QK)


@triton.jit
def choose_scores(
    q_ptr, w_ptr, scores_ptr, kv_ptr, context_lens, block_tables, max_blocks
):
    sequence = tl.program_id(0)
    start = sequence
    first = 0
    count = 1
    context = tl.load(context_lens + sequence)
    origin = context - count  # the place in the pages of the step's first token
    begin = tl.program_id(1) * SEGMENT
    end = tl.minimum(begin + SEGMENT, tl.minimum(origin + first + TOKENS, context))
    if (context <= COUNT) | (begin >= end):
        return
    token = first + tl.arange(0, TOKENS)
    there = token < count
    at = (start + token).to(tl.int64)
    position = tl.zeros((TOKENS,), tl.int32) + origin
    row = tl.arange(0, ROWS)
    row_at = (start + first + row // HEADS).to(tl.int64)
    head = 0 + row % HEADS
    inside = (first + row // HEADS < count) & (head < 4)
    q_at = row_at * 128 + head * KEY_DIM
    q0_0 = load_queries(q_ptr, q_at, inside, 0, 32)
    w0 = tl.load(w_ptr + row_at * 8 + head, mask=inside, other=0).to(tl.float32)
    table_ptr = block_tables + sequence.to(tl.int64) * max_blocks
    for low in tl.range(begin, end, TILE):
        placed = low + tl.arange(0, TILE)
        known = placed < end
        page = tl.load(table_ptr + placed // BLOCK, mask=known, other=0).to(tl.int64)
        slot = placed % BLOCK
        key_at = page * PAGE + slot * KEY_DIM
        k0 = load_piece(kv_ptr, key_at, known, 0, 32, KEY_DIM)
        score = tl.zeros((TOKENS, TILE), tl.float32)
        product = tl.zeros((ROWS, TILE), tl.float32)
        product = dot(q0_0, tl.trans(k0), product)
        product = tl.maximum(product, 0.0) * w0[:, None]
        score += tl.sum(tl.reshape(product, (TOKENS, HEADS, TILE)), axis=1)
        seen = known[None, :]
        key = placed
        column = position[:, None] - key[None, :]
        seen = seen & there[:, None] & (column >= 0) & (column < WIDTH)
        tl.store(scores_ptr + at[:, None] * WIDTH + column, score, mask=seen)
