# sample_choose(logits_ptr: *fp32, temperature_ptr: *fp32, top_k_ptr: *i32, top_p_ptr: *fp32, min_p_ptr: *fp32, seed_ptr: *i32, counter_ptr: *i32, listed_logits_ptr: *fp32, listed_tokens_ptr: *i32, floors_ptr: *i64, tops_ptr: *fp32, totals_ptr: *fp32, warm_totals_ptr: *fp32, winners_ptr: *i32, token_ptr: *i32, logprob_ptr: *fp32, top_ids_ptr: *i32, top_logprobs_ptr: *fp32)
# grid (1 * ceil(num_logit_rows / 1), 1, 1), 8 warps, 2 stages
# triton/common.py.jinja


VOCAB = tl.constexpr(40000)
PARTS = tl.constexpr(20)  # programs that share the scan of a row
SLOTS = tl.constexpr(32)  # tokens that each of them may list
NONE = tl.constexpr(-(2**63))  # the key of no token


@triton.jit
def sort_down(x, N: tl.constexpr, LEAST: tl.constexpr):
    """x [N] in descending order; Triton's interpreter would sort for seconds. LEAST: no element is less."""
    if INTERPRETED:
        i = tl.arange(0, N)
        before = (x[:, None] > x[None, :]) | ((x[:, None] == x[None, :]) & (i[:, None] < i[None, :]))
        place = tl.sum(before.to(tl.int32), axis=0)
        x = tl.max(tl.where(place[:, None] == i[None, :], x[:, None], LEAST), axis=0)
    else:
        x = tl.sort(x, descending=True)
    return x


@triton.jit
def load_logits(row_ptr, token):
    """Logits of tokens; -inf beyond the vocabulary."""
    return tl.load(row_ptr + token, mask=token < VOCAB, other=float("-inf"))


@triton.jit
def order(x):
    """int64 that compares as the float32 x does (no NaN), both zeros alike."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def pack(x, token):
    """The key of a token: greater for a greater logit, and among equal ones for a lower token."""
    return (order(x) << 32) + (4294967295 - token.to(tl.int64))


@triton.jit
def unpack_logit(key):
    bits = (key >> 32).to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def unpack_token(key):
    return (4294967295 - (key & 4294967295)).to(tl.int32)


@triton.jit
def load_seed(seed_ptr, row):
    """The 64 bits of a request's seed, stored as two int32, low half first."""
    low = tl.load(seed_ptr + 2 * row).to(tl.int64) & 4294967295
    return (tl.load(seed_ptr + 2 * row + 1).to(tl.int64) << 32) | low


@triton.jit
def exponential(bits):
    """-log2(1 - u), an exponential variate from 32 random bits; its relative error is about 1e-6, also for small u."""
    u = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = u * (1.442695 + u * (0.72134752 + u * (0.48089835 + u * (0.36067376 + u * 0.28853901))))
    v = tl.maximum(1 - u, 1e-10).to(tl.int32, bitcast=True)
    exponent = (v - 0x3F3504F3) >> 23  # so that the mantissa is between the roots of 1/2 and 2
    x = (v - (exponent << 23)).to(tl.float32, bitcast=True) - 1
    # log2(1 + x) / x, fitted
    y = 1.4426965 + x * (-0.7213636 + x * (0.48062676 + x * (-0.35937163 + x * (0.29569948 + x * (-0.26932034 + x * 0.17162485)))))
    return tl.where(u < 0.0625, series, -(exponent.to(tl.float32) + x * y))


@triton.jit
def variates(seed, counter, token):
    """The variates of tokens in draw `counter` of a request: four neighbours share one call of Philox (Salmon 2011)."""
    group = token // 4
    a, b, c, d = tl.philox(seed, group, group * 0 + counter, group * 0, group * 0)
    member = token % 4
    return exponential(tl.where(member < 2, tl.where(member == 0, a, b), tl.where(member == 2, c, d)))


