# select_rows(ids_ptr: *i32, x_ptr?: *fp32, y_ptr?: *fp32, num_rows?: i32, num_tokens?: i32)
# grid (1 * ceil(num_logit_rows / 32), 1, 1), 4 warps, 2 stages
# triton/common.py.jinja



@triton.jit
def select_rows(ids_ptr, x_ptr, y_ptr, num_rows, num_tokens):
    """32 rows x 32 columns per program."""
    row = tl.program_id(0) * 32 + tl.arange(0, 32)
    at = tl.program_id(1) * 32 + tl.arange(0, 32)[None, :]
    ids = tl.load(ids_ptr + row, mask=row < num_rows, other=0)
    ids = tl.minimum(tl.maximum(ids, 0), num_tokens - 1).to(tl.int64)[:, None]
    mask = (row < num_rows)[:, None] & (at < 20)
    x = tl.load(x_ptr + ids * 24 + at, mask=mask, other=0)
    y = x
    tl.store(y_ptr + row[:, None].to(tl.int64) * 20 + at, y, mask=mask)
