# linear_reduce(b_ptr?: *fp32, e0_ptr?: *fp32, y_ptr?: *fp32, sums_ptr: *fp32, num_rows?: i32)
# grid (1 * ceil(num_tokens / 1), 1, 1), 4 warps, 1 stages
# triton/common.py.jinja




# triton/math.py.jinja


N = tl.constexpr(32)
K = tl.constexpr(128)
WIDTH = tl.constexpr(32)
BN = tl.constexpr(32)
BM = tl.constexpr(128)


@triton.jit
def load(at, mask):
    """Elements under a mask that may be None; 0 elsewhere."""
    if mask is None:
        value = tl.load(at)
    else:
        value = tl.load(at, mask=mask, other=0)
    return value


BLOCK = tl.constexpr(512)


@triton.jit
def linear_reduce(b_ptr, e0_ptr, y_ptr, sums_ptr, num_rows):
    """BLOCK columns of one row."""
    r = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = c < WIDTH
    acc0 = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(2):
        sums = ((split * 1 + 0) * num_rows + r).to(tl.int64) * WIDTH + c
        acc0 += tl.load(sums_ptr + sums, mask=keep, other=0.0)
    b_at = b_ptr
    acc0 += tl.load(b_at + 0 + c * 1, mask=c < WIDTH, other=0.0)
    e0 = tl.load(e0_ptr + r.to(tl.int64) * 40 + c * 1, mask=keep, other=0).to(tl.float32)
    t0 = acc0 + e0
    y_at = y_ptr + r.to(tl.int64) * 32 + c
    tl.store(y_at, (t0).to(y_ptr.dtype.element_ty), mask=keep)

