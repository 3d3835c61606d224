# linear_decode(x_ptr: *bf16, w_ptr: *u8, index_ptr: *i32, y_ptr: *bf16, context_lens: *i32)
# grid (1, 2 * ceil(num_tokens / 1), 1), 2 warps, 2 stages
# triton/common.py.jinja


N = tl.constexpr(16)
K = tl.constexpr(64)
WIDTH = tl.constexpr(16)
BN = tl.constexpr(16)
BM = tl.constexpr(8)
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


S = tl.constexpr(2)
SLICE = tl.constexpr(64)
SLICES = tl.constexpr(1)
LANES = tl.constexpr(64)

TOP = tl.constexpr(448.0)


@triton.jit
def scale_of(peak, poison):
    """What peaks are divided by, and what values are multiplied with; `poison` is NaN where a value is not finite."""
    inverse = tl.where((poison == 0.0) & (peak > 1e-30), TOP / tl.maximum(peak, 1e-30), 0.0)
    return tl.where(poison == 0.0, peak / TOP, float("nan")), inverse


@triton.jit
def codes_of(x, inverse):
    """Values as codes; 0 where the largest of all is."""
    scaled = tl.where(inverse > 0.0, x * inverse, 0.0)
    return scaled.to(tl.float8e4nv)



@triton.jit
def linear_decode(x_ptr, w_ptr, index_ptr, y_ptr, context_lens):
    """BN columns of up to BM rows; warp s takes every S-th slice of K."""
    first = tl.program_id(0) * BN
    tile = tl.arange(0, BN)
    rows = tl.arange(0, BM)
    warp = tl.arange(0, S)
    lane = tl.arange(0, SLICE)
    cols = first + tile
    slot = tl.program_id(1)
    expert = tl.load(index_ptr + slot)
    routed = (expert >= 0) & (expert < EXPERTS) & (tl.load(context_lens + slot // TOPK) > 0)
    slices = tl.where(routed, SLICES, 0)
    expert = tl.where(routed, expert, 0).to(tl.int64)
    in_rows = rows < routed.to(tl.int32)
    x_at = x_ptr + (slot // TOPK).to(tl.int64) * 64
    row0 = 0 + 1 * first
    sum0 = tl.zeros([S, BN, BM], tl.float32)

    peak = 0.0
    poison = 0.0
    for start in range(0, K, LANES):
        lanes = start + tl.arange(0, LANES)
        value = tl.load(x_at + lanes, mask=lanes < K, other=0.0).to(tl.float32)
        peak = tl.maximum(peak, tl.max(tl.abs(value), axis=0))
        poison += tl.sum(value * 0.0, axis=0)
    x_scale, inverse = scale_of(peak, poison)
    matrix = (w_ptr + expert * 1088).to(tl.pointer_type(tl.float8e4nv))
    scales = (w_ptr + expert * 1088 + 1024).to(tl.pointer_type(tl.float32))
    w0_at = matrix + row0.to(tl.int64) * K + (tile * 1 * K)[None, :, None]
    word0_at = scales + row0 + (tile * 1)[None, :]
    for step in tl.range(0, slices, S, num_stages=2):  # names its stages: all loads run ahead
        k = (step + warp)[:, None, None] * SLICE
        x_k = k + lane[None, :, None]
        x = codes_of(load(x_at + x_k, (x_k < K)).to(tl.float32), inverse)
        x = tl.broadcast_to(x, [S, SLICE, BM])  # the same row in all columns
        w_k = k + lane[None, None, :]
        w0 = load(w0_at + w_k, (w_k < K))
        sum0 = dot(w0, x, sum0)
    word0 = load(word0_at, None)
    acc0 = tl.sum(sum0, axis=0) * tl.trans(word0) * x_scale
    c = cols[:, None]
    r = rows[None, :] + slot
    keep = (rows < 1)[None, :] & (c < WIDTH)
    y_at = y_ptr + ((r // TOPK).to(tl.int64) * 32 + r % TOPK * WIDTH) + c
    tl.store(y_at, (acc0).to(y_ptr.dtype.element_ty), mask=keep)


