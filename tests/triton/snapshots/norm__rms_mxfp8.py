# norm(x_ptr: *fp32, w_ptr: *fp32, y_ptr: *fp32, codes_ptr: *u8, scales_ptr: *i32)
# grid (1 * ceil(num_tokens / 1), 1, 1), 1 warps, 2 stages

# triton/common.py.jinja



# triton/linear/micro.py.jinja



D = tl.constexpr(96)
PADDED = tl.constexpr(128)


@triton.jit
def normalize(
    x_ptr, w_ptr, y_ptr, codes_ptr, scales_ptr, row, group
):
    """Of one row and group."""
    cols = tl.arange(0, PADDED)
    inside = cols < D
    at = group * D + cols
    x = tl.load(x_ptr + row * 96 + at, mask=inside, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, axis=0) / D + 1e-05)
    y *= tl.load(w_ptr + cols, mask=inside, other=0.0)
    tl.store(y_ptr + row * 96 + at, y.to(y_ptr.dtype.element_ty), mask=inside)
    y = y.to(y_ptr.dtype.element_ty).to(tl.float32)  # the codes are of what is stored
    y = tl.reshape(y, (PADDED // 32, 32))
    group_at = tl.arange(0, PADDED // 32)
    k = group_at[:, None] * 32 + tl.arange(0, 32)[None, :]
    power = power_of(tl.max(magnitude(y), axis=1))
    code = micro_codes(y, power[:, None]).to(tl.uint8, bitcast=True)
    tl.store(codes_ptr + row * 96 + k, code, mask=k < D)
    powers_at = scales_ptr.to(tl.pointer_type(tl.uint8)) + row * 4 + group_at
    tl.store(powers_at, power.to(tl.uint8), mask=group_at < 4)



@triton.jit
def norm(
    x_ptr, w_ptr, y_ptr, codes_ptr, scales_ptr
):
    """One program per row and group of D elements."""
    normalize(
        x_ptr, w_ptr, y_ptr, codes_ptr, scales_ptr, tl.program_id(0).to(tl.int64), tl.program_id(1)
    )
