# linear_rows(x_ptr: *bf16, codes_ptr: *i8, scales_ptr: *fp32, num_rows?: i32)
# grid (1 * ceil(num_tokens / 1), 1, 1), 4 warps, 2 stages
# triton/common.py.jinja


K = tl.constexpr(128)
CHUNK = tl.constexpr(128)


@triton.jit
def linear_rows(x_ptr, codes_ptr, scales_ptr, num_rows):
    """One row: its largest magnitude, then its codes."""
    row = tl.program_id(0)
    x_at = x_ptr + row.to(tl.int64) * 128
    peak = 0.0
    poison = 0.0
    for start in range(0, K, CHUNK):
        k = start + tl.arange(0, CHUNK)
        x = tl.load(x_at + k, mask=k < K, other=0.0).to(tl.float32)
        peak = tl.maximum(peak, tl.max(tl.abs(x), axis=0))
        poison += tl.sum(x * 0.0, axis=0)
    inverse = tl.where((poison == 0.0) & (peak > 1e-30), 127.0 / tl.maximum(peak, 1e-30), 0.0)
    tl.store(scales_ptr + row, tl.where(poison == 0.0, peak / 127.0, float("nan")))
    for start in range(0, K, CHUNK):
        k = start + tl.arange(0, CHUNK)
        x = tl.load(x_at + k, mask=k < K, other=0.0).to(tl.float32)
        codes = tl.floor(tl.where(inverse > 0.0, x * inverse, 0.0) + 0.5)
        tl.store(codes_ptr + row.to(tl.int64) * K + k, codes.to(tl.int8), mask=k < K)