LIST = tl.constexpr(1024)
PARTS_PAD = tl.constexpr(32)
TOP = tl.constexpr(20)
BLOCK = tl.constexpr(2048)  # tokens per step of a pass over the row
NEVER = tl.constexpr(2**62)  # a goal beyond all weights
WHOLE = tl.constexpr(2**40)  # weights are counted in integers, so that their sums are exact; this is weight 1
SLACK = tl.constexpr(1 - 2**-22)  # top_p is a float32: sums that should equal the goal must reach it


@triton.jit
def count_weights(below, temperature):
    """Weights relative to the likeliest token's, given how far the logits are below its."""
    return (tl.exp(below / temperature) * WHOLE).to(tl.int64)


@triton.jit
def ahead_of(row_ptr, key, top, temperature):
    """How many tokens of the row have a greater key, and their weight."""
    count = tl.zeros((BLOCK,), tl.int32)
    weight = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, VOCAB, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = load_logits(row_ptr, token)
        more = pack(x, token) > key
        count += more.to(tl.int32)
        weight += tl.where(more, count_weights(x - top, temperature), 0)
    return tl.sum(count, axis=0), tl.sum(weight, axis=0)


@triton.jit
def draw_ahead_of(row_ptr, key, top, temperature, seed, counter):
    """The key that is drawn from the tokens of the row with a key greater than `key`."""
    best = tl.full((BLOCK,), -1.0, tl.float32)
    drawn = tl.full((BLOCK,), NONE, tl.int64)
    for start in range(0, VOCAB, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = load_logits(row_ptr, token)
        packed = pack(x, token)
        score = tl.exp((x - top) / temperature) / variates(seed, counter, token)
        score = tl.where(packed > key, score, -1.0)
        drawn = tl.where(score > best, packed, drawn)
        best = tl.maximum(score, best)
    return tl.max(tl.where(best == tl.max(best, axis=0), drawn, NONE), axis=0)


@triton.jit
def kth_key(row_ptr, k, top, temperature):
    """A key that k tokens of the row, or fewer only if they are ties, have or exceed: the least of the k-th logit."""
    low = order(tl.full((), float("-inf"), tl.float32))
    high = order(top)
    while low < high:  # how many tokens reach `low`: at least k; reach more than `high`: fewer than k
        middle = (low + high + 1) >> 1
        count, _ = ahead_of(row_ptr, (middle << 32) - 1, top, temperature)
        if count >= k:
            low = middle
        else:
            high = middle - 1
    return low << 32


@triton.jit
def draw(key, kept, top, temperature, seed, counter):
    """The key that is drawn from those kept."""
    score = tl.exp((unpack_logit(key) - top) / temperature) / variates(seed, counter, unpack_token(key))
    score = tl.where(kept, score, -1.0)
    return tl.max(tl.where(kept & (score == tl.max(score, axis=0)), key, NONE), axis=0)


@triton.jit
def draw_filtered(row_ptr, key, sure, floor, drawn, total, k, p, min_p, top, temperature, seed, counter):
    """The key that is drawn from those that the filters keep, given that `drawn` was drawn from all of weight `total`.

    key [LIST]: the likeliest tokens in order; sure: those that no unlisted token surpasses. floor NONE: all are listed.
    """
    rank = tl.arange(0, LIST)
    num_sure = tl.sum(sure.to(tl.int32), axis=0)
    below = tl.where(sure, unpack_logit(key) - top, float("-inf"))
    weight = count_weights(below, temperature)
    enough = (k <= num_sure) | (floor == NONE)
    if enough:
        total = tl.sum(tl.where(rank < k, weight, 0), axis=0)
    elif (k < VOCAB) & (p < 1):
        least = kth_key(row_ptr, k, top, temperature)
        count, total = ahead_of(row_ptr, least + 4294967295, top, temperature)
        total += (k - count) * count_weights(unpack_logit(least) - top, temperature)
    goal = tl.where(p < 1, (total.to(tl.float64) * p * SLACK).to(tl.int64), NEVER)
    kept = (rank < k) & (tl.cumsum(weight, axis=0) - weight < goal) & (tl.exp(below / temperature) >= min_p)
    kept = sure & (kept | (rank == 0))
    if enough | (tl.sum(kept.to(tl.int32), axis=0) < num_sure):
        drawn = draw(key, kept, top, temperature, seed, counter)
    else:
        undecided = True
        while undecided:
            count, before = ahead_of(row_ptr, drawn, top, temperature)
            own = tl.exp((unpack_logit(drawn) - top) / temperature)
            undecided = (count > 0) & ((count >= k) | (before >= goal) | (own < min_p))
            if undecided:
                drawn = draw_ahead_of(row_ptr, drawn, top, temperature, seed, counter)
    return drawn


@triton.jit
def sample_choose(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, counter_ptr,
    listed_logits_ptr, listed_tokens_ptr, floors_ptr, tops_ptr, totals_ptr, warm_totals_ptr, winners_ptr,
    token_ptr, logprob_ptr, top_ids_ptr, top_logprobs_ptr
):
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * 40064
    part = tl.arange(0, PARTS_PAD)
    at = row * PARTS + part
    there = part < PARTS
    tops = tl.load(tops_ptr + at, mask=there, other=float("-inf"))
    winners = tl.load(winners_ptr + at, mask=there, other=-1)
    top = tl.max(tops, axis=0)
    number = (top > float("-inf")) & (top < float("inf")) & (tl.min(winners, axis=0) > -2)
    top = tl.where(number, top, 0.0)
    below = tl.where(number, tops - top, 0.0)
    log_total = top + tl.log(tl.sum(tl.load(totals_ptr + at, mask=there, other=0.0) * tl.exp(below), axis=0))

    rank = tl.arange(0, LIST)
    at_list = row * (PARTS * SLOTS) + rank
    logit = tl.load(listed_logits_ptr + at_list, mask=rank < PARTS * SLOTS, other=float("-inf"))
    listed = logit > float("-inf")
    key = tl.where(listed, pack(logit, tl.load(listed_tokens_ptr + at_list, mask=listed, other=0)), NONE)
    key = sort_down(key, LIST, NONE)
    listed = key > NONE
    logit = unpack_logit(key)
    likely = rank < TOP
    tl.store(top_ids_ptr + row * TOP + rank, tl.where(listed, unpack_token(key), -1), mask=likely)
    tl.store(top_logprobs_ptr + row * TOP + rank, tl.where(listed, logit - log_total, float("-inf")), mask=likely)

    drawn = tl.max(key, axis=0)
    temperature = tl.load(temperature_ptr + row)
    if (temperature > 0) & number:
        seed = load_seed(seed_ptr, row)
        counter = tl.load(counter_ptr + row)
        k = tl.load(top_k_ptr + row)
        k = tl.where(k > 0, tl.minimum(k, VOCAB), VOCAB)
        p = tl.load(top_p_ptr + row)
        min_p = tl.load(min_p_ptr + row)
        winner = pack(load_logits(row_ptr, tl.where(winners >= 0, winners, VOCAB)), winners)
        drawn = draw(winner, winners >= 0, top, temperature, seed, counter)
        if (k < VOCAB) | (p < 1) | (min_p > 0):
            floor = tl.max(tl.load(floors_ptr + at, mask=there, other=NONE), axis=0)
            warm = tl.load(warm_totals_ptr + at, mask=there, other=0.0) * tl.exp(below / temperature)
            total = (tl.sum(warm, axis=0) * WHOLE).to(tl.int64)
            drawn = draw_filtered(
                row_ptr, key, listed & (key >= floor), floor, drawn, total, k, p, min_p, top, temperature, seed, counter
            )

    nan = float("nan")
    tl.store(token_ptr + row, tl.where(number, unpack_token(drawn), -1))
    tl.store(logprob_ptr + row, tl.where(number, unpack_logit(drawn) - log_total, nan))
