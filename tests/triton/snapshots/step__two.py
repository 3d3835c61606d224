# step(x_ptr_0?: *fp32, y_ptr_0?: *fp32, num_rows?: i32, x_ptr_1?: *fp32, y_ptr_1?: *fp32, step_ptr: *i32)
# grid (1, 1, 1), 4 warps, 2 stages
# triton/common.py.jinja


LEFT = tl.constexpr(2)  # the counter of programs that have nothing left to do


@triton.jit
def dot_0(a, b, acc):
    """acc + a b in float32; Triton's interpreter cannot multiply bf16."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision='ieee')


LINE_BLOCK_0 = tl.constexpr(2)


ROW_BLOCK_0 = tl.constexpr(16)


WIDTH_0 = tl.constexpr(32)


N_0 = tl.constexpr(17)


@triton.jit
def program_lines_0(num_rows, tile_x, tile_y, tile_z):
    """(row, line, inside) of each line of this program: [ROW_BLOCK * LINE_BLOCK]; rows are 64-bit."""
    index = tl.arange(0, ROW_BLOCK_0 * LINE_BLOCK_0)
    row = tile_x * ROW_BLOCK_0 + index // LINE_BLOCK_0
    line = tile_y * LINE_BLOCK_0 + index % LINE_BLOCK_0
    return (row.to(tl.int64), line, (row < num_rows) & (line < 2))


@triton.jit
def softmax_0(x_ptr, y_ptr, num_rows, tile_x, tile_y, tile_z):
    """A line per row of the block."""
    row, line, inside = program_lines_0(num_rows, tile_x=tile_x, tile_y=tile_y, tile_z=tile_z)
    start = (x_ptr + row * 34 + line * N_0)[:, None]
    target = (y_ptr + row * 34 + line * N_0)[:, None]
    k = tl.arange(0, WIDTH_0)[None, :]
    mask = inside[:, None] & (k < N_0)
    x = tl.load(start + k, mask=mask, other=float('-inf')).to(tl.float32)
    e = tl.exp(x - tl.max(x, axis=1)[:, None])
    y = e / tl.sum(e, axis=1)[:, None]
    tl.store(target + k, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def dot_1(a, b, acc):
    """acc + a b in float32; Triton's interpreter cannot multiply bf16."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision='ieee')


LINE_BLOCK_1 = tl.constexpr(2)


ROW_BLOCK_1 = tl.constexpr(32)


WIDTH_1 = tl.constexpr(16)


N_1 = tl.constexpr(9)


@triton.jit
def program_lines_1(num_rows, tile_x, tile_y, tile_z):
    """(row, line, inside) of each line of this program: [ROW_BLOCK * LINE_BLOCK]; rows are 64-bit."""
    index = tl.arange(0, ROW_BLOCK_1 * LINE_BLOCK_1)
    row = tile_x * ROW_BLOCK_1 + index // LINE_BLOCK_1
    line = tile_y * LINE_BLOCK_1 + index % LINE_BLOCK_1
    return (row.to(tl.int64), line, (row < num_rows) & (line < 2))


@triton.jit
def cumsum_1(x_ptr, y_ptr, num_rows, tile_x, tile_y, tile_z):
    """WIDTH elements of each line at a time; what lies before them is carried."""
    row, line, inside = program_lines_1(num_rows, tile_x=tile_x, tile_y=tile_y, tile_z=tile_z)
    k = tl.arange(0, WIDTH_1)[None, :]
    carried = tl.zeros([ROW_BLOCK_1 * LINE_BLOCK_1], tl.float32)
    for first in range(0, N_1, WIDTH_1):
        at = line[:, None] * N_1 + first + k
        mask = inside[:, None] & (first + k < N_1)
        x = tl.load(x_ptr + row[:, None] * 18 + at, mask=mask, other=0).to(tl.float32)
        y = tl.cumsum(x, axis=1) + carried[:, None]
        tl.store(y_ptr + row[:, None] * 18 + at, y.to(y_ptr.dtype.element_ty), mask=mask)
        carried = tl.sum(tl.where(k == WIDTH_1 - 1, y, 0), axis=1)


@triton.jit
def await_count(counter_ptr, count):
    """All that programs did before they counted is done, and is seen from here on."""
    while tl.atomic_add(counter_ptr, 0, sem="acquire") < count:
        pass
    tl.debug_barrier()


@triton.jit
def count_tiles(counter_ptr, first, tiles, programs):
    """Tell that this program's tiles are done: `first` and each so many-th behind it."""
    tl.debug_barrier()  # all that this program wrote comes before it counts
    if first < tiles:
        tl.atomic_add(counter_ptr, (tiles - first + programs - 1) // programs, sem="release")


@triton.jit
def step(x_ptr_0, y_ptr_0, num_rows, x_ptr_1, y_ptr_1, step_ptr):
    """2 tiles: softmax, cumsum."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)

    # softmax: 1 tiles
    first = (program + programs - 0 % programs) % programs
    for tile in tl.range(first, 1, programs, num_stages=1):
        softmax_0(x_ptr_0, y_ptr_0, num_rows, tile % 1, tile // 1 % 1, tile // 1)
    count_tiles(step_ptr + 0, first, 1, programs)

    # cumsum: 1 tiles
    first = (program + programs - 1 % programs) % programs
    await_count(step_ptr + 0, 1)
    for tile in tl.range(first, 1, programs, num_stages=1):
        cumsum_1(x_ptr_1, y_ptr_1, num_rows, tile % 1, tile // 1 % 1, tile // 1)
    count_tiles(step_ptr + 1, first, 1, programs)

    tl.debug_barrier()
    if tl.atomic_add(step_ptr + LEFT, 1) == programs - 1:
        for counter in range(0, LEFT + 1):
            tl.store(step_ptr + counter, 0)
