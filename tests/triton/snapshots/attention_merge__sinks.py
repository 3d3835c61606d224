# attention_merge(sinks_ptr?: *fp32, o_ptr?: *fp32, peaks_ptr: *fp32, totals_ptr: *fp32, partials_ptr: *fp32)
# grid (1 * ceil(num_tokens / 1), 4, 1), 1 warps, 2 stages

# triton/common.py.jinja


SPLITS = tl.constexpr(2)
VALUE_DIM = tl.constexpr(24)


@triton.jit
def attention_merge(sinks_ptr, o_ptr, peaks_ptr, totals_ptr, partials_ptr):
    """One program per token and query head."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.arange(0, 2)
    written = split < SPLITS
    at = (token.to(tl.int64) * 4 + head) * SPLITS + split
    peak = tl.load(peaks_ptr + at, mask=written, other=float("-inf"))
    total = tl.load(totals_ptr + at, mask=written, other=0.0)
    value_dim = tl.arange(0, 32)
    mask = written[:, None] & (value_dim < VALUE_DIM)[None, :]
    acc = tl.load(partials_ptr + at[:, None] * VALUE_DIM + value_dim[None, :], mask=mask, other=0.0)
    top = tl.maximum(tl.max(peak, axis=0), -1e38)  # finite, also where nothing is seen
    sink = tl.load(sinks_ptr + head) * 1.4426950408889634
    top = tl.maximum(top, sink)
    keep = tl.exp2(peak - top)
    whole = tl.sum(total * keep, axis=0) + tl.exp2(sink - top)
    y = tl.sum(acc * keep[:, None], axis=0) / tl.maximum(whole, 1e-30)
    o_ptr += token.to(tl.int64) * 96 + head * VALUE_DIM + value_dim
    tl.store(o_ptr, y.to(o_ptr.dtype.element_ty), mask=value_dim < VALUE_DIM)
