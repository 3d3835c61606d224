# linear_w8a8(codes_ptr: *u8, scales_ptr: *fp32, w_ptr: *u8, y_ptr: *bf16, slots_ptr: *i32, experts_ptr: *i32, num_rows?: i32)
# grid (2 * ceil(num_tokens / 16) + 4, 1, 1), 4 warps, 3 stages
# triton/common.py.jinja


N = tl.constexpr(32)
K = tl.constexpr(128)
WIDTH = tl.constexpr(32)
BN = tl.constexpr(64)
BM = tl.constexpr(16)
EXPERTS = tl.constexpr(3)
TOPK = tl.constexpr(2)


@triton.jit
def load(at, mask):
    """Elements under a mask that may be None; 0 elsewhere."""
    if mask is None:
        value = tl.load(at)
    else:
        value = tl.load(at, mask=mask, other=0.0)
    return value


BK = tl.constexpr(128)
STEPS = tl.constexpr(1)
TILES_N = tl.constexpr(1)
BAND = tl.constexpr(8)


@triton.jit
def linear_w8a8(codes_ptr, scales_ptr, w_ptr, y_ptr, slots_ptr, experts_ptr, num_rows):
    """One tile; steps of BK over K."""
    pid = tl.program_id(0)
    top = pid // (BAND * TILES_N) * BAND
    height = tl.minimum(((num_rows + 15) // 16 * 2 + 4) - top, BAND)
    tile_m = top + pid % (BAND * TILES_N) % height
    first = pid % (BAND * TILES_N) // height * BN
    tile = tl.arange(0, BN)
    cols = first + tile
    rows = tile_m * BM + tl.arange(0, BM)
    expert = tl.load(experts_ptr + tile_m)
    slots = tl.load(slots_ptr + rows, mask=(rows >= 0) & (expert >= 0), other=-1)
    in_rows = slots >= 0
    r = tl.where(in_rows, slots, 0)
    routed = (expert >= 0) & (expert < EXPERTS)
    expert = tl.where(routed, expert, 0).to(tl.int64)
    steps = tl.where(routed, STEPS, 0)
    x_at = codes_ptr.to(tl.pointer_type(tl.float8e4nv)) + ((r // TOPK).to(tl.int64) * K)[None, :]
    x_scale = tl.load(scales_ptr + (r // TOPK), mask=in_rows, other=0.0)

    matrix = (w_ptr + expert * 4224).to(tl.pointer_type(tl.float8e4nv))
    scales = (w_ptr + expert * 4224 + 4096).to(tl.pointer_type(tl.float32))
    row0 = 0 + 1 * first
    sum0 = tl.zeros([BN, BM], tl.float32)
    w0_at = matrix + row0.to(tl.int64) * K + (tile * 1 * K)[:, None]
    word0_at = scales + row0 + tile * 1
    word0 = load(word0_at, (cols < WIDTH))
    for step in tl.range(0, steps, num_stages=3):
        x_k = step * BK + tl.arange(0, BK)[:, None]
        w_k = step * BK + tl.arange(0, BK)[None, :]
        x = load(x_at + x_k, in_rows[None, :])
        w0 = load(w0_at + w_k, (cols < WIDTH)[:, None])
        sum0 += tl.dot(w0, x, tl.zeros([BN, BM], tl.float32), max_num_imprecise_acc=BK)
    acc0 = sum0.to(tl.float32) * word0[:, None] * x_scale[None, :]
    c = cols[:, None]
    r = r[None, :]
    keep = in_rows[None, :] & (c < WIDTH)
    y_at = y_ptr + ((r // TOPK).to(tl.int64) * 64 + r % TOPK * WIDTH) + c
    tl.store(y_at, (acc0).to(y_ptr.dtype.element_ty), mask=keep)

