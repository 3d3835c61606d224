# linear_rows(x_ptr: *fp16, codes_ptr: *u8, scales_ptr: *fp32, num_rows?: i32)
# grid (1 * ceil(num_tokens / 1), 1, 1), 4 warps, 2 stages
# triton/common.py.jinja


K = tl.constexpr(256)
LANES = tl.constexpr(256)

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
def linear_rows(x_ptr, codes_ptr, scales_ptr, num_rows):
    """One row."""
    row = tl.program_id(0)
    x_at = x_ptr + row.to(tl.int64) * 256
    codes_at = codes_ptr + row.to(tl.int64) * K
    k = tl.arange(0, LANES)
    x = tl.load(x_at + k, mask=k < K, other=0.0).to(tl.float32)
    scale, inverse = scale_of(tl.max(tl.abs(x), axis=0), tl.sum(x * 0.0, axis=0))
    tl.store(scales_ptr + row, scale)
    tl.store(codes_at + k, codes_of(x, inverse).to(tl.uint8, bitcast=True), mask=k < K)
