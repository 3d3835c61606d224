# linear_decode(x_ptr: *bf16, w_ptr: *u8, y_ptr: *bf16, num_rows?: i32)
# grid (1, 1, 1), 2 warps, 2 stages
# triton/common.py.jinja




# triton/math.py.jinja


N = tl.constexpr(32)
K = tl.constexpr(128)
WIDTH = tl.constexpr(16)
BN = tl.constexpr(16)
BM = tl.constexpr(8)
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


S = tl.constexpr(2)
SLICE = tl.constexpr(64)
SLICES = tl.constexpr(2)


@triton.jit
def linear_decode(x_ptr, w_ptr, y_ptr, num_rows):
    """BN columns of up to BM rows; warp s takes every S-th slice of K."""
    first = tl.program_id(0) * BN
    tile = tl.arange(0, BN)
    rows = tl.arange(0, BM)
    warp = tl.arange(0, S)
    lane = tl.arange(0, SLICE // 4)
    cols = first + tile
    in_rows = rows < num_rows
    x_at = x_ptr + rows[None, None, :] * 128
    row0 = 0 + 1 * first
    sum0 = tl.zeros([S, BN, BM], tl.float32)
    row1 = 16 + 1 * first
    sum1 = tl.zeros([S, BN, BM], tl.float32)

    matrix = w_ptr
    codes = matrix.to(tl.pointer_type(tl.uint16))
    words = (matrix + 2048).to(tl.pointer_type(tl.uint32))
    ones = tl.full([S, BN, SPAN], 1.0, tl.float32).to(tl.bfloat16)
    for step in tl.range(0, SLICES, S, num_stages=2):  # names its stages: all loads run ahead
        at = step + warp
        k = at[:, None, None] * GROUP + lane[None, :, None]
        in_x = in_rows[None, None, :]
        x0 = load(x_at + (k + 0 * SPAN), in_x)
        x1 = load(x_at + (k + 1 * SPAN), in_x)
        x2 = load(x_at + (k + 2 * SPAN), in_x)
        x3 = load(x_at + (k + 3 * SPAN), in_x)
        w0 = load(
            codes + row0 * SPAN + (at[:, None, None] * (N * SPAN) + tile[None, :, None] * 1 * SPAN + lane[None, None, :]),
            None,
        )
        word0 = load(
            words + row0 + (at[:, None] * N + tile[None, :] * 1),
            None,
        )
        w1 = load(
            codes + row1 * SPAN + (at[:, None, None] * (N * SPAN) + tile[None, :, None] * 1 * SPAN + lane[None, None, :]),
            None,
        )
        word1 = load(
            words + row1 + (at[:, None] * N + tile[None, :] * 1),
            None,
        )
        total = tl.zeros([S, BN, BM], tl.float32)
        total = dot(ones, x0, total)
        total = dot(ones, x1, total)
        total = dot(ones, x2, total)
        total = dot(ones, x3, total)
        a, b, c, d = nibbles(w0)
        part = dot(a, x0, tl.zeros([S, BN, BM], tl.float32))
        part = dot(b, x1, part)
        part = dot(c, x2, part)
        part = dot(d, x3, part)
        zero = zero_of(word0) + 128.0
        sum0 += (part - total * zero[:, :, None]) * scale_of(word0)[:, :, None]
        a, b, c, d = nibbles(w1)
        part = dot(a, x0, tl.zeros([S, BN, BM], tl.float32))
        part = dot(b, x1, part)
        part = dot(c, x2, part)
        part = dot(d, x3, part)
        zero = zero_of(word1) + 128.0
        sum1 += (part - total * zero[:, :, None]) * scale_of(word1)[:, :, None]
    acc0 = tl.sum(sum0, axis=0)
    acc1 = tl.sum(sum1, axis=0)
    c = cols[:, None]
    r = rows[None, :]
    keep = in_rows[None, :] & (c < WIDTH)
    t0 = silu(acc0)
    t1 = t0 * acc1
    y_at = y_ptr + r.to(tl.int64) * 16 + c
    tl.store(y_at, (t1).to(y_ptr.dtype.element_ty), mask=keep)


