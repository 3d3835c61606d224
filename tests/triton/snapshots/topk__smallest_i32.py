# topk(x_ptr: *i32, values_ptr: *i32, indices_ptr: *i32, num_rows?: i32)
# grid (1 * ceil(num_tokens / 1), 1, 1), 1 warps, 2 stages
# triton/common.py.jinja

LINE_BLOCK = tl.constexpr(1)
ROW_BLOCK = tl.constexpr(1)
WIDTH = tl.constexpr(64)
N = tl.constexpr(40)


@triton.jit
def program_lines(num_rows):
    """(row, line, inside) of each line of this program: [ROW_BLOCK * LINE_BLOCK]; rows are 64-bit."""
    index = tl.arange(0, ROW_BLOCK * LINE_BLOCK)
    row = tl.program_id(0) * ROW_BLOCK + index // LINE_BLOCK
    line = tl.program_id(1) * LINE_BLOCK + index % LINE_BLOCK
    return row.to(tl.int64), line, (row < num_rows) & (line < 1)

# triton/order.py.jinja



@triton.jit
def topk(x_ptr, values_ptr, indices_ptr, num_rows):
    """1 rounds, each of which takes the smallest that is left of every line; NaN counts as the largest."""
    row, line, inside = program_lines(num_rows)
    start = (x_ptr + row * 40 + line * N)[:, None]
    at = tl.arange(0, WIDTH)[None, :]
    mask = inside[:, None] & (at < N)
    x = tl.load(start + at, mask=mask, other=0)
    key = x
    key = ~key
    key = tl.where(mask, tl.maximum(key, LOWEST + 1), LOWEST)
    column = tl.arange(0, 1)[None, :]
    taken = tl.zeros([ROW_BLOCK * LINE_BLOCK, 1], tl.int32)
    for j in range(1):
        top = tl.max(key, axis=1)[:, None]
        best = tl.minimum(tl.min(tl.where(key == top, at, WIDTH - 1), axis=1), N - 1)[:, None]
        taken = tl.where(column == j, best, taken)
        key = tl.where(at == best, LOWEST, key)
    kept = inside[:, None] & (column < 1)
    values = tl.load(start + taken, mask=kept, other=0)
    spot = line[:, None] * 1 + column
    tl.store(values_ptr + row[:, None] * 1 + spot, values.to(values_ptr.dtype.element_ty), mask=kept)
    tl.store(indices_ptr + row[:, None] * 1 + spot, taken, mask=kept)
