# linear_unpack(x_ptr: *u8, matrix_ptr: *u8)
# grid (1, 2, 1), 4 warps, 1 stages
# triton/common.py.jinja


N = tl.constexpr(32)
K = tl.constexpr(128)
GROUP = tl.constexpr(64)
SPAN = tl.constexpr(16)
ROWS = tl.constexpr(64)


@triton.jit
def byte(level):
    """A whole number from -15 to 15 as the bits of e4m3, over 512: a sign, and subnormals or what follows them."""
    return tl.where(level < 0, 128 - level, level).to(tl.uint8)


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
            prmt.b32 sign, $0, 0, 0xBA98;
            lop3.b32 $0, $0, sign, 0x80808080, 0x4B;
            lop3.b32 one, sign, 0x01010101, 0, 0x0C;
            add.u32 $0, $0, one;
            sub.u32 $1, $1, $6;
            prmt.b32 sign, $1, 0, 0xBA98;
            lop3.b32 $1, $1, sign, 0x80808080, 0x4B;
            lop3.b32 one, sign, 0x01010101, 0, 0x0C;
            add.u32 $1, $1, one;
            sub.u32 $2, $2, $6;
            prmt.b32 sign, $2, 0, 0xBA98;
            lop3.b32 $2, $2, sign, 0x80808080, 0x4B;
            lop3.b32 one, sign, 0x01010101, 0, 0x0C;
            add.u32 $2, $2, one;
            sub.u32 $3, $3, $6;
            prmt.b32 sign, $3, 0, 0xBA98;
            lop3.b32 $3, $3, sign, 0x80808080, 0x4B;
            lop3.b32 one, sign, 0x01010101, 0, 0x0C;
            add.u32 $3, $3, one;
            }""",
            "=&r,=&r,=&r,=&r,r,r,r",
            [codes, (word & 255).to(tl.uint8)[:, None]],
            dtype=(tl.uint8, tl.uint8, tl.uint8, tl.uint8),
            is_pure=True,
            pack=4,
        )
    return a, b, c, d


@triton.jit
def linear_unpack(x_ptr, matrix_ptr):
    """ROWS rows of a group."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(1)
    inside = row < N
    j = tl.arange(0, SPAN)[None, :]
    codes = x_ptr.to(tl.pointer_type(tl.uint16)) + group * (N * SPAN)
    words = (x_ptr + 2048).to(tl.pointer_type(tl.uint32)) + group * N
    code = tl.load(codes + (row[:, None] * SPAN + j), mask=inside[:, None], other=0)
    word = tl.load(words + row, mask=inside, other=0)
    a, b, c, d = bytes_of(code, word)
    at = matrix_ptr + row.to(tl.int64)[:, None] * K + (group * GROUP + j)
    tl.store(at + 0 * SPAN, a, mask=inside[:, None])
    tl.store(at + 1 * SPAN, b, mask=inside[:, None])
    tl.store(at + 2 * SPAN, c, mask=inside[:, None])
    tl.store(at + 3 * SPAN, d, mask=inside[:, None])
    scale = (word & 0xFFFFFF00).to(tl.float32, bitcast=True) * 512.0
    tl.store((matrix_ptr + 4096).to(tl.pointer_type(tl.float32)) + (group * N + row), scale, mask=inside)
