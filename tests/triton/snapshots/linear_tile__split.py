# linear_tile(x_ptr: *bf16, w_ptr: *bf16, y_ptr: *bf16, sums_ptr: *fp32, counters_ptr: *i32, num_rows?: i32)
# grid (1 * ceil(num_tokens / 16), 2, 1), 4 warps, 3 stages
# triton/common.py.jinja


N = tl.constexpr(32)
K = tl.constexpr(128)
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
STEPS = tl.constexpr(2)
TILES_N = tl.constexpr(1)
BAND = tl.constexpr(8)


@triton.jit
def linear_tile(x_ptr, w_ptr, y_ptr, sums_ptr, counters_ptr, num_rows):
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
    x_at = x_ptr + (rows.to(tl.int64) * 128)[None, :]

    row0 = 0 + 1 * first
    acc0 = tl.zeros([BN, BM], tl.float32)
    w0_at = w_ptr + row0.to(tl.int64) * K + (tile * 1 * K)[:, None]
    for turn in tl.range(0, 1, num_stages=3):  # names its stages: all loads run ahead
        step = tl.program_id(1) * 1 + turn
        x_k = step * BK + tl.arange(0, BK)[:, None]
        w_k = step * BK + tl.arange(0, BK)[None, :]
        x = tl.load(x_at + x_k, mask=in_rows[None, :], other=0.0)
        w0 = load(w0_at + w_k, None)
        acc0 = dot(w0, x, acc0)
    c = cols[:, None]
    r = r[None, :]
    keep = in_rows[None, :] & (c < WIDTH)
    mine = tl.program_id(0) * 2 * 1 * BN * BM + tile[:, None] * BM + tl.arange(0, BM)[None, :]
    tl.store(sums_ptr + (mine + (tl.program_id(1) * 1 + 0) * BN * BM), acc0)
    tl.debug_barrier()  # all that this program wrote comes before it counts
    if tl.atomic_add(counters_ptr + tl.program_id(0), 1) == 1:
        tl.store(counters_ptr + tl.program_id(0), 0)
        acc0 = tl.load(sums_ptr + (mine + 0 * BN * BM))
        for split in tl.static_range(1, 2):
            acc0 += tl.load(sums_ptr + (mine + (split * 1 + 0) * BN * BM))
        y_at = y_ptr + r.to(tl.int64) * 32 + c
        tl.store(y_at, (acc0).to(y_ptr.dtype.element_ty), mask=keep)

