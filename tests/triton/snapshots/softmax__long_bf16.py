# softmax(x_ptr: *bf16, y_ptr: *bf16, num_rows?: i32)
# grid (1 * ceil(num_tokens / 1), 1, 1), 16 warps, 2 stages
# triton/common.py.jinja

LINE_BLOCK = tl.constexpr(1)
ROW_BLOCK = tl.constexpr(1)
WIDTH = tl.constexpr(8192)
N = tl.constexpr(8200)


@triton.jit
def program_lines(num_rows):
    """(row, line, inside) of each line of this program: [ROW_BLOCK * LINE_BLOCK]; rows are 64-bit."""
    index = tl.arange(0, ROW_BLOCK * LINE_BLOCK)
    row = tl.program_id(0) * ROW_BLOCK + index // LINE_BLOCK
    line = tl.program_id(1) * LINE_BLOCK + index % LINE_BLOCK
    return row.to(tl.int64), line, (row < num_rows) & (line < 1)



@triton.jit
def softmax(x_ptr, y_ptr, num_rows):
    """Three passes over a line, WIDTH elements at a time."""
    row, line, inside = program_lines(num_rows)
    start = (x_ptr + row * 8200 + line * N)[:, None]
    target = (y_ptr + row * 8200 + line * N)[:, None]
    k = tl.arange(0, WIDTH)[None, :]
    highest = tl.full([ROW_BLOCK * LINE_BLOCK, WIDTH], float("-inf"), tl.float32)
    for first in range(0, N, WIDTH):
        mask = inside[:, None] & (first + k < N)
        highest = tl.maximum(highest, tl.load(start + first + k, mask=mask, other=float("-inf")).to(tl.float32))
    top = tl.max(highest, axis=1)[:, None]
    total = tl.zeros([ROW_BLOCK * LINE_BLOCK, WIDTH], tl.float32)
    for first in range(0, N, WIDTH):
        mask = inside[:, None] & (first + k < N)
        total += tl.exp(tl.load(start + first + k, mask=mask, other=float("-inf")).to(tl.float32) - top)
    scale = 1.0 / tl.sum(total, axis=1)[:, None]
    for first in range(0, N, WIDTH):
        mask = inside[:, None] & (first + k < N)
        y = tl.exp(tl.load(start + first + k, mask=mask, other=0).to(tl.float32) - top) * scale
        tl.store(target + first + k, y.to(y_ptr.dtype.element_ty), mask=mask)
