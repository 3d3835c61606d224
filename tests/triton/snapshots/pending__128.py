# pending(token_ptr: *i32, sampled_ptr: *i32, num_tokens?: i32)
# grid (1 * ceil(num_tokens / 128), 1, 1), 1 warps, 2 stages
# triton/common.py.jinja


BLOCK = tl.constexpr(128)


@triton.jit
def pending(token_ptr, sampled_ptr, num_tokens):
    """Replaces token id -1 - r by what the step before sampled from its row r (no token, -1, becomes token 0)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_tokens
    token = tl.load(token_ptr + at, mask=inside, other=0)
    waits = inside & (token < 0)
    sampled = tl.load(sampled_ptr + (-1 - token), mask=waits, other=0)
    tl.store(token_ptr + at, tl.maximum(sampled, 0), mask=waits)
