# linear_tile(x_ptr: *bf16, w_ptr: *u8, y_ptr: *bf16, num_rows?: i32)
# grid (1 * ceil(num_tokens / 16), 1, 1), 4 warps, 3 stages
# triton/common.py.jinja


N = tl.constexpr(32)
K = tl.constexpr(768)
WIDTH = tl.constexpr(32)
BN = tl.constexpr(32)
BM = tl.constexpr(16)
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


@triton.jit
def scale_of(raw, own):
    """The scale of a group, of the bits that its block and itself have."""
    scale = raw.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    scale = scale * own.to(tl.int32).to(tl.float32)
    return scale


@triton.jit
def operand(value):
    """A value as matrix units take it; as float32 in the interpreter, which does not multiply 16 bits."""
    value = value.to(tl.bfloat16)
    if INTERPRETED:
        value = value.to(tl.float32)
    return value


BK = tl.constexpr(128)
STEPS = tl.constexpr(6)
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
    x_at = x_ptr + (rows.to(tl.int64) * 768)[None, :]

    matrix = w_ptr
    codes = matrix
    scales = (matrix + 12288).to(tl.pointer_type(tl.float16))
    mins = (matrix + 12544).to(tl.pointer_type(tl.float16))
    group_scales = matrix + 12800
    group_mins = matrix + 13568
    row0 = 0 + 1 * first
    acc0 = tl.zeros([BN, BM], tl.float32)
    for step in tl.range(0, STEPS, num_stages=3):  # names its stages: all loads run ahead
        x_k = step * BK + 0 + tl.arange(0, GROUP)[:, None]
        x0 = tl.load(x_at + x_k, mask=in_rows[None, :], other=0.0)
        x_k = step * BK + 32 + tl.arange(0, GROUP)[:, None]
        x1 = tl.load(x_at + x_k, mask=in_rows[None, :], other=0.0)
        x_k = step * BK + 64 + tl.arange(0, GROUP)[:, None]
        x2 = tl.load(x_at + x_k, mask=in_rows[None, :], other=0.0)
        x_k = step * BK + 96 + tl.arange(0, GROUP)[:, None]
        x3 = tl.load(x_at + x_k, mask=in_rows[None, :], other=0.0)
        at = row0 + tile * 1
        of_scales_0_0 = load(
            (matrix + 12288).to(tl.pointer_type(tl.uint32)) + (at * 2 + (step * BK + 0) // 512),
            ((tl.full([BN], step, tl.int32) * BK + 0) // 256 % 2 == 0),
        )
        of_scales_0_1 = load(
            (matrix + 12288).to(tl.pointer_type(tl.uint32)) + (at * 2 + (step * BK + 0) // 512),
            ((tl.full([BN], step, tl.int32) * BK + 0) // 256 % 2 == 1),
        )
        of_mins_0_0 = load(
            (matrix + 12544).to(tl.pointer_type(tl.uint32)) + (at * 2 + (step * BK + 0) // 512),
            ((tl.full([BN], step, tl.int32) * BK + 0) // 256 % 2 == 0),
        )
        of_mins_0_1 = load(
            (matrix + 12544).to(tl.pointer_type(tl.uint32)) + (at * 2 + (step * BK + 0) // 512),
            ((tl.full([BN], step, tl.int32) * BK + 0) // 256 % 2 == 1),
        )
        of_group_scales_0 = load(
            (matrix + 12800).to(tl.pointer_type(tl.uint32)) + (at * 6 + step * 1 + 0),
            None,
        )
        of_group_mins_0 = load(
            (matrix + 13568).to(tl.pointer_type(tl.uint32)) + (at * 6 + step * 1 + 0),
            None,
        )
        column = step * BK + 0
        code = load(
            codes + at[:, None] * (K // 2) + (column // 2 + tl.arange(0, 16)[None, :]),
            None,
        ).to(tl.uint8, bitcast=True).to(tl.int32)
        scale = scale_of(
            (of_scales_0_0 >> 0 & 65535) | (of_scales_0_1 >> 16),
            (of_group_scales_0 >> 0) & 255,
        )[:, None]
        least = ((of_mins_0_0 >> 0 & 65535) | (of_mins_0_1 >> 16)).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)[:, None]
        least *= ((of_group_mins_0 >> 0) & 255).to(tl.int32).to(tl.float32)[:, None]
        level = level_of((code >> 0) & 15)
        v0 = operand(level * scale - least)
        level = level_of((code >> 4) & 15)
        v1 = operand(level * scale - least)
        w0 = tl.reshape(tl.join(v0, v1), (BN, GROUP))
        acc0 = dot(w0, x0, acc0)
        column = step * BK + 32
        code = load(
            codes + at[:, None] * (K // 2) + (column // 2 + tl.arange(0, 16)[None, :]),
            None,
        ).to(tl.uint8, bitcast=True).to(tl.int32)
        scale = scale_of(
            (of_scales_0_0 >> 0 & 65535) | (of_scales_0_1 >> 16),
            (of_group_scales_0 >> 8) & 255,
        )[:, None]
        least = ((of_mins_0_0 >> 0 & 65535) | (of_mins_0_1 >> 16)).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)[:, None]
        least *= ((of_group_mins_0 >> 8) & 255).to(tl.int32).to(tl.float32)[:, None]
        level = level_of((code >> 0) & 15)
        v0 = operand(level * scale - least)
        level = level_of((code >> 4) & 15)
        v1 = operand(level * scale - least)
        w0 = tl.reshape(tl.join(v0, v1), (BN, GROUP))
        acc0 = dot(w0, x1, acc0)
        column = step * BK + 64
        code = load(
            codes + at[:, None] * (K // 2) + (column // 2 + tl.arange(0, 16)[None, :]),
            None,
        ).to(tl.uint8, bitcast=True).to(tl.int32)
        scale = scale_of(
            (of_scales_0_0 >> 0 & 65535) | (of_scales_0_1 >> 16),
            (of_group_scales_0 >> 16) & 255,
        )[:, None]
        least = ((of_mins_0_0 >> 0 & 65535) | (of_mins_0_1 >> 16)).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)[:, None]
        least *= ((of_group_mins_0 >> 16) & 255).to(tl.int32).to(tl.float32)[:, None]
        level = level_of((code >> 0) & 15)
        v0 = operand(level * scale - least)
        level = level_of((code >> 4) & 15)
        v1 = operand(level * scale - least)
        w0 = tl.reshape(tl.join(v0, v1), (BN, GROUP))
        acc0 = dot(w0, x2, acc0)
        column = step * BK + 96
        code = load(
            codes + at[:, None] * (K // 2) + (column // 2 + tl.arange(0, 16)[None, :]),
            None,
        ).to(tl.uint8, bitcast=True).to(tl.int32)
        scale = scale_of(
            (of_scales_0_0 >> 0 & 65535) | (of_scales_0_1 >> 16),
            (of_group_scales_0 >> 24) & 255,
        )[:, None]
        least = ((of_mins_0_0 >> 0 & 65535) | (of_mins_0_1 >> 16)).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)[:, None]
        least *= ((of_group_mins_0 >> 24) & 255).to(tl.int32).to(tl.float32)[:, None]
        level = level_of((code >> 0) & 15)
        v0 = operand(level * scale - least)
        level = level_of((code >> 4) & 15)
        v1 = operand(level * scale - least)
        w0 = tl.reshape(tl.join(v0, v1), (BN, GROUP))
        acc0 = dot(w0, x3, acc0)
    c = cols[:, None]
    r = r[None, :]
    keep = in_rows[None, :] & (c < WIDTH)
    y_at = y_ptr + r.to(tl.int64) * 32 + c
    tl.store(y_at, (acc0).to(y_ptr.dtype.element_ty), mask=keep)

