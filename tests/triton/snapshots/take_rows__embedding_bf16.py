# embedding(ids_ptr: *i32, x_ptr: *bf16, y_ptr?: *fp32, num_rows?: i32)
# grid (1 * ceil(num_tokens / 32), 1, 1), 4 warps, 2 stages
# triton/common.py.jinja



@triton.jit
def embedding(ids_ptr, x_ptr, y_ptr, num_rows):
    """32 rows x 32 columns per program."""
    row = tl.program_id(0) * 32 + tl.arange(0, 32)
    at = tl.program_id(1) * 32 + tl.arange(0, 32)[None, :]
    ids = tl.load(ids_ptr + row, mask=row < num_rows, other=0)
    ids = tl.minimum(tl.maximum(ids, 0), 49).to(tl.int64)[:, None]
    mask = (row < num_rows)[:, None] & (at < 20)
    x = tl.load(x_ptr + ids * 20 + at, mask=mask, other=0)
    y = x.to(tl.float32).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row[:, None].to(tl.int64) * 20 + at, y, mask=mask)
