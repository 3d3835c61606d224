# linear_decode(x_ptr: *bf16, w_ptr: *bf16, index_ptr: *i32, y_ptr?: *fp32, context_lens: *i32)
# grid (2, 2 * ceil(num_tokens / 1), 1), 2 warps, 2 stages
# triton/common.py.jinja


N = tl.constexpr(32)
K = tl.constexpr(64)
WIDTH = tl.constexpr(32)
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
        value = tl.load(at, mask=mask, other=0)
    return value


S = tl.constexpr(2)
SLICE = tl.constexpr(16)
SLICES = tl.constexpr(4)


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
    x_at = x_ptr + (slot // TOPK).to(tl.int64) * 128 + slot % TOPK * K + rows[None, None, :] * 0
    row0 = 0 + 1 * first
    sum0 = tl.zeros([S, BN, BM], tl.float32)

    w_at = w_ptr + expert * 2048
    for step in tl.range(0, slices, S, num_stages=2):  # names its stages: all loads run ahead
        k = (step + warp)[:, None, None] * SLICE
        x_k = k + lane[None, :, None]
        w_k = k + lane[None, None, :]
        x = load(x_at + x_k, in_rows[None, None, :])
        w0 = load(
            w_at + row0.to(tl.int64) * K + (tile[None, :, None] * 1 * K + w_k),
            None,
        )
        sum0 = dot(w0, x, sum0)
    acc0 = tl.sum(sum0, axis=0)
    c = cols[:, None]
    r = rows[None, :] + slot
    keep = (rows < 1)[None, :] & (c < WIDTH)
    y_at = y_ptr + ((r // TOPK).to(tl.int64) * 64 + r % TOPK * WIDTH) + c
    tl.store(y_at, (acc0).to(y_ptr.dtype.element_ty), mask=keep)


