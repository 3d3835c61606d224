# scatter(x_ptr?: *fp32, index_ptr: *i32, src_ptr?: *fp32, y_ptr?: *fp32, num_rows?: i32)
# grid (1 * ceil(num_tokens / 64), 1, 1), 4 warps, 2 stages
# triton/common.py.jinja

LINE_BLOCK = tl.constexpr(2)
ROW_BLOCK = tl.constexpr(64)
WIDTH = tl.constexpr(8)
N = tl.constexpr(7)


@triton.jit
def program_lines(num_rows):
    """(row, line, inside) of each line of this program: [ROW_BLOCK * LINE_BLOCK]; rows are 64-bit."""
    index = tl.arange(0, ROW_BLOCK * LINE_BLOCK)
    row = tl.program_id(0) * ROW_BLOCK + index // LINE_BLOCK
    line = tl.program_id(1) * LINE_BLOCK + index % LINE_BLOCK
    return row.to(tl.int64), line, (row < num_rows) & (line < 2)



@triton.jit
def scatter(x_ptr, index_ptr, src_ptr, y_ptr, num_rows):
    """WIDTH elements of each line against the line's 20 indices."""
    row, line, inside = program_lines(num_rows)
    at = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)[None, :]
    mask = inside[:, None] & (at < N)
    y = tl.load(x_ptr + (row * 16 + line * N)[:, None] + at, mask=mask, other=0).to(tl.float32)
    index = (index_ptr + row * 40 + line * 20)[:, None]
    source = (src_ptr + row * 40 + line * 20)[:, None]
    for j in range(20):
        hit = tl.load(index + j, mask=inside[:, None], other=-1) == at
        value = tl.load(source + j, mask=inside[:, None], other=0).to(tl.float32)
        y = tl.where(hit, y + value, y)
    tl.store(y_ptr + (row * 16 + line * N)[:, None] + at, y.to(y_ptr.dtype.element_ty), mask=mask)
