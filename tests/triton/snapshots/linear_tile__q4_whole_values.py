# linear_tile(x_ptr: *fp16, w_ptr: *u8, y_ptr: *fp16, num_rows?: i32)
# grid (1 * ceil(num_tokens / 16), 1, 1), 4 warps, 3 stages
# triton/common.py.jinja


N = tl.constexpr(64)
K = tl.constexpr(128)
WIDTH = tl.constexpr(64)
BN = tl.constexpr(64)
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
    """1024 + bits exactly; as float32 in the interpreter, which does not compute in 16 bits."""
    value = (bits | 0x6400).to(tl.uint16).to(tl.float16, bitcast=True)
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
            lop3.b32 $0, $4, 0x000F000F, 0x64006400, 0xEA;
            lop3.b32 $1, s, 0x000F000F, 0x64006400, 0xEA;
            lop3.b32 $2, t, 0x000F000F, 0x64006400, 0xEA;
            lop3.b32 $3, u, 0x000F000F, 0x64006400, 0xEA;
            }""",
            "=r,=r,=r,=r,r",
            [codes],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return a, b, c, d



@triton.jit
def settled(bits):
    """The same, once matrix units have read all operands that they were given in registers.

    Triton 3.6 and 3.7 let the products of one step run into the next, and registers that they read be written there.
    """
    if not INTERPRETED:
        bits = tl.inline_asm_elementwise(
            "wgmma.wait_group.sync.aligned 0; mov.b32 $0, $1;", "=r,r", [bits], bits.dtype, is_pure=True, pack=1
        )
    return bits


@triton.jit
def times(level, word):
    """Levels [BN, SPAN] times the scales of their rows, both rounded to 16 bits."""
    scale = scale_of(word).to(tl.float16)[:, None]
    if INTERPRETED:
        value = (level * scale.to(tl.float32)).to(tl.float16).to(tl.float32)
    else:
        value = level * scale
    return value


@triton.jit
def values(codes, word):
    """The values [BN, GROUP] of a group's codes [BN, SPAN] and words [BN], in the order of K."""
    a, b, c, d = nibbles(codes)
    zero = operand((word & 255).to(tl.int32))[:, None]
    even = tl.join(times(a - zero, word), times(c - zero, word))
    odd = tl.join(times(b - zero, word), times(d - zero, word))
    whole = tl.permute(tl.join(even, odd), (0, 2, 3, 1))
    return tl.reshape(whole, (BN, GROUP))


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
    words = (matrix + 4096).to(tl.pointer_type(tl.uint32))
    row0 = 0 + 1 * first
    acc0 = tl.zeros([BN, BM], tl.float32)
    for step in tl.range(0, STEPS, num_stages=3):  # names its stages: all loads run ahead
        x_k = step * GROUP + tl.arange(0, GROUP)[:, None]
        x = tl.load(x_at + x_k, mask=in_rows[None, :], other=0.0)
        w0 = load(
            codes + row0 * SPAN + step * (N * SPAN) + (tile[:, None] * 1 * SPAN + tl.arange(0, SPAN)[None, :]),
            None,
        )
        word0 = load(words + row0 + step * N + tile * 1, None)
        acc0 = dot(values(w0, settled(word0)), x, acc0)
    c = cols[:, None]
    r = r[None, :]
    keep = in_rows[None, :] & (c < WIDTH)
    y_at = y_ptr + r.to(tl.int64) * 64 + c
    tl.store(y_at, (acc0).to(y_ptr.dtype.element_ty), mask=keep)

