# norm(x_ptr: *fp32, r_ptr: *fp32, w_ptr: *fp32, y_ptr: *fp32, sum_ptr: *fp32, codes_ptr: *u8, scales_ptr: *fp32)
# grid (1 * ceil(num_tokens / 1), 1, 1), 1 warps, 2 stages

# triton/common.py.jinja




TOP_y = tl.constexpr(448.0)


@triton.jit
def scale_of_y(peak, poison):
    """What peaks are divided by, and what values are multiplied with; `poison` is NaN where a value is not finite."""
    inverse = tl.where((poison == 0.0) & (peak > 1e-30), TOP_y / tl.maximum(peak, 1e-30), 0.0)
    return tl.where(poison == 0.0, peak / TOP_y, float("nan")), inverse


@triton.jit
def codes_of_y(x, inverse):
    """Values as codes; 0 where the largest of all is."""
    scaled = tl.where(inverse > 0.0, x * inverse, 0.0)
    return scaled.to(tl.float8e4nv)


D = tl.constexpr(20)
PADDED = tl.constexpr(32)


@triton.jit
def normalize(
    x_ptr, r_ptr, w_ptr, y_ptr, sum_ptr, codes_ptr, scales_ptr, row, group
):
    """Of one row and group."""
    cols = tl.arange(0, PADDED)
    inside = cols < D
    at = group * D + cols
    x = tl.load(x_ptr + row * 20 + at, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(r_ptr + row * 20 + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(sum_ptr + row * 20 + at, x.to(sum_ptr.dtype.element_ty), mask=inside)
    y = x * tl.rsqrt(tl.sum(x * x, axis=0) / D + 1e-05)
    y *= tl.load(w_ptr + cols, mask=inside, other=0.0)
    tl.store(y_ptr + row * 20 + at, y.to(y_ptr.dtype.element_ty), mask=inside)
    y = y.to(y_ptr.dtype.element_ty).to(tl.float32)  # the codes are of what is stored
    scale, inverse = scale_of_y(tl.max(tl.abs(y), axis=0), tl.sum(y * 0.0, axis=0))
    tl.store(scales_ptr + row, scale)
    tl.store(codes_ptr + row * 20 + cols, codes_of_y(y, inverse).to(tl.uint8, bitcast=True), mask=inside)



@triton.jit
def norm(
    x_ptr, r_ptr, w_ptr, y_ptr, sum_ptr, codes_ptr, scales_ptr
):
    """One program per row and group of D elements."""
    normalize(
        x_ptr, r_ptr, w_ptr, y_ptr, sum_ptr, codes_ptr, scales_ptr, tl.program_id(0).to(tl.int64), tl.program_id(1)
    )
