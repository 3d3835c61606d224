# linear_w8a8(codes_ptr: *i8, scales_ptr: *fp32, w_ptr: *u8, y_ptr: *bf16, num_rows?: i32)
# grid (1 * ceil(num_tokens / 32), 1, 1), 4 warps, 4 stages
# triton/common.py.jinja


N = tl.constexpr(32)
K = tl.constexpr(128)
WIDTH = tl.constexpr(32)
BN = tl.constexpr(32)
BM = tl.constexpr(32)


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
def linear_w8a8(codes_ptr, scales_ptr, w_ptr, y_ptr, num_rows):
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
    x_at = codes_ptr + (rows.to(tl.int64) * K)[None, :]
    x_scale = tl.load(scales_ptr + rows, mask=in_rows, other=0.0)

    matrix = (w_ptr).to(tl.pointer_type(tl.int8))
    scales = (w_ptr + 4096).to(tl.pointer_type(tl.float32))
    row0 = 0 + 1 * first
    sum0 = tl.zeros([BN, BM], tl.int32)
    w0_at = matrix + row0.to(tl.int64) * K + (tile * 1 * K)[:, None]
    word0 = load(scales + row0 + tile * 1, None)
    for step in tl.range(0, STEPS, num_stages=4):
        x_k = step * BK + tl.arange(0, BK)[:, None]
        w_k = step * BK + tl.arange(0, BK)[None, :]
        x = load(x_at + x_k, in_rows[None, :])
        w0 = load(w0_at + w_k, None)
        sum0 = tl.dot(w0, x, sum0, out_dtype=tl.int32)
    acc0 = sum0.to(tl.float32) * word0[:, None] * x_scale[None, :]
    c = cols[:, None]
    r = r[None, :]
    keep = in_rows[None, :] & (c < WIDTH)
    y_at = y_ptr + r.to(tl.int64) * 32 + c
    tl.store(y_at, (acc0).to(y_ptr.dtype.element_ty), mask=keep)

