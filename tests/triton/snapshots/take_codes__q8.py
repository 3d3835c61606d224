# embedding(ids_ptr: *i32, x_ptr: *u8, y_ptr?: *fp32, num_rows?: i32)
# grid (1 * ceil(num_tokens / 16), 1, 1), 4 warps, 2 stages
# triton/common.py.jinja



@triton.jit
def embedding(ids_ptr, x_ptr, y_ptr, num_rows):
    """16 rows x 64 columns per program."""
    row = tl.program_id(0) * 16 + tl.arange(0, 16)
    at = tl.program_id(1) * 64 + tl.arange(0, 64)[None, :]
    ids = tl.load(ids_ptr + row, mask=row < num_rows, other=0)
    ids = tl.minimum(tl.maximum(ids, 0), 49).to(tl.int64)[:, None]
    mask = (row < num_rows)[:, None] & (at < 48)
    spot = at // 16 * 50 + ids
    inside = at % 16
    codes = x_ptr.to(tl.pointer_type(tl.uint16))
    words = (x_ptr + 2432).to(tl.pointer_type(tl.uint32))
    code = tl.load(codes + spot * 8 + inside % 8, mask=mask, other=0).to(tl.int32)
    code = (code >> (inside // 8 * 8)) & 255
    word = tl.load(words + spot, mask=mask, other=0)
    scale = (word & 0xFFFFFF00).to(tl.float32, bitcast=True)
    y = (code - (word & 255).to(tl.int32)).to(tl.float32) * scale
    tl.store(y_ptr + row[:, None].to(tl.int64) * 48 + at, y.to(y_ptr.dtype.element_ty), mask=mask)
