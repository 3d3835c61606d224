# linear_tile(x_ptr: *fp16, w_ptr: *u8, y_ptr: *fp16, num_rows?: i32)
# grid (1 * ceil(num_tokens / 16), 1, 1), 4 warps, 2 stages
# triton/common.py.jinja


N = tl.constexpr(32)
K = tl.constexpr(64)
WIDTH = tl.constexpr(32)
BN = tl.constexpr(32)
BM = tl.constexpr(16)
GROUP = tl.constexpr(32)
GROUPS = tl.constexpr(2)
SPAN = tl.constexpr(16)


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


BK = tl.constexpr(32)
STEPS = tl.constexpr(2)
TILES_N = tl.constexpr(1)
BAND = tl.constexpr(8)


@triton.jit
def linear_tile(x_ptr, w_ptr, y_ptr, num_rows):
    """One tile; steps of BK over K."""
    pid = tl.program_id(0)
    top = pid // (BAND * TILES_N) * BAND
    height = tl.minimum(tl.cdiv(num_rows, BM) - top, BAND)
    tile_m = top + pid % (BAND * TILES_N) % height
    first = pid % (BAND * TILES_N) // height * BN
    tile = tl.arange(0, BN)
    cols = first + tile
    rows = tile_m * BM + tl.arange(0, BM)
    in_rows = rows < num_rows
    r = rows
    x_at = x_ptr + (rows.to(tl.int64) * 64)[None, :]

    matrix = w_ptr
    codes = matrix.to(tl.pointer_type(tl.uint16))
    words = (matrix + 2048).to(tl.pointer_type(tl.uint32))
    row0 = 0 + 1 * first
    acc0 = tl.zeros([BN, BM], tl.float32)
    for step in tl.range(0, STEPS, num_stages=2):  # names its stages: all loads run ahead
        x_k = step * GROUP + tl.arange(0, SPAN)[:, None]
        x0 = tl.load(x_at + (x_k + 0 * SPAN), mask=in_rows[None, :], other=0.0)
        x1 = tl.load(x_at + (x_k + 1 * SPAN), mask=in_rows[None, :], other=0.0)
        w0 = load(
            codes + row0 * SPAN + step * (N * SPAN) + (tile[:, None] * 1 * SPAN + tl.arange(0, SPAN)[None, :]),
            None,
        )
        word0 = load(words + row0 + step * N + tile * 1, None)
        part = tl.zeros([BN, BM], tl.float32)
        zero = (word0 & 255).to(tl.int32)[:, None]
        part = dot(whole(((w0.to(tl.int32) >> 0) & 255) - zero), x0, part)
        part = dot(whole(((w0.to(tl.int32) >> 8) & 255) - zero), x1, part)
        acc0 += part * scale_of(word0)[:, None]
    c = cols[:, None]
    r = r[None, :]
    keep = in_rows[None, :] & (c < WIDTH)
    y_at = y_ptr + r.to(tl.int64) * 32 + c
    tl.store(y_at, (acc0).to(y_ptr.dtype.element_ty), mask=keep)

