# bmm(a_ptr?: *fp32, b_ptr?: *fp32, c_ptr?: *fp32, num_rows?: i32)
# grid (1 * ceil(num_tokens / 1), 1, 6), 4 warps, 3 stages
# triton/common.py.jinja



@triton.jit
def bmm(a_ptr, b_ptr, c_ptr, num_rows):
    """32 columns of one line; 32 x 16 elements of b at a time, summed at the end."""
    row, line = tl.program_id(0).to(tl.int64), tl.program_id(2)
    matrix = line // 3
    col = tl.program_id(1) * 32 + tl.arange(0, 32)[:, None]
    k = tl.arange(0, 16)[None, :]
    left = a_ptr + row * 54 + line * 9
    right = b_ptr + row * 306 + matrix * 153
    total = tl.zeros([32, 16], tl.float32)
    for first in range(0, 9, 16):
        at = first + k
        x = tl.load(left + at, mask=at < 9, other=0).to(tl.float32)
        w = tl.load(right + col * 9 + at, mask=(col < 17) & (at < 9), other=0).to(tl.float32)
        total += x * w
    c = tl.sum(total, axis=1)
    col = tl.program_id(1) * 32 + tl.arange(0, 32)
    spot = row * 102 + line * 17 + col
    tl.store(c_ptr + spot, c.to(c_ptr.dtype.element_ty), mask=col < 17)
