# linear_unpack(x_ptr: *u8, matrix_ptr: *bf16)
# grid (2, 1, 1), 4 warps, 1 stages

# triton/common.py.jinja


ROWS = tl.constexpr(16)
COLUMNS = tl.constexpr(256)


@triton.jit
def linear_unpack(x_ptr, matrix_ptr):
    """ROWS x COLUMNS values."""
    ids = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    mask = (ids < 32) & (at < 128)
    spot = at // 64 * 32 + ids
    inside = at % 64
    codes = x_ptr.to(tl.pointer_type(tl.uint16))
    words = (x_ptr + 2048).to(tl.pointer_type(tl.uint32))
    code = tl.load(codes + spot * 16 + inside % 16, mask=mask, other=0).to(tl.int32)
    code = (code >> (inside // 16 * 4)) & 15
    word = tl.load(words + spot, mask=mask, other=0)
    scale = (word & 0xFFFFFF00).to(tl.float32, bitcast=True)
    y = (code - (word & 255).to(tl.int32)).to(tl.float32) * scale
    tl.store(matrix_ptr + ids * 128 + at, y.to(matrix_ptr.dtype.element_ty), mask=mask)
