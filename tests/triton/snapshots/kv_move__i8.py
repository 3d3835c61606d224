# kv_move(kv_ptr: *i8, scales_ptr: *fp32, moves: *i32, num_moves?: i32)
# grid (2 * ceil(num_moves / 1073741824), 1, 1), 4 warps, 2 stages
# triton/common.py.jinja


BLOCK = tl.constexpr(16)
MOVES = tl.constexpr(16)


@triton.jit
def kv_move(kv_ptr, scales_ptr, moves, num_moves):
    """One program per KV head."""
    head = tl.program_id(0)
    for first in range(0, num_moves, MOVES):
        move = first + tl.arange(0, MOVES)
        known = move < num_moves
        source = tl.load(moves + 2 * move, mask=known, other=0)
        target = tl.load(moves + 2 * move + 1, mask=known, other=0)
        page = (source // BLOCK).to(tl.int64)
        at = head * BLOCK + source % BLOCK
        to_page = (target // BLOCK).to(tl.int64)
        to_at = head * BLOCK + target % BLOCK
        d = tl.arange(0, 16)
        key_mask = known[:, None]
        k = tl.load(kv_ptr + (page * 1792 + at * 16)[:, None] + d[None, :], mask=key_mask)
        to_key = (to_page * 1792 + to_at * 16)[:, None] + d[None, :]
        d = tl.arange(0, 32)
        value_mask = known[:, None]
        value_at = page * 1792 + 512 + at * 32
        v = tl.load(kv_ptr + value_at[:, None] + d[None, :], mask=value_mask)
        value_at = to_page * 1792 + 512 + to_at * 32
        to_value = value_at[:, None] + d[None, :]
        scale_at = page * 448 + at
        key_scale = tl.load(scales_ptr + 384 + scale_at, mask=known)
        value_scale = tl.load(scales_ptr + 416 + scale_at, mask=known)
        tl.debug_barrier()  # all of these are read before one of their places is written
        tl.store(kv_ptr + to_key, k, mask=key_mask)
        tl.store(kv_ptr + to_value, v, mask=value_mask)
        scale_at = to_page * 448 + to_at
        tl.store(scales_ptr + 384 + scale_at, key_scale, mask=known)
        tl.store(scales_ptr + 416 + scale_at, value_scale, mask=known)
        tl.debug_barrier()
