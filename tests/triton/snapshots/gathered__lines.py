# all_gather(gathered_ptr: *fp32, y_ptr?: *fp32, num_rows?: i32)
# grid (1, 1, 1), 2 warps, 2 stages
# triton/common.py.jinja


BLOCK = tl.constexpr(512)


@triton.jit
def all_gather(gathered_ptr, y_ptr, num_rows):
    """y [R, 2, 2, 33] = gathered [2, R, 2, 33]."""
    at = tl.arange(0, BLOCK)
    total = num_rows.to(tl.int64) * 66
    for first in range(tl.program_id(0).to(tl.int64) * BLOCK, total, 512):
        inside = first + at < total
        to = y_ptr + (first + at) + (first + at) // 33 * 33
        tl.store(to + 0, tl.load(gathered_ptr + 0 * total + first + at, mask=inside), mask=inside)
        tl.store(to + 33, tl.load(gathered_ptr + 1 * total + first + at, mask=inside), mask=inside)
