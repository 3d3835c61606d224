// Causal attention of the step's queries to the paged cache: 4 query heads, 2 KV heads, 16 -> 24 dims,
// i8 cache in blocks of 16. in: q (rows 64 apart), cos, sin, sinks, alibi; out: o (rows 96 apart).
// Work items are (sequence, tile of 9 tokens, KV head), taken from a counter; when they are few and the context is
// long, the segments of the context become items too and are merged after a barrier; of a step of decodes whose query
// heads share a latent, so do some of these heads, as far as threads would else have nothing to do. See attention.h.
// Params: AttentionParams.
struct k0_attention_shape {
    typedef int8_t T;
    static constexpr int KD = 16, VD = 24, HEADS = 2, GROUP = 2, BLOCK = 16;
    static constexpr int WINDOW = 20, CHUNK = 32, FRONT = 0, AHEAD = 0, BIAS = 0, ROW_BIAS = 0, LATER = 0, KEY_BIAS = 0, KEY_LATER = 0, KEY_APART = 0, TILE = 9;
    static constexpr float SOFTCAP = 5.0f;
    static constexpr bool SHARED = false;
    static constexpr bool ALIBI = true;
    static constexpr int WIDTH = (VD + 15) / 16 * 16;

    // Only the first rows fetch, and only where `fetch` says so: see the micro-kernels.
    template <class Work> static void qk(Work& w, int r, int rows, const Chunk<T>& chunk, bool fetch) {
        const int end = r + rows;
        for (; r + 6 <= end; r += 6, fetch = false) {
            if (fetch) qk_i8_m6_v1<true, KD, VD>(w, r, chunk);
            else qk_i8_m6_v1<false, KD, VD>(w, r, chunk);
        }
        for (; r + 4 <= end; r += 4, fetch = false) {
            if (fetch) qk_i8_m4_v1<true, KD, VD>(w, r, chunk);
            else qk_i8_m4_v1<false, KD, VD>(w, r, chunk);
        }
        for (; r + 3 <= end; r += 3, fetch = false) {
            if (fetch) qk_i8_m3_v1<true, KD, VD>(w, r, chunk);
            else qk_i8_m3_v1<false, KD, VD>(w, r, chunk);
        }
        for (; r + 2 <= end; r += 2, fetch = false) {
            if (fetch) qk_i8_m2_v2<true, KD, VD>(w, r, chunk);
            else qk_i8_m2_v2<false, KD, VD>(w, r, chunk);
        }
        for (; r + 1 <= end; r += 1, fetch = false) {
            if (fetch) qk_i8_m1_v4<true, KD, VD>(w, r, chunk);
            else qk_i8_m1_v4<false, KD, VD>(w, r, chunk);
        }
    }
    template <class Work> static void pv(Work& w, int r, int rows, const Chunk<T>& chunk, bool fetch) {
        const int end = r + rows;
        for (; r + 6 <= end; r += 6, fetch = false) {
            if (fetch) pv_i8_m6_v1<KD, VD, WIDTH>(w, r, 0, chunk);
            else pv_i8_m6_v1<0, VD, WIDTH>(w, r, 0, chunk);
            pv_i8_m6_v1_l8<0, VD, WIDTH>(w, r, 16, chunk);
        }
        for (; r + 4 <= end; r += 4, fetch = false) {
            if (fetch) pv_i8_m4_v1<KD, VD, WIDTH>(w, r, 0, chunk);
            else pv_i8_m4_v1<0, VD, WIDTH>(w, r, 0, chunk);
            pv_i8_m4_v1_l8<0, VD, WIDTH>(w, r, 16, chunk);
        }
        for (; r + 3 <= end; r += 3, fetch = false) {
            if (fetch) pv_i8_m3_v1<KD, VD, WIDTH>(w, r, 0, chunk);
            else pv_i8_m3_v1<0, VD, WIDTH>(w, r, 0, chunk);
            pv_i8_m3_v1_l8<0, VD, WIDTH>(w, r, 16, chunk);
        }
        for (; r + 2 <= end; r += 2, fetch = false) {
            if (fetch) pv_i8_m2_v2_l8<KD, VD, WIDTH>(w, r, 0, chunk);
            else pv_i8_m2_v2_l8<0, VD, WIDTH>(w, r, 0, chunk);
        }
        for (; r + 1 <= end; r += 1, fetch = false) {
            if (fetch) pv_i8_m1_v2_l8<KD, VD, WIDTH>(w, r, 0, chunk);
            else pv_i8_m1_v2_l8<0, VD, WIDTH>(w, r, 0, chunk);
        }
    }
};

