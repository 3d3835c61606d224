# linear_decode(x_ptr: *bf16, w_ptr: *u8, y_ptr: *bf16, num_rows?: i32)
# grid (4, 1, 1), 4 warps, 2 stages
# triton/common.py.jinja




# triton/math.py.jinja


N = tl.constexpr(32)
K = tl.constexpr(768)
WIDTH = tl.constexpr(16)
BN = tl.constexpr(4)
BM = tl.constexpr(2)
GROUP = tl.constexpr(32)
SIZE = tl.constexpr(256)


@triton.jit
def load(at, mask):
    """Elements under a mask that may be None; 0 elsewhere."""
    if mask is None:
        value = tl.load(at)
    else:
        value = tl.load(at, mask=mask, other=0)
    return value


@triton.jit
def level_of(code):
    """What a code stands for, but for scales and minimums; float32."""
    return (code | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0  # by way of 2^23, whose last bit is worth 1


S = tl.constexpr(4)
SLICE = tl.constexpr(512)
SLICES = tl.constexpr(2)


@triton.jit
def linear_decode(x_ptr, w_ptr, y_ptr, num_rows):
    """BN columns of up to BM rows; warp s takes every S-th slice of K."""
    first = tl.program_id(0) * BN
    tile = tl.arange(0, BN)
    rows = tl.arange(0, BM)
    warp = tl.arange(0, S)
    lane = tl.arange(0, SLICE)
    cols = first + tile
    in_rows = rows < num_rows
    x_at = x_ptr + rows[None, None, :] * 768
    row0 = 0 + 1 * first
    sum0 = tl.zeros([S, BN, BM], tl.float32)
    row1 = 16 + 1 * first
    sum1 = tl.zeros([S, BN, BM], tl.float32)

    matrix = w_ptr
    codes = matrix
    scales = (matrix + 12288).to(tl.pointer_type(tl.float16))
    mins = (matrix + 12544).to(tl.pointer_type(tl.float16))
    group_scales = matrix + 12800
    group_mins = matrix + 13568
    lanes = tl.arange(0, 16)[None, None, :]
    groups = tl.arange(0, 16) * GROUP
    sum0_0 = tl.zeros([BN, 16, 16], tl.float32)
    sum0_1 = tl.zeros([BN, 16, 16], tl.float32)
    sum1_0 = tl.zeros([BN, 16, 16], tl.float32)
    sum1_1 = tl.zeros([BN, 16, 16], tl.float32)
    for step in tl.range(0, SLICES, num_stages=2):
        column = step * SLICE + groups
        in_k = (column < K)[None, :]
        x0_0 = tl.load(
            x_ptr + 0 + (column[None, :, None] + lanes * 2 + 0),
            mask=in_k[:, :, None], other=0.0,
        ).to(tl.float32)
        x0_1 = tl.load(
            x_ptr + 0 + (column[None, :, None] + lanes * 2 + 1),
            mask=in_k[:, :, None], other=0.0,
        ).to(tl.float32)
        whole0 = x0_0 + x0_1
        x1_0 = tl.load(
            x_ptr + 768 + (column[None, :, None] + lanes * 2 + 0),
            mask=in_k[:, :, None] & (1 < num_rows), other=0.0,
        ).to(tl.float32)
        x1_1 = tl.load(
            x_ptr + 768 + (column[None, :, None] + lanes * 2 + 1),
            mask=in_k[:, :, None] & (1 < num_rows), other=0.0,
        ).to(tl.float32)
        whole1 = x1_0 + x1_1
        at = (row0 + tile * 1)[:, None]
        inside = in_k & (cols < WIDTH)[:, None]
        code = tl.load(
            codes + (at * (K // 2) + column[None, :] // 2)[:, :, None] + lanes, mask=inside[:, :, None], other=0
        ).to(tl.int32)
        block = at * 4 + column[None, :] // SIZE
        group = at * 24 + column[None, :] // GROUP
        scale = tl.load(scales + block, mask=inside, other=0.0).to(tl.float32)
        scale = scale * tl.load(group_scales + group, mask=inside, other=0).to(tl.float32)
        least = tl.load(mins + block, mask=inside, other=0.0).to(tl.float32)
        least = least * tl.load(group_mins + group, mask=inside, other=0).to(tl.float32)
        found0 = tl.zeros([BN, 16, 16], tl.float32)
        found1 = tl.zeros([BN, 16, 16], tl.float32)
        level = level_of((code >> 0) & 15)
        found0 += level * x0_0
        found1 += level * x1_0
        level = level_of((code >> 4) & 15)
        found0 += level * x0_1
        found1 += level * x1_1
        sum0_0 += found0 * scale[:, :, None] - whole0 * least[:, :, None]
        sum0_1 += found1 * scale[:, :, None] - whole1 * least[:, :, None]
        at = (row1 + tile * 1)[:, None]
        inside = in_k & (cols < WIDTH)[:, None]
        code = tl.load(
            codes + (at * (K // 2) + column[None, :] // 2)[:, :, None] + lanes, mask=inside[:, :, None], other=0
        ).to(tl.int32)
        block = at * 4 + column[None, :] // SIZE
        group = at * 24 + column[None, :] // GROUP
        scale = tl.load(scales + block, mask=inside, other=0.0).to(tl.float32)
        scale = scale * tl.load(group_scales + group, mask=inside, other=0).to(tl.float32)
        least = tl.load(mins + block, mask=inside, other=0.0).to(tl.float32)
        least = least * tl.load(group_mins + group, mask=inside, other=0).to(tl.float32)
        found0 = tl.zeros([BN, 16, 16], tl.float32)
        found1 = tl.zeros([BN, 16, 16], tl.float32)
        level = level_of((code >> 0) & 15)
        found0 += level * x0_0
        found1 += level * x1_0
        level = level_of((code >> 4) & 15)
        found0 += level * x0_1
        found1 += level * x1_1
        sum1_0 += found0 * scale[:, :, None] - whole0 * least[:, :, None]
        sum1_1 += found1 * scale[:, :, None] - whole1 * least[:, :, None]
    sum0 = tl.zeros([1, BN, BM], tl.float32)
    total = tl.sum(tl.sum(sum0_0, axis=2), axis=1)
    sum0 = tl.where((rows == 0)[None, None, :], total[None, :, None], sum0)
    total = tl.sum(tl.sum(sum0_1, axis=2), axis=1)
    sum0 = tl.where((rows == 1)[None, None, :], total[None, :, None], sum0)
    sum1 = tl.zeros([1, BN, BM], tl.float32)
    total = tl.sum(tl.sum(sum1_0, axis=2), axis=1)
    sum1 = tl.where((rows == 0)[None, None, :], total[None, :, None], sum1)
    total = tl.sum(tl.sum(sum1_1, axis=2), axis=1)
    sum1 = tl.where((rows == 1)[None, None, :], total[None, :, None], sum1)
    acc0 = tl.sum(sum0, axis=0)
    acc1 = tl.sum(sum1, axis=0)
    c = cols[:, None]
    r = rows[None, :]
    keep = in_rows[None, :] & (c < WIDTH)
    t0 = silu(acc0)
    t1 = t0 * acc1
    y_at = y_ptr + r.to(tl.int64) * 16 + c
    tl.store(y_at, (t1).to(y_ptr.dtype.element_ty), mask=keep)


