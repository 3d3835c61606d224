# pointwise(a0_ptr: *bf16, a1_ptr?: *fp32, y0_ptr: *bf16, num_rows?: i32)
# grid (1 * ceil(num_tokens / 32), 1, 1), 4 warps, 2 stages
# triton/common.py.jinja




# triton/math.py.jinja



@triton.jit
def pointwise(a0_ptr, a1_ptr, y0_ptr, num_rows):
    """32 rows x 32 columns of 4 x 6 elements per program."""
    row = (tl.program_id(0).to(tl.int64) * 32 + tl.arange(0, 32))[:, None]
    at = (tl.program_id(1) * 32 + tl.arange(0, 32))[None, :]
    in_rows = row < num_rows
    in_cols = at < 24
    a0 = tl.load(a0_ptr + row * 24 + at // 6 * 6 + at % 6, mask=in_rows & in_cols).to(tl.float32)
    a1 = tl.load(a1_ptr + at % 6, mask=in_cols).to(tl.float32)
    t0 = silu(a0)
    t1 = t0 * a1
    tl.store(y0_ptr + row * 24 + at // 6 * 6 + at % 6, (t1).to(y0_ptr.dtype.element_ty), mask=in_rows & in_cols)
