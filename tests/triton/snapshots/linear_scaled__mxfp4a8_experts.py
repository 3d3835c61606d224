# linear_scaled(codes_ptr: *u8, scales_ptr: *i32, w_ptr: *u8, b_ptr?: *fp32, y_ptr: *bf16, slots_ptr: *i32, experts_ptr: *i32, num_rows?: i32)
# grid (2 * ceil(num_tokens / 16) + 4, 1, 1), 4 warps, 3 stages
# triton/common.py.jinja


N = tl.constexpr(20)
K = tl.constexpr(256)
WIDTH = tl.constexpr(20)
BN = tl.constexpr(128)
BM = tl.constexpr(16)
GROUP = tl.constexpr(32)
SIZE = tl.constexpr(32)
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


BK = tl.constexpr(256)
STEPS = tl.constexpr(1)
TILES_N = tl.constexpr(1)
BAND = tl.constexpr(8)
WORDS = tl.constexpr(2)


# triton/linear/micro.py.jinja



@triton.jit
def powers(words, ROWS: tl.constexpr):
    """The four powers of each word, [ROWS, BK // 32]."""
    p0 = (words & 255).to(tl.uint8)
    p1 = ((words >> 8) & 255).to(tl.uint8)
    p2 = ((words >> 16) & 255).to(tl.uint8)
    p3 = ((words >> 24) & 255).to(tl.uint8)
    return tl.reshape(tl.join(tl.join(p0, p2), tl.join(p1, p3)), (ROWS, BK // 32))


@triton.jit
def e2m1(code):
    """What a code of 4 bits stands for, float32: exponent and mantissa as those of a float32, 2^126 times too small."""
    return (((code & 7) << 22) | ((code & 8) << 28)).to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def spread(power, ROWS: tl.constexpr):
    """The scale of every value, [ROWS, BK]."""
    scale = two_to(power.to(tl.int32))[:, :, None]
    return tl.reshape(tl.broadcast_to(scale, (ROWS, BK // 32, 32)), (ROWS, BK))


@triton.jit
def scaled(w, w_power, x, x_power, acc):
    """acc + (w scales) (x scales); Triton's interpreter has no such product."""
    if INTERPRETED:
        code = w.to(tl.int32)
        values = tl.reshape(tl.join(e2m1(code & 15), e2m1(code >> 4)), (BN, BK)) * spread(w_power, BN)
        acc = tl.dot(values, x.to(tl.float32) * tl.trans(spread(x_power, BM)), acc, input_precision="ieee")
    else:
        acc = tl.dot_scaled(w, w_power, "e2m1", x, x_power, "e4m3", acc)
    return acc


@triton.jit
def linear_scaled(codes_ptr, scales_ptr, w_ptr, b_ptr, y_ptr, slots_ptr, experts_ptr, num_rows):
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
    x_at = codes_ptr.to(tl.pointer_type(tl.float8e4nv)) + (r.to(tl.int64) * K)[None, :]

    matrix = w_ptr + expert * 2752
    codes = matrix
    exponents = matrix + 2560
    x_words_at = scales_ptr + (r * WORDS)[:, None]
    row0 = 0 + 1 * first
    acc0 = tl.zeros([BN, BM], tl.float32)
    at = (row0 + tile * 1)[:, None]
    w0_at = codes + at * (K // 2)
    word0_at = exponents.to(tl.pointer_type(tl.int32)) + at * 2
    for step in tl.range(0, steps, num_stages=3):
        x_k = step * BK + tl.arange(0, BK)[:, None]
        w_k = step * (BK // 2) + tl.arange(0, BK // 2)[None, :]
        word = step * (BK // 128) + tl.arange(0, BK // 128)[None, :]
        x = tl.load(x_at + x_k, mask=in_rows[None, :], other=0.0)
        x_words = load(x_words_at + word, in_rows[:, None])
        w0 = load(w0_at + w_k, (cols < WIDTH)[:, None])
        word0 = load(word0_at + word, (cols < WIDTH)[:, None])
        acc0 = scaled(w0, powers(word0, BN), x, powers(x_words, BM), acc0)
    c = cols[:, None]
    r = r[None, :]
    keep = in_rows[None, :] & (c < WIDTH)
    b_at = b_ptr + expert * N
    acc0 += tl.load(b_at + 0 + c * 1, mask=routed & (c < WIDTH), other=0.0)
    y_at = y_ptr + ((r // TOPK).to(tl.int64) * 40 + r % TOPK * WIDTH) + c
    tl.store(y_at, (acc0).to(y_ptr.dtype.element_ty), mask=keep)

