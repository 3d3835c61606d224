# linear_decode(x_ptr: *bf16, w_ptr: *u8, y_ptr: *bf16, num_rows?: i32)
# grid (3, 1, 1), 4 warps, 2 stages
# triton/common.py.jinja


N = tl.constexpr(20)
K = tl.constexpr(96)
WIDTH = tl.constexpr(20)
BN = tl.constexpr(8)
BM = tl.constexpr(1)
GROUP = tl.constexpr(32)
SIZE = tl.constexpr(32)


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
    bits = ((code & 7) << 22) | ((code & 8) << 28)  # exponent and mantissa as those of a float32, 2^127 times too small
    return bits.to(tl.float32, bitcast=True) * 1.7014118346046923e+38


S = tl.constexpr(4)
SLICE = tl.constexpr(512)
SLICES = tl.constexpr(1)
# triton/linear/micro.py.jinja



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
    x_at = x_ptr
    row0 = 0 + 1 * first
    sum0 = tl.zeros([S, BN, BM], tl.float32)

    matrix = w_ptr
    codes = matrix
    exponents = matrix + 960
    lanes = tl.arange(0, 16)[None, None, :]
    groups = tl.arange(0, 16) * GROUP
    sum0_0 = tl.zeros([BN, 16, 16], tl.float32)
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
        power = power_of(tl.maximum(tl.max(magnitude(x0_0), axis=2), tl.max(magnitude(x0_1), axis=2)))[:, :, None]
        x0_0 = micro_codes(x0_0, power).to(tl.float32) * two_to(power)
        x0_1 = micro_codes(x0_1, power).to(tl.float32) * two_to(power)
        at = (row0 + tile * 1)[:, None]
        inside = in_k & (cols < WIDTH)[:, None]
        code = tl.load(
            codes + (at * (K // 2) + column[None, :] // 2)[:, :, None] + lanes, mask=inside[:, :, None], other=0
        ).to(tl.int32)
        block = at * 4 + column[None, :] // SIZE
        power = tl.load(exponents + block, mask=inside, other=0).to(tl.int32)
        scale = tl.where(power < 2, (power + 1) << 21, (power - 1) << 23).to(tl.float32, bitcast=True)
        found0 = tl.zeros([BN, 16, 16], tl.float32)
        level = level_of((code >> 0) & 15)
        found0 += level * x0_0
        level = level_of((code >> 4) & 15)
        found0 += level * x0_1
        sum0_0 += found0 * scale[:, :, None]
    sum0 = tl.zeros([1, BN, BM], tl.float32)
    total = tl.sum(tl.sum(sum0_0, axis=2), axis=1)
    sum0 = tl.where((rows == 0)[None, None, :], total[None, :, None], sum0)
    acc0 = tl.sum(sum0, axis=0)
    c = cols[:, None]
    r = rows[None, :]
    keep = in_rows[None, :] & (c < WIDTH)
    y_at = y_ptr + r.to(tl.int64) * 20 + c
    tl.store(y_at, (acc0).to(y_ptr.dtype.element_ty), mask=keep)


