# linear_tile(x_ptr?: *fp32, w_ptr: *u8, y_ptr?: *fp32, num_rows?: i32)
# grid (1 * ceil(num_tokens / 16), 1, 1), 4 warps, 3 stages
# triton/common.py.jinja


N = tl.constexpr(32)
K = tl.constexpr(64)
WIDTH = tl.constexpr(32)
BN = tl.constexpr(32)
BM = tl.constexpr(16)
GROUP = tl.constexpr(32)
GROUPS = tl.constexpr(2)
SPAN = tl.constexpr(8)


@triton.jit
def load(at, mask):
    """Elements under a mask that may be None; 0 elsewhere."""
    if mask is None:
        value = tl.load(at)
    else:
        value = tl.load(at, mask=mask, other=0)
    return value


@triton.jit
def scale_of(word):
    """The scale of a word: its upper 24 bits."""
    return (word & 0xFFFFFF00).to(tl.float32, bitcast=True)


@triton.jit
def zero_of(word):
    """The zero point of a word, its low byte, by way of 2^23, whose last mantissa bit is worth 1."""
    return ((word & 255) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


BK = tl.constexpr(32)
STEPS = tl.constexpr(2)
TILES_N = tl.constexpr(1)
BAND = tl.constexpr(8)


@triton.jit
def linear_tile(x_ptr, w_ptr, y_ptr, num_rows):
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
    x_at = x_ptr + (rows.to(tl.int64) * 64)[None, :]

    matrix = w_ptr
    codes = matrix.to(tl.pointer_type(tl.uint16))
    words = (matrix + 1024).to(tl.pointer_type(tl.uint32))
    row0 = 0 + 1 * first
    acc0 = tl.zeros([BN, BM], tl.float32)
    for step in tl.range(0, STEPS, num_stages=3):  # names its stages: all loads run ahead
        x_k = step * BK + tl.arange(0, BK)[:, None]
        w_k = step * BK + tl.arange(0, BK)[None, :]
        x = tl.load(x_at + x_k, mask=in_rows[None, :], other=0.0).to(tl.float32)
        inside = w_k % GROUP
        at = row0 + tile[:, None] * 1 + w_k // GROUP * N
        in_w = (w_k < K) & (cols < WIDTH)[:, None]
        code = tl.load(codes + at * SPAN + inside % SPAN, mask=in_w, other=0).to(tl.int32)
        word = tl.load(words + at, mask=in_w, other=0)
        code = (code >> inside // SPAN * 4) & 15
        w0 = (code.to(tl.float32) - zero_of(word)) * scale_of(word)
        acc0 = dot(w0, x, acc0)
    c = cols[:, None]
    r = r[None, :]
    keep = in_rows[None, :] & (c < WIDTH)
    y_at = y_ptr + r.to(tl.int64) * 32 + c
    tl.store(y_at, (acc0).to(y_ptr.dtype.element_ty), mask=keep)

