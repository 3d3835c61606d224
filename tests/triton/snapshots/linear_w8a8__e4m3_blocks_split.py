# linear_w8a8(codes_ptr: *u8, scales_ptr: *fp32, w_ptr: *u8, y_ptr: *bf16, sums_ptr: *fp32, counters_ptr: *i32, num_rows?: i32)
# grid (2 * ceil(num_tokens / 16), 2, 1), 4 warps, 3 stages
# triton/common.py.jinja


N = tl.constexpr(64)
K = tl.constexpr(256)
WIDTH = tl.constexpr(64)
BN = tl.constexpr(32)
BM = tl.constexpr(16)


@triton.jit
def load(at, mask):
    """Elements under a mask that may be None; 0 elsewhere."""
    if mask is None:
        value = tl.load(at)
    else:
        value = tl.load(at, mask=mask, other=0.0)
    return value


BK = tl.constexpr(64)
STEPS = tl.constexpr(4)
TILES_N = tl.constexpr(2)
BAND = tl.constexpr(8)


@triton.jit
def linear_w8a8(codes_ptr, scales_ptr, w_ptr, y_ptr, sums_ptr, counters_ptr, num_rows):
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
    x_at = codes_ptr.to(tl.pointer_type(tl.float8e4nv)) + (rows.to(tl.int64) * K)[None, :]
    x_scale = tl.load(scales_ptr + rows, mask=in_rows, other=0.0)

    matrix = (w_ptr).to(tl.pointer_type(tl.float8e4nv))
    scales = (w_ptr + 16384).to(tl.pointer_type(tl.float32))
    row0 = 0 + 1 * first
    sum0 = tl.zeros([BN, BM], tl.float32)
    w0_at = matrix + row0.to(tl.int64) * K + (tile * 1 * K)[:, None]
    word0_at = scales + row0 + tile * 1
    for turn in tl.range(0, 2, num_stages=3):
        step = tl.program_id(1) * 2 + turn
        x_k = step * BK + tl.arange(0, BK)[:, None]
        w_k = step * BK + tl.arange(0, BK)[None, :]
        x = load(x_at + x_k, in_rows[None, :])
        w0 = load(w0_at + w_k, None)
        word0 = load(word0_at + step * BK // 64 * N, None)
        sum0 += dot(w0, x, tl.zeros([BN, BM], tl.float32)) * word0[:, None]
    acc0 = sum0 * x_scale[None, :]
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
        y_at = y_ptr + r.to(tl.int64) * 64 + c
        tl.store(y_at, (acc0).to(y_ptr.dtype.element_ty), mask=keep)

