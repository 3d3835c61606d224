# linear_reduce(y_ptr: *bf16, sums_ptr: *fp32, num_rows?: i32)
# grid (1 * ceil(num_tokens / 1), 1, 1), 4 warps, 1 stages
# triton/common.py.jinja


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
def linear_reduce(y_ptr, sums_ptr, num_rows):
    """BLOCK columns of one row."""
    r = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = c < WIDTH
    acc0 = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(2):
        sums = ((split * 1 + 0) * num_rows + r).to(tl.int64) * WIDTH + c
        acc0 += tl.load(sums_ptr + sums, mask=keep, other=0.0)
    y_at = y_ptr + r.to(tl.int64) * 32 + c
    tl.store(y_at, (acc0).to(y_ptr.dtype.element_ty), mask=keep)

