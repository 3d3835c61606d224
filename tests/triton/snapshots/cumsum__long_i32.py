# cumsum(x_ptr: *i32, y_ptr: *i32, num_rows?: i32)
# grid (1 * ceil(num_tokens / 1), 1, 1), 16 warps, 2 stages
# triton/common.py.jinja

LINE_BLOCK = tl.constexpr(1)
ROW_BLOCK = tl.constexpr(1)
WIDTH = tl.constexpr(4096)
N = tl.constexpr(4100)


@triton.jit
def program_lines(num_rows):
    """(row, line, inside) of each line of this program: [ROW_BLOCK * LINE_BLOCK]; rows are 64-bit."""
    index = tl.arange(0, ROW_BLOCK * LINE_BLOCK)
    row = tl.program_id(0) * ROW_BLOCK + index // LINE_BLOCK
    line = tl.program_id(1) * LINE_BLOCK + index % LINE_BLOCK
    return row.to(tl.int64), line, (row < num_rows) & (line < 1)



@triton.jit
def cumsum(x_ptr, y_ptr, num_rows):
    """WIDTH elements of each line at a time; what lies before them is carried."""
    row, line, inside = program_lines(num_rows)
    k = tl.arange(0, WIDTH)[None, :]
    carried = tl.zeros([ROW_BLOCK * LINE_BLOCK], tl.int32)
    for first in range(0, N, WIDTH):
        at = line[:, None] * N + first + k
        mask = inside[:, None] & (first + k < N)
        x = tl.load(x_ptr + row[:, None] * 4100 + at, mask=mask, other=0)
        y = tl.cumsum(x, axis=1) + carried[:, None]
        tl.store(y_ptr + row[:, None] * 4100 + at, y.to(y_ptr.dtype.element_ty), mask=mask)
        carried = tl.sum(tl.where(k == WIDTH - 1, y, 0), axis=1)  # `carried += sum` crashes a pass of Triton 3.7
