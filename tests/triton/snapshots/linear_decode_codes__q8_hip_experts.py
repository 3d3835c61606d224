# linear_decode(x_ptr: *fp16, w_ptr: *u8, b_ptr?: *fp32, index_ptr: *i32, y_ptr: *fp16, context_lens: *i32)
# grid (2, 2 * ceil(num_tokens / 1), 1), 2 warps, 2 stages
# triton/common.py.jinja


N = tl.constexpr(20)
K = tl.constexpr(64)
WIDTH = tl.constexpr(20)
BN = tl.constexpr(16)
BM = tl.constexpr(16)
GROUP = tl.constexpr(32)
GROUPS = tl.constexpr(2)
SPAN = tl.constexpr(16)
EXPERTS = tl.constexpr(3)
TOPK = tl.constexpr(2)


@triton.jit
def load(at, mask):
    """Elements under a mask that may be None; 0 elsewhere."""
    if mask is None:
        value = tl.load(at)
    else:
        value = tl.load(at, mask=mask, other=0)
    return value


@triton.jit
def scale_of(word):
    """The scale of a word: its upper 24 bits."""
    return (word & 0xFFFFFF00).to(tl.float32, bitcast=True)


@triton.jit
def zero_of(word):
    """The zero point of a word, its low byte, by way of 2^23, whose last mantissa bit is worth 1."""
    return ((word & 255) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def operand(bits):
    """bits times 2^-24 exactly; as float32 in the interpreter, which does not compute in 16 bits."""
    value = (bits | 0).to(tl.uint16).to(tl.float16, bitcast=True)
    if INTERPRETED:
        value = value.to(tl.float32)
    return value


@triton.jit
def fields(codes):
    """The four 4-bit fields of 16-bit elements, from the low bits up, as operands."""
    bits = codes.to(tl.int32)
    return operand(bits & 15), operand((bits >> 4) & 15), operand((bits >> 8) & 15), operand((bits >> 12) & 15)


@triton.jit
def whole(value):
    """A number of at most 8 bits as an operand, exactly; bf16 is the upper half of a float32."""
    value = value.to(tl.float32)
    if not INTERPRETED:
        value = value.to(tl.float16)
    return value


S = tl.constexpr(2)
SLICE = tl.constexpr(32)
SLICES = tl.constexpr(2)


@triton.jit
def linear_decode(x_ptr, w_ptr, b_ptr, index_ptr, y_ptr, context_lens):
    """BN columns of up to BM rows; warp s takes every S-th slice of K."""
    first = tl.program_id(0) * BN
    tile = tl.arange(0, BN)
    rows = tl.arange(0, BM)
    warp = tl.arange(0, S)
    lane = tl.arange(0, SLICE // 2)
    cols = first + tile
    slot = tl.program_id(1)
    expert = tl.load(index_ptr + slot)
    routed = (expert >= 0) & (expert < EXPERTS) & (tl.load(context_lens + slot // TOPK) > 0)
    slices = tl.where(routed, SLICES, 0)
    expert = tl.where(routed, expert, 0).to(tl.int64)
    in_rows = rows < routed.to(tl.int32)
    x_at = x_ptr + (slot // TOPK).to(tl.int64) * 64 + rows[None, None, :] * 0
    row0 = 0 + 1 * first
    sum0 = tl.zeros([S, BN, BM], tl.float32)

    matrix = w_ptr + expert * 1472
    codes = matrix.to(tl.pointer_type(tl.uint16))
    words = (matrix + 1280).to(tl.pointer_type(tl.uint32))
    ones = tl.full([S, BN, SPAN], 1.0, tl.float32).to(tl.float16)
    for step in tl.range(0, slices, S, num_stages=2):  # names its stages: all loads run ahead
        at = step + warp
        k = at[:, None, None] * GROUP + lane[None, :, None]
        in_x = in_rows[None, None, :]
        x0 = load(x_at + (k + 0 * SPAN), in_x)
        x1 = load(x_at + (k + 1 * SPAN), in_x)
        w0 = load(
            codes + row0 * SPAN + (at[:, None, None] * (N * SPAN) + tile[None, :, None] * 1 * SPAN + lane[None, None, :]),
            (cols < WIDTH)[None, :, None],
        )
        word0 = load(
            words + row0 + (at[:, None] * N + tile[None, :] * 1),
            (cols < WIDTH)[None, :],
        )
        total = tl.zeros([S, BN, BM], tl.float32)
        total = dot(ones, x0, total)
        total = dot(ones, x1, total)
        a, b, c, d = fields(w0)
        part = dot(a, x0, tl.zeros([S, BN, BM], tl.float32))
        part = dot(c, x1, part)
        part += dot(d, x1, dot(b, x0, tl.zeros([S, BN, BM], tl.float32))) * 16.0
        zero = zero_of(word0) + 0.0
        sum0 += (part * 16777216.0 - total * zero[:, :, None]) * scale_of(word0)[:, :, None]
    acc0 = tl.sum(sum0, axis=0)
    c = cols[:, None]
    r = rows[None, :] + slot
    keep = (rows < 1)[None, :] & (c < WIDTH)
    b_at = b_ptr + expert * N
    acc0 += tl.load(b_at + 0 + c * 1, mask=routed & (c < WIDTH), other=0.0)
    y_at = y_ptr + ((r // TOPK).to(tl.int64) * 40 + r % TOPK * WIDTH) + c
    tl.store(y_at, (acc0).to(y_ptr.dtype.element_ty), mask=keep)


