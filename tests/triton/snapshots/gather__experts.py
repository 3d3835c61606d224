# gather(x_ptr?: *fp32, index_ptr: *i32, expert_ptr: *i32, y_ptr?: *fp32, num_rows?: i32)
# grid (1 * ceil(num_tokens / 32), 1, 1), 4 warps, 2 stages
# triton/common.py.jinja

LINE_BLOCK = tl.constexpr(2)
ROW_BLOCK = tl.constexpr(32)
WIDTH = tl.constexpr(16)
N = tl.constexpr(7)


@triton.jit
def program_lines(num_rows):
    """(row, line, inside) of each line of this program: [ROW_BLOCK * LINE_BLOCK]; rows are 64-bit."""
    index = tl.arange(0, ROW_BLOCK * LINE_BLOCK)
    row = tl.program_id(0) * ROW_BLOCK + index // LINE_BLOCK
    line = tl.program_id(1) * LINE_BLOCK + index % LINE_BLOCK
    return row.to(tl.int64), line, (row < num_rows) & (line < 2)



@triton.jit
def gather(x_ptr, index_ptr, expert_ptr, y_ptr, num_rows):
    """WIDTH of the 9 indices of each line; they are clamped to [0, N)."""
    row, line, inside = program_lines(num_rows)
    j = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)[None, :]
    mask = inside[:, None] & (j < 9)
    spot = line[:, None] * 9 + j
    expert = tl.load(expert_ptr + row * 2 + line, mask=inside, other=0)
    expert = tl.minimum(tl.maximum(expert, 0), 3).to(tl.int64)
    at = tl.load(index_ptr + expert[:, None] * 9 + j, mask=mask, other=0)
    at = tl.minimum(tl.maximum(at, 0), N - 1)
    y = tl.load(x_ptr + (row * 16)[:, None] + at, mask=mask, other=0).to(tl.float32)
    tl.store(y_ptr + row[:, None] * 18 + spot, y.to(y_ptr.dtype.element_ty), mask=mask)
