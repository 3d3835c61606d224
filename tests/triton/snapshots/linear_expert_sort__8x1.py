# expert_place(index_ptr: *i32, counts_ptr: *i32, slots_ptr: *i32, experts_ptr: *i32, num_rows?: i32)
# grid (9, 1, 1), 4 warps, 2 stages
# triton/common.py.jinja


EXPERTS = tl.constexpr(8)
BM = tl.constexpr(16)
CHUNK = tl.constexpr(1024)


@triton.jit
def hits(index_ptr, start, num_slots, bucket):
    """Which of CHUNK slots belong to a bucket, as 0 and 1."""
    at = start + tl.arange(0, CHUNK)
    expert = tl.load(index_ptr + at, mask=at < num_slots, other=0)
    expert = tl.where((expert >= 0) & (expert < EXPERTS), expert, EXPERTS)
    return ((expert == bucket) & (at < num_slots)).to(tl.int32)


@triton.jit
def expert_count(index_ptr, counts_ptr, num_rows):
    """counts[bucket], one bucket per program."""
    bucket = tl.program_id(0)
    num_slots = num_rows * 1
    found = tl.zeros([CHUNK], tl.int32)
    for start in range(0, num_slots, CHUNK):
        found += hits(index_ptr, start, num_slots, bucket)
    tl.store(counts_ptr + bucket, tl.sum(found, axis=0))


@triton.jit
def expert_place(index_ptr, counts_ptr, slots_ptr, experts_ptr, num_rows):
    """The blocks of one bucket; the last bucket also marks the blocks that nobody uses."""
    bucket = tl.program_id(0)
    num_slots = num_rows * 1
    buckets = tl.arange(0, 16)
    counts = tl.load(counts_ptr + buckets, mask=buckets <= EXPERTS, other=0)
    blocks = (counts + BM - 1) // BM
    first = tl.sum(tl.where(buckets < bucket, blocks, 0), axis=0)
    used = tl.sum(tl.where(buckets == bucket, blocks, 0), axis=0)
    count = tl.sum(tl.where(buckets == bucket, counts, 0), axis=0)
    for block in range(0, used):
        tl.store(experts_ptr + first + block, bucket)
    if bucket == EXPERTS:
        for block in range(first + used, ((num_rows + 15) // 16 * 1 + 9)):
            tl.store(experts_ptr + block, -1)
    rest = count + tl.arange(0, BM)
    tl.store(slots_ptr + first * BM + rest, tl.full([BM], -1, tl.int32), mask=rest < used * BM)
    seen = first * BM
    for start in range(0, num_slots, CHUNK):
        hit = hits(index_ptr, start, num_slots, bucket)
        place = seen + tl.cumsum(hit, axis=0) - hit
        tl.store(slots_ptr + place, start + tl.arange(0, CHUNK), mask=hit > 0)
        seen += tl.sum(hit, axis=0)
