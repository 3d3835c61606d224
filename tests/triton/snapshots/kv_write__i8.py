# kv_write(k_ptr?: *fp32, v_ptr?: *fp32, kv_ptr: *i8, scales_ptr: *fp32, positions: *i32, slot_mapping: *i32, num_tokens?: i32)
# grid (1 * ceil(num_tokens / 8), 1, 1), 4 warps, 2 stages

# triton/common.py.jinja


BLOCK = tl.constexpr(16)
HEADS = tl.constexpr(2)
TOKENS = tl.constexpr(8)
STORED = tl.constexpr(16)  # (token, head) pairs, padded


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
def quantize(x):
    """int8 codes of rows and what multiplies them; a row that holds no finite number gets scale NaN."""
    finite = tl.sum((tl.abs(x) < float("inf")).to(tl.int32), axis=1) == x.shape[1]
    peak = tl.max(tl.abs(x), axis=1)
    inverse = tl.where(peak > 1e-30, 127.0 / tl.maximum(peak, 1e-30), 0.0)
    code = tl.where(finite[:, None], x, 0.0) * inverse[:, None]
    code = code + 12582912.0 - 12582912.0  # to the nearest integer, ties to even
    return code.to(tl.int8), tl.where(finite, peak / 127.0, float("nan"))


@triton.jit
def store(
    k_ptr, v_ptr, kv_ptr, scales_ptr, token, head, inside, slot, position
):
    """Keys and values of `token` and `head` [STORED] at their slots, where inside."""
    at = token.to(tl.int64)
    k = load_rotated(k_ptr, at * 32 + head * 16, inside, position, 0, 16)
    d = tl.arange(0, 32)
    mask = inside[:, None] & (d < 24)[None, :]
    at = at * 48 + head * 24
    v = tl.load(v_ptr + at[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)

    page = (slot // BLOCK).to(tl.int64)
    at = head * BLOCK + slot % BLOCK
    k, key_scale = quantize(k)
    v, value_scale = quantize(v)
    scale_at = page * 448 + at
    tl.store(scales_ptr + 384 + scale_at, key_scale, mask=inside)
    tl.store(scales_ptr + 416 + scale_at, value_scale, mask=inside)
    value_at = page * 1792 + 512 + at * 32
    mask = inside[:, None]
    tl.store(kv_ptr + value_at[:, None] + d[None, :], v.to(kv_ptr.dtype.element_ty), mask=mask)
    d = tl.arange(0, 16)
    mask = inside[:, None]
    key_at = page * 1792 + at * 16
    tl.store(kv_ptr + key_at[:, None] + d[None, :], k.to(kv_ptr.dtype.element_ty), mask=mask)



@triton.jit
def kv_write(
    k_ptr, v_ptr, kv_ptr, scales_ptr, positions, slot_mapping, num_tokens
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
        k_ptr, v_ptr, kv_ptr, scales_ptr, token, head, inside, slot, position
    )
