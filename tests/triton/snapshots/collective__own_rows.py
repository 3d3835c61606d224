# all_gather_rows(x_ptr: *bf16, y_ptr: *bf16, num_rows?: i32, rank?: i32, even_tokens?: i32, own_ptr: *fp32, area0_ptr: *fp32, area1_ptr: *fp32)
# grid (3 * ceil(even_tokens / 1073741824), 1, 1), 2 warps, 2 stages
# triton/common.py.jinja


BLOCK = tl.constexpr(512)
PIECES = tl.constexpr(64)  # of an area
WORDS, DATA = tl.constexpr(512), tl.constexpr(1152)


@triton.jit
def word(area_ptr, at):
    """The address of a 64-bit word of an area."""
    return area_ptr.to(tl.pointer_type(tl.int64), bitcast=True) + at


@triton.jit
def words(ptr):
    """Values as words of 32 bits, whatever they mean."""
    return ptr.to(tl.pointer_type(tl.float32), bitcast=True)


@triton.jit
def all_gather_rows(x_ptr, y_ptr, num_rows, rank, even_tokens, own_ptr, area0_ptr, area1_ptr):
    """y = the ranks' x, each row from the rank whose own it is.

    Each turn, a program leaves a piece of x in the area of its rank, tells the others, waits until they have told it, and
    reads theirs. A piece lies in one of two places in turns: who tells of a turn has read all of the one before.
    """
    program = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    total = num_rows.to(tl.int64) * 48
    even = even_tokens.to(tl.int64) * 48
    x_ptr, y_ptr = words(x_ptr), words(y_ptr)
    turn = tl.load(word(own_ptr, WORDS + program))
    side = (turn & 1).to(tl.int32)
    place = DATA + program * 4096
    for first in range(program.to(tl.int64) * BLOCK, total, 1536):
        turn += 1
        side = 1 - side
        slot = place + side * (PIECES * 4096)
        inside = first + at < total
        owner = tl.minimum((first + at) // even, 1)
        own = inside & (owner == rank)
        tl.store(own_ptr + slot + at, tl.load(x_ptr + first + at, mask=own, other=0.0), mask=own)
        tl.debug_barrier()  # all of this piece is there, and all of the one before was read, before the others are told
        tl.atomic_xchg(word(area0_ptr, rank * PIECES + program), turn, sem="release", scope="sys")
        tl.atomic_xchg(word(area1_ptr, rank * PIECES + program), turn, sem="release", scope="sys")
        while tl.atomic_add(word(own_ptr, 0 * PIECES + program), 0, sem="acquire", scope="sys") < turn:
            pass
        while tl.atomic_add(word(own_ptr, 1 * PIECES + program), 0, sem="acquire", scope="sys") < turn:
            pass
        tl.debug_barrier()
        theirs = inside & (owner == 0) & (rank != 0)
        tl.store(y_ptr + first + at, tl.load(area0_ptr + slot + at, mask=theirs, other=0.0, volatile=True), mask=theirs)
        theirs = inside & (owner == 1) & (rank != 1)
        tl.store(y_ptr + first + at, tl.load(area1_ptr + slot + at, mask=theirs, other=0.0, volatile=True), mask=theirs)
    tl.store(word(own_ptr, WORDS + program), turn)
