# bmm(a_ptr: *bf16, b_ptr: *bf16, c_ptr: *bf16, num_rows?: i32)
# grid (1 * ceil(num_tokens / 16), 1, 2), 4 warps, 3 stages
# triton/common.py.jinja



@triton.jit
def bmm(a_ptr, b_ptr, c_ptr, num_rows):
    """A tile of 16 lines (16 rows x 1) x 32 columns."""
    matrix, block = tl.program_id(2) // 1, tl.program_id(2) % 1
    line = tl.arange(0, 16)
    row = (tl.program_id(0) * 16 + line // 1).to(tl.int64)
    i = block * 1 + line % 1
    inside = (line < 16) & (row < num_rows) & (i < 1)
    col = tl.program_id(1) * 32 + tl.arange(0, 32)
    k = tl.arange(0, 32)
    left = a_ptr + (row * 80 + (matrix * 1 + i) * 40)[:, None]
    right = b_ptr + matrix * 680
    total = tl.zeros([16, 32], tl.float32)
    for first in range(0, 40, 32):
        at = first + k
        x = tl.load(left + at[None, :], mask=inside[:, None] & (at < 40)[None, :], other=0)
        w = tl.load(right + at[:, None] * 17 + col[None, :], mask=(col < 17)[None, :] & (at < 40)[:, None], other=0)
        total = dot(x, w, total)
    spot = row[:, None] * 34 + ((matrix * 1 + i) * 17)[:, None] + col[None, :]
    tl.store(c_ptr + spot, total.to(c_ptr.dtype.element_ty), mask=inside[:, None] & (col < 17)[None, :])
