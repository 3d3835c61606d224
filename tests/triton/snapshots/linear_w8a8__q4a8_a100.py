# linear_w8a8(codes_ptr: *i8, scales_ptr: *fp32, w_ptr: *u8, y_ptr: *bf16, num_rows?: i32)
# grid (2 * ceil(num_tokens / 16), 1, 1), 4 warps, 3 stages
# triton/common.py.jinja


N = tl.constexpr(64)
K = tl.constexpr(128)
WIDTH = tl.constexpr(64)
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
def byte(level):
    """A whole number from -15 to 15 as int8."""
    return level.to(tl.int8)


@triton.jit
def bytes_of(codes, word):
    """The codes [BN, SPAN] of a group less the zero points of their rows, by the field of an element that they lie in."""
    if INTERPRETED:
        bits = codes.to(tl.int32)
        zero = (word & 255).to(tl.int32)[:, None]
        a, b, c, d = byte((bits & 15) - zero), byte(((bits >> 4) & 15) - zero), byte(((bits >> 8) & 15) - zero), byte(((bits >> 12) & 15) - zero)
    else:
        # four elements: with 128 added no difference borrows from the byte above
        a, b, c, d = tl.inline_asm_elementwise(
            """{
            .reg .b32 low, high, sign, one;
            prmt.b32 low, $4, $5, 0x6420;
            prmt.b32 high, $4, $5, 0x7531;
            lop3.b32 $0, low, 0x0F0F0F0F, 0x80808080, 0xEA;
            lop3.b32 $2, high, 0x0F0F0F0F, 0x80808080, 0xEA;
            shr.u32 low, low, 4;
            shr.u32 high, high, 4;
            lop3.b32 $1, low, 0x0F0F0F0F, 0x80808080, 0xEA;
            lop3.b32 $3, high, 0x0F0F0F0F, 0x80808080, 0xEA;
            sub.u32 $0, $0, $6;
            xor.b32 $0, $0, 0x80808080;
            sub.u32 $1, $1, $6;
            xor.b32 $1, $1, 0x80808080;
            sub.u32 $2, $2, $6;
            xor.b32 $2, $2, 0x80808080;
            sub.u32 $3, $3, $6;
            xor.b32 $3, $3, 0x80808080;
            }""",
            "=&r,=&r,=&r,=&r,r,r,r",
            [codes, (word & 255).to(tl.uint8)[:, None]],
            dtype=(tl.uint8, tl.uint8, tl.uint8, tl.uint8),
            is_pure=True,
            pack=4,
        )
    return a, b, c, d


@triton.jit
def group_sums(codes, x, word):
    """The sums of a group [BN, BM] in float32, scales of columns and all."""
    a, b, c, d = bytes_of(codes, word)
    fields = tl.permute(tl.join(tl.join(a, c), tl.join(b, d)), (0, 2, 3, 1))
    w = tl.reshape(fields, (BN, GROUP)).to(tl.int8, bitcast=True)
    # from the bits of 1.5 x 2^23 on, whose last mantissa bit is worth 1: sums below 2^22 are floats as they stand
    total = tl.dot(w, x, tl.full([BN, BM], 0x4B400000, tl.int32), out_dtype=tl.int32).to(tl.float32, bitcast=True)
    return (total - 12582912.0) * scale_of(word)[:, None]


BK = tl.constexpr(64)
STEPS = tl.constexpr(2)
TILES_N = tl.constexpr(2)
BAND = tl.constexpr(8)


@triton.jit
def linear_w8a8(codes_ptr, scales_ptr, w_ptr, y_ptr, num_rows):
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
    x_at = codes_ptr + (rows.to(tl.int64) * K)[None, :]
    x_scale = tl.load(scales_ptr + rows, mask=in_rows, other=0.0)

    matrix = w_ptr
    codes = matrix.to(tl.pointer_type(tl.uint16))
    words = (matrix + 4096).to(tl.pointer_type(tl.uint32))
    row0 = 0 + 1 * first
    sum0 = tl.zeros([BN, BM], tl.float32)
    for step in tl.range(0, STEPS, num_stages=3):
        x_k = step * BK + tl.arange(0, BK)[:, None]
        w_k = step * BK + tl.arange(0, BK)[None, :]
        x = load(x_at + x_k, in_rows[None, :])
        w0 = load(
            codes + row0 * SPAN + step * (N * SPAN) + (tile[:, None] * 1 * SPAN + tl.arange(0, SPAN)[None, :]),
            None,
        )
        word0 = load(words + row0 + step * N + tile * 1, None)
        sum0 += group_sums(w0, x, word0)
    acc0 = sum0 * x_scale[None, :]
    c = cols[:, None]
    r = r[None, :]
    keep = in_rows[None, :] & (c < WIDTH)
    y_at = y_ptr + r.to(tl.int64) * 64 + c
    tl.store(y_at, (acc0).to(y_ptr.dtype.element_ty), mask=keep)

