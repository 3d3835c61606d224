# linear_tile(x_ptr: *bf16, w_ptr: *u8, y_ptr: *bf16, num_rows?: i32)
# grid (1 * ceil(num_tokens / 16), 1, 1), 4 warps, 3 stages
# triton/common.py.jinja




# triton/math.py.jinja


N = tl.constexpr(32)
K = tl.constexpr(128)
WIDTH = tl.constexpr(16)
BN = tl.constexpr(32)
BM = tl.constexpr(16)
GROUP = tl.constexpr(64)
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
    """128 + bits exactly; as float32 in the interpreter, which does not compute in 16 bits."""
    value = (bits | 0x4300).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    if INTERPRETED:
        value = value.to(tl.float32)
    return value


@triton.jit
def fields(codes):
    """The four 4-bit fields of 16-bit elements, from the low bits up, as operands."""
    bits = codes.to(tl.int32)
    return operand(bits & 15), operand((bits >> 4) & 15), operand((bits >> 8) & 15), operand((bits >> 12) & 15)


@triton.jit
def nibbles(codes):
    """`fields`, two elements of a register at a time: a shift and a lop3 make a register of two operands."""
    if INTERPRETED:
        a, b, c, d = fields(codes)
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            """{
            .reg .b32 s, t, u;
            shr.u32 s, $4, 4;
            shr.u32 t, $4, 8;
            shr.u32 u, $4, 12;
            lop3.b32 $0, $4, 0x000F000F, 0x43004300, 0xEA;
            lop3.b32 $1, s, 0x000F000F, 0x43004300, 0xEA;
            lop3.b32 $2, t, 0x000F000F, 0x43004300, 0xEA;
            lop3.b32 $3, u, 0x000F000F, 0x43004300, 0xEA;
            }""",
            "=r,=r,=r,=r,r",
            [codes],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    return a, b, c, d


BK = tl.constexpr(64)
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
    x_at = x_ptr + (rows.to(tl.int64) * 128)[None, :]

    matrix = w_ptr
    codes = matrix.to(tl.pointer_type(tl.uint16))
    words = (matrix + 2048).to(tl.pointer_type(tl.uint32))
    row0 = 0 + 1 * first
    acc0 = tl.zeros([BN, BM], tl.float32)
    row1 = 16 + 1 * first
    acc1 = tl.zeros([BN, BM], tl.float32)
    for step in tl.range(0, STEPS, num_stages=3):  # names its stages: all loads run ahead
        x_k = step * GROUP + tl.arange(0, SPAN)[:, None]
        x0 = tl.load(x_at + (x_k + 0 * SPAN), mask=in_rows[None, :], other=0.0)
        x1 = tl.load(x_at + (x_k + 1 * SPAN), mask=in_rows[None, :], other=0.0)
        x2 = tl.load(x_at + (x_k + 2 * SPAN), mask=in_rows[None, :], other=0.0)
        x3 = tl.load(x_at + (x_k + 3 * SPAN), mask=in_rows[None, :], other=0.0)
        w0 = load(
            codes + row0 * SPAN + step * (N * SPAN) + (tile[:, None] * 1 * SPAN + tl.arange(0, SPAN)[None, :]),
            (cols < WIDTH)[:, None],
        )
        word0 = load(words + row0 + step * N + tile * 1, cols < WIDTH)
        w1 = load(
            codes + row1 * SPAN + step * (N * SPAN) + (tile[:, None] * 1 * SPAN + tl.arange(0, SPAN)[None, :]),
            (cols < WIDTH)[:, None],
        )
        word1 = load(words + row1 + step * N + tile * 1, cols < WIDTH)
        part = tl.zeros([BN, BM], tl.float32)
        a, b, c, d = nibbles(w0)
        zero = operand((word0 & 255).to(tl.int32))[:, None]
        part = dot(a - zero, x0, part)
        part = dot(b - zero, x1, part)
        part = dot(c - zero, x2, part)
        part = dot(d - zero, x3, part)
        acc0 += part * (scale_of(word0))[:, None]
        part = tl.zeros([BN, BM], tl.float32)
        a, b, c, d = nibbles(w1)
        zero = operand((word1 & 255).to(tl.int32))[:, None]
        part = dot(a - zero, x0, part)
        part = dot(b - zero, x1, part)
        part = dot(c - zero, x2, part)
        part = dot(d - zero, x3, part)
        acc1 += part * (scale_of(word1))[:, None]
    c = cols[:, None]
    r = r[None, :]
    keep = in_rows[None, :] & (c < WIDTH)
    t0 = silu(acc0)
    t1 = t0 * acc1
    y_at = y_ptr + r.to(tl.int64) * 16 + c
    tl.store(y_at, (t1).to(y_ptr.dtype.element_ty), mask=keep)

