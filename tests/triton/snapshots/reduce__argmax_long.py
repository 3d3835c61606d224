# reduce(x_ptr?: *fp32, y_ptr: *i32, num_rows?: i32)
# grid (1 * ceil(num_tokens / 1), 2, 1), 4 warps, 2 stages
# triton/common.py.jinja

LINE_BLOCK = tl.constexpr(1)
ROW_BLOCK = tl.constexpr(1)
WIDTH = tl.constexpr(1024)
N = tl.constexpr(1100)


@triton.jit
def program_lines(num_rows):
    """(row, line, inside) of each line of this program: [ROW_BLOCK * LINE_BLOCK]; rows are 64-bit."""
    index = tl.arange(0, ROW_BLOCK * LINE_BLOCK)
    row = tl.program_id(0) * ROW_BLOCK + index // LINE_BLOCK
    line = tl.program_id(1) * LINE_BLOCK + index % LINE_BLOCK
    return row.to(tl.int64), line, (row < num_rows) & (line < 2)

# triton/order.py.jinja



@triton.jit
def product(a, b):
    """a b"""
    return a * b


@triton.jit
def reduce(x_ptr, y_ptr, num_rows):
    """argmax of ROW_BLOCK * LINE_BLOCK lines; WIDTH elements of each at a time, in as many accumulators."""
    row, line, inside = program_lines(num_rows)
    start = x_ptr + row * 2200 + line * 1100
    k = tl.arange(0, WIDTH)[None, :]
    total = tl.full([ROW_BLOCK * LINE_BLOCK, WIDTH], LOWEST, tl.int32)
    where = tl.zeros([ROW_BLOCK * LINE_BLOCK, WIDTH], tl.int32)
    for first in range(0, N, WIDTH):
        at = first + k
        mask = inside[:, None] & (at < N)
        x = tl.load(start[:, None] + at, mask=mask, other=0).to(tl.float32)
        key = key_of(x)
        key = tl.where(mask, key, LOWEST)
        where = tl.where(key > total, at, where)
        total = tl.maximum(total, key)
    top = tl.max(total, axis=1)
    y = tl.min(tl.where(total == top[:, None], where, N), axis=1)
    tl.store(y_ptr + row * 16 + line, y.to(y_ptr.dtype.element_ty), mask=inside)