static void k0_attention(const Ctx& c) {
    typedef k0_attention_shape S;
    typedef AttentionTile<S> Tile;
    constexpr int HEADS = S::HEADS, GROUP = S::GROUP, ROWS = Tile::ROWS;
    constexpr int64_t PARTIALS = ICC_SHARED_BYTES / (int64_t)sizeof(typename Tile::State) / ROWS;
    static_assert(sizeof(typename Tile::Work) + ROWS * sizeof(typename Tile::State) <= ICC_SCRATCH_BYTES, "scratch");
    const icc_batch& b = *c.batch;
    auto& w = *(typename Tile::Work*)c.scratch;
    const float* sinks = c.input<const float>(3);
    const float* slopes = c.input<const float>(4);
    const float* bias = nullptr;
    int64_t items = 0;
    int longest = 0;
    bool ones = true;  // whether no sequence has more than one token
    for (int s = 0; s < b.num_seqs; ++s) {
        const int length = b.seq_starts[s + 1] - b.seq_starts[s];
        items += (int64_t)((length + S::TILE - 1) / S::TILE) * HEADS, ones = ones && length <= 1;
        const int context = b.context_lens[s];
        if (context > longest) longest = context;
    }
    const int64_t lead = S::FRONT > 0, splits = lead + (longest + SEGMENT - 1) / SEGMENT;
    const int64_t most = items * splits * (S::SHARED ? (GROUP + 3) / 4 : 1);  // partial tiles, at most
    const bool split = c.threads > 1 && splits > lead + 1 && items < 4 * c.threads && most <= PARTIALS;
    const int64_t idle = S::SHARED && ones && items ? c.threads / (split ? items * splits : items) : 1;  // threads per item
    const int per = idle > 1 ? (int)((GROUP + idle - 1) / idle + 3) / 4 * 4 : GROUP;  // query heads of an item of one token
    const int parts = (GROUP + per - 1) / per;
    auto* partials = (typename Tile::State*)c.shared;

    // Where item `i` lies; the search goes on from the last sequence, as most items ascend.
    int seq = 0;
    int64_t seq_items = 0;  // items before `seq`
    struct Place { int seq, token, tokens, head, first, rows; };  // rows from `first` on of the tile's
    const auto locate = [&](int64_t i) {
        const int first = (int)(i % parts) * per;
        i /= parts;
        if (i < seq_items) seq = 0, seq_items = 0;
        for (;;) {
            const int length = b.seq_starts[seq + 1] - b.seq_starts[seq];
            const int64_t here = (int64_t)((length + S::TILE - 1) / S::TILE) * HEADS;
            if (i < seq_items + here) {
                const int tile = (int)((i - seq_items) / HEADS), begin = tile * S::TILE;
                const int count = length - begin < S::TILE ? length - begin : S::TILE;
                const int rows = parts == 1 ? count * GROUP : GROUP - first < per ? GROUP - first : per;
                return Place{seq, b.seq_starts[seq] + begin, count, (int)((i - seq_items) % HEADS), first, rows};
            }
            seq_items += here, ++seq;
        }
    };
    const auto load_queries = [&](const Place& at, bool front) {
        for (int r = 0; r < at.rows; ++r) {
            const int64_t t = at.token + r / GROUP;
            const float* q = c.input<const float>(0) + t * 64 + (at.head * GROUP + at.first + r % GROUP) * S::KD;
            alignas(64) float x[S::KD];
            memcpy(x, q, sizeof x);
            const int at_position = b.positions[t];
            const int64_t turn = clamp_row(at_position, 64) * 8;
            rotate_head<8, true>(x, c.input<const float>(1) + turn, c.input<const float>(2) + turn);
            for (int d = 0; d < S::KD; ++d) x[d] *= 0.25f;
            w.set_query(r, x);
        }
    };
    // Where the tokens of a tile are in what it sees, and how much there is.
    const auto places_of = [&](const Place& at) { return b.positions + at.token; };
    const auto context_of = [&](int seq) { return b.context_lens[seq]; };
    const auto keys_of = [&](const Place& at, int& low, int& high) {  // what the rows of the tile see together
        low = INT_MAX, high = 0;
        const int32_t* places = places_of(at);
        for (int i = 0; i < at.tokens; ++i) {
            const int first = Tile::first_key(places[i]), last = Tile::last_key(places[i], context_of(at.seq));
            if (first < low) low = first;
            if (last + 1 > high) high = last + 1;
        }
    };
    // Part -1 are the first tokens, to which queries have other distances than they have positions: load_queries(.., true).
    const auto run_segment = [&](const Place& at, int part) {
        int low, high;
        keys_of(at, low, high);
        const bool front = part < 0;
        const int from = front ? 0 : part * SEGMENT > low ? part * SEGMENT : low;
        const int to = front ? Tile::last_front(high - 1) + 1 : (part + 1) * SEGMENT < high ? (part + 1) * SEGMENT : high;
        const int root = b.seq_starts[at.seq];
        const bool tree = b.parents && root + 1 < b.seq_starts[at.seq + 1] && b.parents[root + 1] >= 0;
        Tile::segment(w, c, b.block_tables + (int64_t)at.seq * b.max_blocks, at.head, at.rows, at.token,
                      places_of(at), tree ? b.positions[root] : INT_MAX, context_of(at.seq), from, to,
                      slopes ? slopes + at.head * GROUP + at.first : nullptr,
                      bias ? bias + (int64_t)(at.head * GROUP + at.first) * S::BIAS : nullptr, front);
    };
    const auto write = [&](const Place& at, int r, typename Tile::State& state) {
        const int head = at.head * GROUP + at.first + r % GROUP;
        Tile::finish(state, sinks ? sinks + head : nullptr,
                     c.output<float>(0) + (int64_t)(at.token + r / GROUP) * 96 + head * S::VD);
    };

    if (!split) {
        Items taken(c, items * parts);
        for (int64_t i; taken.take(i);) {
            const Place at = locate(i);
            const int rows = at.rows;
            int low, high;
            keys_of(at, low, high);
            typename Tile::State* states = (typename Tile::State*)(c.scratch + sizeof(typename Tile::Work));
            for (int r = 0; r < rows; ++r) Tile::begin(states[r]);
            const auto add = [&](int part) {
                run_segment(at, part);
                for (int r = 0; r < rows; ++r) Tile::merge(states[r], w.peak[r], hsum(vload(w.sum[r])), w.o + r * S::WIDTH);
            };
            load_queries(at, false);
            for (int part = low / SEGMENT; part * SEGMENT < high; ++part) add(part);
            for (int r = 0; r < rows; ++r) write(at, r, states[r]);
        }
    } else {
        Items taken(c, items * parts * splits);
        for (int64_t i; taken.take(i);) {
            const Place at = locate(i / splits);
            const int part = (int)(i % splits - lead);
            load_queries(at, part < 0);
            run_segment(at, part);
            for (int r = 0; r < at.rows; ++r) {
                typename Tile::State& state = partials[i * ROWS + r];
                state.peak = w.peak[r], state.sum = hsum(vload(w.sum[r]));
                memcpy(state.o, w.o + r * S::WIDTH, sizeof state.o);
            }
        }
        c.barrier->wait(c.tid);
        const Range own = share(c, items * parts);
        for (int64_t i = own.begin; i < own.end; ++i) {
            const Place at = locate(i);
            for (int r = 0; r < at.rows; ++r) {
                typename Tile::State state;
                Tile::begin(state);
                for (int64_t part = 0; part < splits; ++part) {
                    const typename Tile::State& x = partials[(i * splits + part) * ROWS + r];
                    Tile::merge(state, x.peak, x.sum, x.o);
                }
                write(at, r, state);
            }
        }
    }
}
