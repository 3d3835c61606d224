# linear_decode(codes_ptr: *u8, scales_ptr: *fp32, w_ptr: *u8, y_ptr: *bf16, num_rows?: i32)
# grid (2, 1, 1), 2 warps, 2 stages
# triton/common.py.jinja


N = tl.constexpr(32)
K = tl.constexpr(256)
WIDTH = tl.constexpr(32)
BN = tl.constexpr(16)
BM = tl.constexpr(8)


@triton.jit
def load(at, mask):
    """Elements under a mask that may be None; 0 elsewhere."""
    if mask is None:
        value = tl.load(at)
    else:
        value = tl.load(at, mask=mask, other=0.0)
    return value


S = tl.constexpr(2)
SLICE = tl.constexpr(128)
SLICES = tl.constexpr(2)


@triton.jit
def linear_decode(codes_ptr, scales_ptr, w_ptr, y_ptr, num_rows):
    """BN columns of up to BM rows; warp s takes every S-th slice of K."""
    first = tl.program_id(0) * BN
    tile = tl.arange(0, BN)
    rows = tl.arange(0, BM)
    warp = tl.arange(0, S)
    lane = tl.arange(0, SLICE)
    cols = first + tile
    in_rows = rows < num_rows
    x_at = codes_ptr.to(tl.pointer_type(tl.float8e4nv)) + rows[None, None, :] * K
    row0 = 0 + 1 * first
    sum0 = tl.zeros([S, BN, BM], tl.float32)

    x_scale = tl.load(scales_ptr + rows, mask=in_rows, other=0.0)[None, :]
    matrix = (w_ptr).to(tl.pointer_type(tl.float8e4nv))
    scales = (w_ptr + 8192).to(tl.pointer_type(tl.float32))
    w0_at = matrix + row0.to(tl.int64) * K + (tile * 1 * K)[None, :, None]
    word0_at = scales + row0 + (tile * 1)[None, :]
    for step in tl.range(0, SLICES, S, num_stages=2):  # names its stages: all loads run ahead
        k = (step + warp)[:, None, None] * SLICE
        x_k = k + lane[None, :, None]
        x = load(x_at + x_k, in_rows[None, None, :])
        w_k = k + lane[None, None, :]
        w0 = load(w0_at + w_k, None)
        word0 = load(
            word0_at + ((step + warp) * SLICE // 128)[:, None] * N,
            None,
        )
        sum0 += dot(w0, x, tl.zeros([S, BN, BM], tl.float32)) * word0[:, :, None]
    acc0 = tl.sum(sum0, axis=0) * x_scale
    c = cols[:, None]
    r = rows[None, :]
    keep = in_rows[None, :] & (c < WIDTH)
    y_at = y_ptr + r.to(tl.int64) * 32 + c
    tl.store(y_at, (acc0).to(y_ptr.dtype.element_ty), mask=keep)


