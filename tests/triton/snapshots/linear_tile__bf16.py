# linear_tile(x_ptr: *bf16, w_ptr: *bf16, y_ptr: *bf16, num_rows?: i32)
# grid (1 * ceil(num_tokens / 16), 1, 1), 4 warps, 3 stages
# triton/common.py.jinja


N = tl.constexpr(32)
K = tl.constexpr(64)
WIDTH = tl.constexpr(32)
BN = tl.constexpr(32)
BM = tl.constexpr(16)


@triton.jit
def load(at, mask):
    """Elements under a mask that may be None; 0 elsewhere."""
    if mask is None:
        value = tl.load(at)
    else:
        value = tl.load(at, mask=mask, other=0)
    return value


BK = tl.constexpr(64)
STEPS = tl.constexpr(1)
TILES_N = tl.constexpr(1)
BAND = tl.constexpr(8)


@triton.jit
def linear_tile(x_ptr, w_ptr, y_ptr, num_rows):
    """One tile; steps of BK over K."""
    pid = tl.program_id(0)
    top = pid // (BAND * TILES_N) * BAND
    height = tl.minimum(tl.cdiv(num_rows, BM) - top, BAND)
    tile_m = top + pid % (BAND * TILES_N) % height
    first = pid % (BAND * TILES_N) // height * BN
    tile = tl.arange(0, BN)
    cols = first + tile
    rows = tile_m * BM + tl.arange(0, BM)
    in_rows = rows < num_rows
    r = rows
    x_at = x_ptr + (rows.to(tl.int64) * 64)[None, :]

    row0 = 0 + 1 * first
    acc0 = tl.zeros([BN, BM], tl.float32)
    w0_at = w_ptr + row0.to(tl.int64) * K + (tile * 1 * K)[:, None]
    for step in tl.range(0, STEPS, num_stages=3):  # names its stages: all loads run ahead
        x_k = step * BK + tl.arange(0, BK)[:, None]
        w_k = step * BK + tl.arange(0, BK)[None, :]
        x = tl.load(x_at + x_k, mask=in_rows[None, :], other=0.0)
        w0 = load(w0_at + w_k, None)
        acc0 = dot(w0, x, acc0)
    c = cols[:, None]
    r = r[None, :]
    keep = in_rows[None, :] & (c < WIDTH)
    y_at = y_ptr + r.to(tl.int64) * 32 + c
    tl.store(y_at, (acc0).to(y_ptr.dtype.element_ty), mask=keep)

