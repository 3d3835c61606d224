# reduce_scatter(x_ptr?: *fp32, y_ptr?: *fp32, num_rows?: i32, rank?: i32, first_own?: i32, own_tokens?: i32, own_ptr: *fp32, area0_ptr: *fp32, area1_ptr: *fp32)
# grid (6, 1, 1), 2 warps, 2 stages
# triton/common.py.jinja


BLOCK = tl.constexpr(512)
PIECES = tl.constexpr(64)  # of an area
WORDS, DATA = tl.constexpr(512), tl.constexpr(1152)


@triton.jit
def word(area_ptr, at):
    """The address of a 64-bit word of an area."""
    return area_ptr.to(tl.pointer_type(tl.int64), bitcast=True) + at


@triton.jit
def reduce_scatter(x_ptr, y_ptr, num_rows, rank, first_own, own_tokens, own_ptr, area0_ptr, area1_ptr):
    """y = the ranks' x, own rows alone, added in the order of ranks.

    Each turn, a program leaves a piece of x in the area of its rank, tells the others, waits until they have told it, and
    reads theirs. A piece lies in one of two places in turns: who tells of a turn has read all of the one before.
    """
    program = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    total = num_rows.to(tl.int64) * 96
    begin = first_own.to(tl.int64) * 96
    end = begin + own_tokens.to(tl.int64) * 96
    turn = tl.load(word(own_ptr, WORDS + program))
    side = (turn & 1).to(tl.int32)
    place = DATA + program * 4096
    for first in range(program.to(tl.int64) * BLOCK, total, 3072):
        turn += 1
        side = 1 - side
        slot = place + side * (PIECES * 4096)
        inside = first + at < total
        tl.store(own_ptr + slot + at, tl.load(x_ptr + first + at, mask=inside, other=0.0))
        tl.debug_barrier()  # all of this piece is there, and all of the one before was read, before the others are told
        tl.atomic_xchg(word(area0_ptr, rank * PIECES + program), turn, sem="release", scope="sys")
        tl.atomic_xchg(word(area1_ptr, rank * PIECES + program), turn, sem="release", scope="sys")
        while tl.atomic_add(word(own_ptr, 0 * PIECES + program), 0, sem="acquire", scope="sys") < turn:
            pass
        while tl.atomic_add(word(own_ptr, 1 * PIECES + program), 0, sem="acquire", scope="sys") < turn:
            pass
        tl.debug_barrier()
        own = (first + at >= begin) & (first + at < end)
        sum = tl.load(area0_ptr + slot + at, mask=own, other=0.0, volatile=True)
        sum += tl.load(area1_ptr + slot + at, mask=own, other=0.0, volatile=True)
        tl.store(y_ptr + first + at, sum, mask=own)
    tl.store(word(own_ptr, WORDS + program), turn)
