# linear_decode(x_ptr: *fp16, w_ptr: *fp16, b_ptr?: *fp32, e0_ptr?: *fp32, y_ptr?: *fp32, num_rows?: i32)
# grid (2, 1, 1), 2 warps, 2 stages
# triton/common.py.jinja




# triton/math.py.jinja


N = tl.constexpr(20)
K = tl.constexpr(40)
WIDTH = tl.constexpr(20)
BN = tl.constexpr(16)
BM = tl.constexpr(8)


@triton.jit
def load(at, mask):
    """Elements under a mask that may be None; 0 elsewhere."""
    if mask is None:
        value = tl.load(at)
    else:
        value = tl.load(at, mask=mask, other=0)
    return value


S = tl.constexpr(2)
SLICE = tl.constexpr(16)
SLICES = tl.constexpr(3)


@triton.jit
def linear_decode(x_ptr, w_ptr, b_ptr, e0_ptr, y_ptr, num_rows):
    """BN columns of up to BM rows; warp s takes every S-th slice of K."""
    first = tl.program_id(0) * BN
    tile = tl.arange(0, BN)
    rows = tl.arange(0, BM)
    warp = tl.arange(0, S)
    lane = tl.arange(0, SLICE)
    cols = first + tile
    in_rows = rows < num_rows
    x_at = x_ptr + rows[None, None, :] * 48
    row0 = 0 + 1 * first
    sum0 = tl.zeros([S, BN, BM], tl.float32)

    w_at = w_ptr
    for step in tl.range(0, SLICES, S, num_stages=2):  # names its stages: all loads run ahead
        k = (step + warp)[:, None, None] * SLICE
        x_k = k + lane[None, :, None]
        w_k = k + lane[None, None, :]
        x = load(x_at + x_k, in_rows[None, None, :] & (x_k < K))
        w0 = load(
            w_at + row0.to(tl.int64) * K + (tile[None, :, None] * 1 * K + w_k),
            (w_k < K) & (cols < WIDTH)[None, :, None],
        )
        sum0 = dot(w0, x, sum0)
    acc0 = tl.sum(sum0, axis=0)
    c = cols[:, None]
    r = rows[None, :]
    keep = in_rows[None, :] & (c < WIDTH)
    b_at = b_ptr
    acc0 += tl.load(b_at + 0 + c * 1, mask=c < WIDTH, other=0.0)
    e0 = tl.load(e0_ptr + r.to(tl.int64) * 40 + c * 1, mask=keep, other=0).to(tl.float32)
    t0 = acc0 + e0
    y_at = y_ptr + r.to(tl.int64) * 20 + c
    tl.store(y_at, (t0).to(y_ptr.dtype.element_ty), mask=keep)


