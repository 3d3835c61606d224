# kv_write(k_ptr: *bf16, v_ptr: *bf16, cos_ptr?: *fp32, sin_ptr?: *fp32, kv_ptr: *bf16, positions: *i32, slot_mapping: *i32, num_tokens?: i32)
# grid (1 * ceil(num_tokens / 8), 1, 1), 4 warps, 2 stages

# triton/common.py.jinja


BLOCK = tl.constexpr(16)
HEADS = tl.constexpr(2)
TOKENS = tl.constexpr(8)
STORED = tl.constexpr(16)  # (token, head) pairs, padded


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
def store(
    k_ptr, v_ptr, cos_ptr, sin_ptr, kv_ptr, token, head, inside, slot, position
):
    """Keys and values of `token` and `head` [STORED] at their slots, where inside."""
    at = token.to(tl.int64)
    k = load_rotated(k_ptr, cos_ptr, sin_ptr, at * 144 + head * 16, inside, position, 0, 16)
    d = tl.arange(0, 32)
    mask = inside[:, None] & (d < 24)[None, :]
    at = at * 144 + head * 24
    v = tl.load(v_ptr + at[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)

    page = (slot // BLOCK).to(tl.int64)
    at = head * BLOCK + slot % BLOCK
    value_at = page * 1280 + 512 + at * 24
    tl.store(kv_ptr + value_at[:, None] + d[None, :], v.to(kv_ptr.dtype.element_ty), mask=mask)
    d = tl.arange(0, 16)
    mask = inside[:, None]
    key_at = page * 1280 + at * 16
    tl.store(kv_ptr + key_at[:, None] + d[None, :], k.to(kv_ptr.dtype.element_ty), mask=mask)



@triton.jit
def kv_write(
    k_ptr, v_ptr, cos_ptr, sin_ptr, kv_ptr, positions, slot_mapping, num_tokens
):
    """One program per TOKENS tokens and HEADS KV heads."""
    row = tl.arange(0, STORED)
    token = tl.program_id(0) * TOKENS + row // HEADS
    head = tl.program_id(1) * HEADS + row % HEADS
    inside = (row < TOKENS * HEADS) & (token < num_tokens) & (head < 2)
    slot = tl.load(slot_mapping + token, mask=inside, other=-1)
    inside = inside & (slot >= 0)
    position = tl.load(positions + token, mask=inside, other=0)
    store(
        k_ptr, v_ptr, cos_ptr, sin_ptr, kv_ptr, token, head, inside, slot, position
    )
