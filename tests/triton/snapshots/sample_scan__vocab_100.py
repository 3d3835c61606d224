# sample_scan(logits_ptr: *fp32, temperature_ptr: *fp32, seed_ptr: *i32, counter_ptr: *i32, listed_logits_ptr: *fp32, listed_tokens_ptr: *i32, floors_ptr: *i64, tops_ptr: *fp32, totals_ptr: *fp32, warm_totals_ptr: *fp32, winners_ptr: *i32)
# grid (1, 1 * ceil(num_logit_rows / 1), 1), 1 warps, 2 stages
# triton/common.py.jinja


VOCAB = tl.constexpr(100)
PARTS = tl.constexpr(1)  # programs that share the scan of a row
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


CHUNK = tl.constexpr(128)
RUN = tl.constexpr(128)
GROUPS = tl.constexpr(128)
LISTED = tl.constexpr(20)  # tokens that are listed at least, if there are as many


@triton.jit
def sample_scan(
    logits_ptr, temperature_ptr, seed_ptr, counter_ptr,
    listed_logits_ptr, listed_tokens_ptr, floors_ptr, tops_ptr, totals_ptr, warm_totals_ptr, winners_ptr
):
    part = tl.program_id(0)
    row = tl.program_id(1)
    at = row * PARTS + part
    j = tl.arange(0, CHUNK)
    token = (j // RUN * PARTS + part) * RUN + j % RUN
    x = load_logits(logits_ptr + row.to(tl.int64) * 100, token)
    top = tl.max(x, axis=0)
    below = (x - tl.where(top > float("-inf"), top, 0.0)) * 1.4426950408889634
    total = tl.sum(tl.exp2(below), axis=0)
    tl.store(tops_ptr + at, top)
    tl.store(totals_ptr + at, total)

    temperature = tl.load(temperature_ptr + row)
    winner = -1
    if (temperature > 0) & (top > float("-inf")):
        weight = tl.exp2(below * (1 / temperature))
        tl.store(warm_totals_ptr + at, tl.sum(weight, axis=0))
        i = tl.arange(0, CHUNK // 4) * 4  # `variates`, but each call of Philox serves four tokens
        group = ((i // RUN * PARTS + part) * RUN + i % RUN) // 4
        zero = group * 0
        a, b, c, d = tl.philox(load_seed(seed_ptr, row), group, zero + tl.load(counter_ptr + row), zero, zero)
        bits = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
        score = weight / exponential(bits)
        best = tl.min(tl.where(score == tl.max(score, axis=0), j, CHUNK), axis=0)
        winner = (best // RUN * PARTS + part) * RUN + best % RUN
    else:
        tl.store(warm_totals_ptr + at, 0.0)
    tl.store(winners_ptr + at, tl.where(total == total, winner, -2))

    # the LISTED greatest are among those that reach the LISTED-th greatest of the groups' maxima
    maxima = tl.max(tl.reshape(x, (GROUPS, CHUNK // GROUPS), can_reorder=True), axis=1)
    maxima = sort_down(maxima, GROUPS, float("-inf"))
    limit = tl.max(tl.where(tl.arange(0, GROUPS) == LISTED - 1, maxima, float("-inf")), axis=0)
    listed = (x >= limit) & (x > float("-inf"))
    count = tl.sum(listed.to(tl.int32), axis=0)
    slot = tl.arange(0, SLOTS)
    logits_to = listed_logits_ptr + at * SLOTS
    tokens_to = listed_tokens_ptr + at * SLOTS
    if count <= SLOTS:
        place = tl.cumsum(listed.to(tl.int32), axis=0) - 1
        tl.store(logits_to + place, x, mask=listed)
        tl.store(tokens_to + place, token, mask=listed)
        tl.store(logits_to + slot, float("-inf"), mask=slot >= count)
        tl.store(floors_ptr + at, tl.where(limit > float("-inf"), order(limit) << 32, NONE))
    else:  # many ties: one after the other
        key = tl.where(x > float("-inf"), pack(x, token), NONE)
        found = tl.full((SLOTS,), NONE, tl.int64)
        for i in tl.range(LISTED):
            best = tl.max(key, axis=0)
            found = tl.where(slot == i, best, found)
            tl.store(floors_ptr + at, best)
            key = tl.where(key == best, NONE, key)
        tl.store(logits_to + slot, tl.where(found > NONE, unpack_logit(found), float("-inf")))
        tl.store(tokens_to + slot, unpack_token(found))
