# hadamard(x_ptr: *bf16, y_ptr: *bf16, num_rows?: i32)
# grid (1 * ceil(num_tokens / 4), 1, 1), 4 warps, 2 stages
# triton/common.py.jinja

LINE_BLOCK = tl.constexpr(4)
ROW_BLOCK = tl.constexpr(4)
WIDTH = tl.constexpr(64)
N = tl.constexpr(64)


@triton.jit
def program_lines(num_rows):
    """(row, line, inside) of each line of this program: [ROW_BLOCK * LINE_BLOCK]; rows are 64-bit."""
    index = tl.arange(0, ROW_BLOCK * LINE_BLOCK)
    row = tl.program_id(0) * ROW_BLOCK + index // LINE_BLOCK
    line = tl.program_id(1) * LINE_BLOCK + index % LINE_BLOCK
    return row.to(tl.int64), line, (row < num_rows) & (line < 3)



@triton.jit
def hadamard(x_ptr, y_ptr, num_rows):
    """Each turn lets the elements meet whose numbers differ in the lowest bit, and makes it the highest: after as many
    turns as there are bits, every bit has had its turn and is where it was."""
    row, line, inside = program_lines(num_rows)
    k = tl.arange(0, N)[None, :]
    mask = inside[:, None] & (k < N)
    x = tl.load((x_ptr + row * 192 + line * N)[:, None] + k, mask=mask, other=0).to(tl.float32)
    for _ in tl.static_range(6):
        a, b = tl.split(tl.reshape(x, (ROW_BLOCK * LINE_BLOCK, N // 2, 2)))
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (ROW_BLOCK * LINE_BLOCK, N))
    y = x * 0.125
    tl.store((y_ptr + row * 192 + line * N)[:, None] + k, y.to(y_ptr.dtype.element_ty), mask=mask)
