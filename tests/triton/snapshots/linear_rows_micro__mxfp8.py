# linear_rows(x_ptr: *bf16, codes_ptr: *u8, scales_ptr: *i32, num_rows?: i32)
# grid (1 * ceil(num_tokens / 1), 1, 1), 4 warps, 2 stages
# triton/common.py.jinja


K = tl.constexpr(96)
LANES = tl.constexpr(128)
WORDS = tl.constexpr(1)


# triton/linear/micro.py.jinja



@triton.jit
def linear_rows(x_ptr, codes_ptr, scales_ptr, num_rows):
    """One row."""
    row = tl.program_id(0)
    x_at = x_ptr + row.to(tl.int64) * 96
    codes_at = codes_ptr + row.to(tl.int64) * K
    powers_at = scales_ptr.to(tl.pointer_type(tl.uint8)) + row.to(tl.int64) * (4 * WORDS)
    group = tl.arange(0, LANES // 32)
    for start in range(0, K, LANES):
        k = start + group[:, None] * 32 + tl.arange(0, 32)[None, :]
        x = tl.load(x_at + k, mask=k < K, other=0.0).to(tl.float32)
        power = power_of(tl.max(magnitude(x), axis=1))
        tl.store(codes_at + k, micro_codes(x, power[:, None]).to(tl.uint8, bitcast=True), mask=k < K)
        tl.store(powers_at + start // 32 + group, power.to(tl.uint8), mask=start // 32 + group < 4 * WORDS)
