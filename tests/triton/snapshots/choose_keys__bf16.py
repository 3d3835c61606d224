# choose_keys(scores_ptr: *fp32, o_ptr: *bf16, positions: *i32)
# grid (1 * ceil(num_tokens / 1), 1, 1), 4 warps, 2 stages
# triton/common.py.jinja

# triton/order.py.jinja


COUNT = tl.constexpr(8)
WIDTH = tl.constexpr(256)
LEFT_OUT = tl.constexpr(-30000.0)
CHUNK = tl.constexpr(1024)  # scores per step of a pass over them


@triton.jit
def load_keys(row_ptr, start, position):
    """Sortable integers of the scores of CHUNK keys from `start` on, of keys that are none LOWEST; what is no number is minus infinity."""
    column = position - start - tl.arange(0, CHUNK)
    there = (column >= 0) & (column < WIDTH)
    x = tl.load(row_ptr + column, mask=there, other=0.0)
    return tl.where(there, key_of(tl.where(x == x, x, float("-inf"))), LOWEST), column, there


@triton.jit
def choose_keys(scores_ptr, o_ptr, positions):
    """One program per token: the COUNT-th best score by halving, then one pass that compares with it."""
    at = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + at)
    row_ptr = scores_ptr + at * WIDTH
    to_ptr = o_ptr + at * 256
    low = tl.full((), LOWEST + 1, tl.int64)  # at least COUNT keys reach `low`, and fewer reach what is above `high`
    high = tl.full((), 0x7FFFFFFF, tl.int64)
    if position < COUNT:
        high = low
    while low < high:
        middle = (low + high + 1) >> 1
        reach = tl.zeros((CHUNK,), tl.int32)
        for start in range(0, position + 1, CHUNK):
            key, _, _ = load_keys(row_ptr, start, position)
            reach += (key >= middle).to(tl.int32)
        if tl.sum(reach, axis=0) >= COUNT:
            low = middle
        else:
            high = middle - 1
    spare: tl.int32 = COUNT  # how many of the keys that equal `low` are chosen
    if position >= COUNT:
        above = tl.zeros((CHUNK,), tl.int32)
        for start in range(0, position + 1, CHUNK):
            key, _, _ = load_keys(row_ptr, start, position)
            above += (key > low).to(tl.int32)
        spare = COUNT - tl.sum(above, axis=0)
    for start in range(0, position + 1, CHUNK):
        key, column, there = load_keys(row_ptr, start, position)
        equal = (key == low).to(tl.int32)
        chosen = (key > low) | ((equal != 0) & (tl.cumsum(equal, axis=0) <= spare)) | (position < COUNT)
        spare -= tl.sum(equal, axis=0)
        tl.store(to_ptr + column, tl.where(chosen, 0.0, LEFT_OUT).to(o_ptr.dtype.element_ty), mask=there)
