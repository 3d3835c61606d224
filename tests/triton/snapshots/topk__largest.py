# topk(x_ptr: *bf16, values_ptr: *bf16, indices_ptr: *i32, num_rows?: i32)
# grid (1 * ceil(num_tokens / 1), 1, 1), 1 warps, 2 stages
# triton/common.py.jinja

LINE_BLOCK = tl.constexpr(2)
ROW_BLOCK = tl.constexpr(1)
WIDTH = tl.constexpr(16)
N = tl.constexpr(9)


@triton.jit
def program_lines(num_rows):
    """(row, line, inside) of each line of this program: [ROW_BLOCK * LINE_BLOCK]; rows are 64-bit."""
    index = tl.arange(0, ROW_BLOCK * LINE_BLOCK)
    row = tl.program_id(0) * ROW_BLOCK + index // LINE_BLOCK
    line = tl.program_id(1) * LINE_BLOCK + index % LINE_BLOCK
    return row.to(tl.int64), line, (row < num_rows) & (line < 2)

# triton/order.py.jinja



@triton.jit
def topk(x_ptr, values_ptr, indices_ptr, num_rows):
    """3 rounds, each of which takes the largest that is left of every line; NaN counts as the largest."""
    row, line, inside = program_lines(num_rows)
    start = (x_ptr + row * 18 + line * N)[:, None]
    at = tl.arange(0, WIDTH)[None, :]
    mask = inside[:, None] & (at < N)
    x = tl.load(start + at, mask=mask, other=0).to(tl.float32)
    key = key_of(x)
    key = tl.where(mask, tl.maximum(key, LOWEST + 1), LOWEST)
    column = tl.arange(0, 4)[None, :]
    taken = tl.zeros([ROW_BLOCK * LINE_BLOCK, 4], tl.int32)
    for j in range(3):
        top = tl.max(key, axis=1)[:, None]
        best = tl.minimum(tl.min(tl.where(key == top, at, WIDTH - 1), axis=1), N - 1)[:, None]
        taken = tl.where(column == j, best, taken)
        key = tl.where(at == best, LOWEST, key)
    kept = inside[:, None] & (column < 3)
    values = tl.load(start + taken, mask=kept, other=0).to(tl.float32)
    spot = line[:, None] * 3 + column
    tl.store(values_ptr + row[:, None] * 6 + spot, values.to(values_ptr.dtype.element_ty), mask=kept)
    tl.store(indices_ptr + row[:, None] * 6 + spot, taken, mask=kept)
