# reduce(x_ptr: *bf16, y_ptr?: *fp32, num_rows?: i32)
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

# triton/order.py.jinja



@triton.jit
def product(a, b):
    """a b"""
    return a * b


@triton.jit
def reduce(x_ptr, y_ptr, num_rows):
    """sum of ROW_BLOCK * LINE_BLOCK lines; WIDTH elements of each at a time, in as many accumulators."""
    row, line, inside = program_lines(num_rows)
    start = x_ptr + row * 16 + line * 7
    k = tl.arange(0, WIDTH)[None, :]
    total = tl.full([ROW_BLOCK * LINE_BLOCK, WIDTH], 0.0, tl.float32)
    for first in range(0, N, WIDTH):
        at = first + k
        mask = inside[:, None] & (at < N)
        x = tl.load(start[:, None] + at, mask=mask, other=0).to(tl.float32)
        key = x
        key = tl.where(mask, key, 0.0)
        total += key
    y = tl.sum(total, axis=1)
    tl.store(y_ptr + row * 16 + line, y.to(y_ptr.dtype.element_ty), mask=inside)
