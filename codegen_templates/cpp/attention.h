// Paged attention for a tile of query rows: online softmax over chunks of 64 keys, merged over segments.
//
// Chunks and segments start at multiples of their length in absolute key positions. A row starts afresh in every
// segment and the segments are merged in order, so a long context can be split over threads without changing a bit,
// and a row's bits depend on its own position only. Keys and values are read where they lie. Codes of integers are
// multiplied as such: by queries and by weights of 16 bits, each row of them with a scale of its own (weights in every
// chunk), while the scales of keys multiply the scores and those of values the weights. Centres of keys count as often as a
// query sums up to, those of values as the weights say. The generated kernel gives the
// shape as a traits class S:
//   T, KD, VD, SHARED (values are the first dims of keys), HEADS (kv), GROUP (query heads per kv head), BLOCK (a multiple of 16), WINDOW, CHUNK, AHEAD (later keys
//   that are seen, ALL_AHEAD for all), FRONT (tokens that are seen beside the window), BIAS (columns of a bias by distance, or 0), ROW_BIAS (the same of a query's own), LATER (of these, for later keys), KEY_BIAS, KEY_LATER (the same of keys, whose rows are KEY_APART), SOFTCAP, TILE (tokens per tile), qk(rows, r, n, chunk, fetch): scores of rows [r, r + n) in a chunk, pv(...): adds a chunk's values.
#pragma once
#include "kv.h"

constexpr int KEYS = 64;         // keys of one chunk
constexpr int LANES = KEYS / 16; // vectors of them
constexpr int SEGMENT = 1024;    // keys of one segment
constexpr int ALL_AHEAD = -1;

// A chunk: its keys and values by sixteen, with their scales if they have any, and what a product fetches meanwhile.
template <class T> struct Chunk {
    const T *k[LANES], *v[LANES];
    const ScaleOf<T> *k_scale[LANES], *v_scale[LANES], *k_centre[LANES], *v_centre[LANES];
    int low, high;      // the keys that some row sees
    const T *next_k[LANES], *next_v[LANES];  // the keys and values of the chunk after this, to be fetched
};

// The rows of a tile: queries, the scores or weights of one chunk, and sums so far.
template <class T, bool INTEGER, int ROWS, int KD, int WIDTH> struct Rows {
    float q[ROWS * KD], s[ROWS * KEYS], o[ROWS * WIDTH], peak[ROWS], sum[ROWS][16];

    void set_query(int r, const float* x) { memcpy(q + r * KD, x, sizeof(float) * KD); }
    // The weights e of sixteen keys each, of which `seen` are seen.
    void set_weights(int r, const VF* e, const VB* seen, const Chunk<T>& chunk) {
        for (int u = 0; u < LANES; ++u) {
            VF w = e[u];
            if (is_scaled<T>()) w = w * vload(chunk.v_scale[u]);
            if (is_scaled<T>() && seen) w = select(seen[u], w, vf(0.0f));
            vstore(s + r * KEYS + 16 * u, w);
        }
    }
};
template <class T, int ROWS, int KD, int WIDTH> struct Rows<T, true, ROWS, KD, WIDTH> {
    static constexpr int PADDED = (KD + 1) / 2 * 2;
    static constexpr int LARGEST = 2147483647 / (127 * PADDED) < 32767 ? 2147483647 / (127 * PADDED) : 32767;
    float s[ROWS * KEYS], o[ROWS * WIDTH], peak[ROWS], sum[ROWS][16], q_scale[ROWS], p_scale[ROWS], q_sum[ROWS];
    int16_t q[ROWS * PADDED], p[ROWS * KEYS];

    void set_query(int r, const float* x) {
        float top = 0.0f, poison = 0.0f, total = 0.0f;
        for (int d = 0; d < KD; ++d) top = fabsf(x[d]) > top ? fabsf(x[d]) : top, poison += x[d] * 0.0f, total += x[d];
        const float inverse = poison == 0.0f && top > 1e-30f ? LARGEST / top : 0.0f;
        for (int d = 0; d < PADDED; ++d) q[r * PADDED + d] = d < KD ? (int16_t)lrintf(x[d] * inverse) : (int16_t)0;
        q_scale[r] = poison == 0.0f ? top / LARGEST : NAN;
        q_sum[r] = total;
    }
    void set_weights(int r, const VF* e, const VB* seen, const Chunk<T>& chunk) {
        constexpr bool CENTRED = Cell<T>::PER > 1;
        VF w[LANES], top = vf(0.0f), poison = vload(sum[r]), shift = vf(0.0f);
        for (int u = 0; u < LANES; ++u) {
            w[u] = e[u] * vload(chunk.v_scale[u]);
            if (seen) w[u] = select(seen[u], w[u], vf(0.0f));
            if constexpr (CENTRED) {
                const VF more = e[u] * vload(chunk.v_centre[u]);
                shift = shift + (seen ? select(seen[u], more, vf(0.0f)) : more);
            }
            top = max_raw(top, w[u]);
            poison = fma(w[u], vf(0.0f), poison);  // a value that is no number makes the row's sum none
        }
        vstore(sum[r], poison);
        if (CENTRED) {
            const VF all = vf(hsum(shift));
            for (int d = 0; d < WIDTH; d += 16) vstore(o + r * WIDTH + d, vload(o + r * WIDTH + d) + all);
        }
        const float largest = hmax(top);
        const VF inverse = vf(largest > 1e-30f ? 32767.0f / largest : 0.0f);
        for (int u = 0; u < LANES; ++u) store_i16(p + r * KEYS + 16 * u, to_int_nearest(w[u] * inverse));
        p_scale[r] = largest > 1e-30f ? largest / 32767.0f : 0.0f;
    }
};

// y[j][d] = x[d][j] of sixteen j and n dims d, rows of y being n apart.
template <class T> static void transpose_16(const T* x, T* y, int n) {
    int d = 0;
    if constexpr (sizeof(T) == 2) {
        for (; d + 8 <= n; d += 8)
            for (int half = 0; half < 16; half += 8) {
                __m128i a[8], b[8];
                for (int i = 0; i < 8; ++i) a[i] = _mm_loadu_si128((const __m128i*)(x + (d + i) * 16 + half));
                for (int i = 0; i < 4; ++i) {
                    b[2 * i] = _mm_unpacklo_epi16(a[2 * i], a[2 * i + 1]);
                    b[2 * i + 1] = _mm_unpackhi_epi16(a[2 * i], a[2 * i + 1]);
                }
                for (int i = 0; i < 8; i += 4)
                    for (int k = 0; k < 2; ++k) {
                        a[i + 2 * k] = _mm_unpacklo_epi32(b[i + k], b[i + k + 2]);
                        a[i + 2 * k + 1] = _mm_unpackhi_epi32(b[i + k], b[i + k + 2]);
                    }
                for (int i = 0; i < 4; ++i) {
                    _mm_storeu_si128((__m128i*)(y + (half + 2 * i) * n + d), _mm_unpacklo_epi64(a[i], a[i + 4]));
                    _mm_storeu_si128((__m128i*)(y + (half + 2 * i + 1) * n + d), _mm_unpackhi_epi64(a[i], a[i + 4]));
                }
            }
    } else if constexpr (std::is_same<T, float>::value) {
        for (; d + 4 <= n; d += 4)
            for (int j = 0; j < 16; j += 4) {
                __m128 a[4];
                for (int i = 0; i < 4; ++i) a[i] = _mm_loadu_ps(x + (d + i) * 16 + j);
                _MM_TRANSPOSE4_PS(a[0], a[1], a[2], a[3]);
                for (int i = 0; i < 4; ++i) _mm_storeu_ps(y + (j + i) * n + d, a[i]);
            }
    }
    for (; d < n; ++d)
        for (int j = 0; j < 16; ++j) y[j * n + d] = x[d * 16 + j];
}

// The same of bytes.
static void transpose_bytes(const uint8_t* x, uint8_t* y, int n) {
    int d = 0;
    for (; d + 16 <= n; d += 16) {
        __m128i a[16], b[16];
        for (int i = 0; i < 16; ++i) a[i] = _mm_loadu_si128((const __m128i*)(x + (d + i) * 16));
        for (int round = 0; round < 4; ++round) {  // each pairs row i with row i + 8: a perfect shuffle of 256 bytes
            for (int i = 0; i < 8; ++i) {
                b[2 * i] = _mm_unpacklo_epi8(a[i], a[i + 8]);
                b[2 * i + 1] = _mm_unpackhi_epi8(a[i], a[i + 8]);
            }
            for (int i = 0; i < 16; ++i) a[i] = b[i];
        }
        for (int j = 0; j < 16; ++j) _mm_storeu_si128((__m128i*)(y + j * n + d), a[j]);
    }
    for (; d < n; ++d)
        for (int j = 0; j < 16; ++j) y[j * n + d] = x[d * 16 + j];
}

template <class S> struct AttentionTile {
    typedef typename S::T T;
    static constexpr int ROWS = S::TILE * S::GROUP, WIDTH = (S::VD + 15) / 16 * 16;
    static constexpr bool SCALED = is_scaled<T>();
    typedef KvBlock<T, S::HEADS, S::KD, S::VD, S::BLOCK, S::SHARED> Block;
    typedef KvBlock<T, 1, S::KD, S::VD, KEYS> Copied;
    struct Work : Rows<T, is_integer<T>(), ROWS, S::KD, WIDTH> {  // lies in the thread's scratch
        alignas(16) char copied[Copied::BYTES + 64];  // a chunk of a tree of drafts; vectors may read beyond its end
        const float* by_distance[S::ROW_BIAS ? ROWS : 1];  // what a row adds to its scores, see added
        const float* by_key[S::KEY_BIAS ? ROWS : 1];       // what the sequence's keys add to those of a row's head
    };
    struct State {  // of one row over the segments so far
        float peak, sum, o[WIDTH];
    };

    // Where a row's distances to the first FRONT tokens count from: as if these lay right before its window.
    static int based(int position) { return position < S::FRONT + S::WINDOW - 1 ? position : S::FRONT + S::WINDOW - 1; }

    static int last_front(int last) { return last < S::FRONT ? last : S::FRONT - 1; }

    static int first_key(int position) {
        int low = S::FRONT;  // those before are a part of their own
        if (S::WINDOW && position - S::WINDOW + 1 > low) low = position - S::WINDOW + 1;
        if (S::CHUNK) {
            const int chunk = S::CHUNK ? S::CHUNK : 1;
            if (position / chunk * chunk > low) low = position / chunk * chunk;
        }
        return low;
    }

    static int last_key(int position, int context) {
        if (S::AHEAD == 0) return position;
        return S::AHEAD == ALL_AHEAD || position + S::AHEAD >= context ? context - 1 : position + S::AHEAD;
    }

    static Block block_of(const Ctx& c, const int32_t* table, int j) {
        return Block{c.kv + table[j / S::BLOCK] * c.kv_block_bytes};
    }

    // Copies [low, high) of the chunk at `base` from the slots of draft token t's ancestors.
    static void copy_path(Work& w, const Ctx& c, int head, int t, int base, int low, int high) {
        const icc_batch& b = *c.batch;
        for (; b.positions[t] >= low; t = b.parents[t]) {
            const int j = b.positions[t], slot = b.slot_mapping[t];
            const Block block{c.kv + slot / S::BLOCK * c.kv_block_bytes};
            if (j < high) copy_slot(block, head, slot % S::BLOCK, Copied{w.copied}, 0, j - base);
            if (b.parents[t] < 0) return;
        }
    }

    // Scores of sixteen keys of a row, as softmax takes them but for distances and what is not seen.
    static VF scored(const Work& w, const Chunk<T>& chunk, int row, int u) {
        VF x = vload(w.s + row * KEYS + 16 * u);
        if (SCALED) x = x * vload(chunk.k_scale[u]);
        if constexpr (Block::CENTRED) x = fma(vf(w.q_sum[row]), vload(chunk.k_centre[u]), x);
        if (S::SOFTCAP != 0.0f) x = vf(S::SOFTCAP) * vtanh(x * vf(1.0f / (S::SOFTCAP != 0.0f ? S::SOFTCAP : 1.0f)));
        return x;
    }

    // What a row adds to the scores of sixteen keys from `j` on: column LATER + position - key, 0 where there is none.
    static VF added(const float* columns, int position, int j) {
        float x[16];
        for (int i = 0; i < 16; ++i) {
            const int column = S::LATER + position - (j + i);
            x[i] = column >= 0 && column < S::ROW_BIAS ? columns[column] : 0.0f;
        }
        return vload(x);
    }

    // What sixteen keys from `j` on, up to `last`, add to the scores of a row at `position`: the same column of theirs.
    static VF added_by_keys(const float* rows, int position, int j, int last) {
        float x[16];
        for (int i = 0; i < 16; ++i) {
            const int column = S::KEY_LATER + position - (j + i);
            const bool there = column >= 0 && column < S::KEY_BIAS && j + i <= last;
            x[i] = there ? rows[(int64_t)(j + i) * S::KEY_APART + column] : 0.0f;
        }
        return vload(x);
    }

    // Online softmax of one row over the chunk: scores become weights, the row's output is rescaled.
    // It sees the keys low to last; distances count from `position`. bias: of distance 0, for the row's head.
    static void soften(Work& w, const Chunk<T>& chunk, int row, int base, int position, int low, int last, float slope,
                       const float* bias) {
        const bool whole = low <= base && last >= base + KEYS - 1;
        VF x[LANES], top = vf(-INFINITY);
        VB seen[LANES];
        for (int u = 0; u < LANES; ++u) {
            x[u] = scored(w, chunk, row, u);
            const VI j = iota() + vi(base + 16 * u);
            if (S::ALIBI) x[u] = fma(vf(slope), to_float(j - vi(position)), x[u]);
            if (S::BIAS) x[u] = x[u] + vload(bias + (base + 16 * u - position));
            if (S::ROW_BIAS) x[u] = x[u] + added(w.by_distance[row], position, base + 16 * u);
            if (S::KEY_BIAS) x[u] = x[u] + added_by_keys(w.by_key[row], position, base + 16 * u, last);
            if (!whole) {
                seen[u] = both(ge(j, vi(low)), le(j, vi(last)));
                x[u] = select(seen[u], x[u], vf(-INFINITY));
            }
            top = max_raw(top, x[u]);
        }
        const float old = w.peak[row], chunk_peak = hmax(top);
        const float peak = chunk_peak > old ? chunk_peak : old;
        const float base_peak = peak == -INFINITY ? 0.0f : peak;
        VF sum = vload(w.sum[row]);
        if (peak != old) {
            const VF shrink = vexp_weight(vf(old - base_peak));
            sum = sum * shrink;
            float* o = w.o + row * WIDTH;
            for (int d = 0; d < WIDTH; d += 16) vstore(o + d, vload(o + d) * shrink);
        }
        for (int u = 0; u < LANES; ++u) {
            x[u] = vexp_weight(x[u] - vf(base_peak));
            sum = sum + x[u];
        }
        vstore(w.sum[row], sum);
        w.set_weights(row, x, whole ? nullptr : seen, chunk);
        w.peak[row] = peak;
    }

    // Where sixteen keys from `slot` of a block on lie, and their values.
    template <class B> static void point(Chunk<T>& chunk, int u, const B& block, int head, int slot) {
        chunk.k[u] = &block.key(head, slot, 0), chunk.v[u] = &block.value(head, slot, 0);
        chunk.k_scale[u] = block.key_scale(head) + slot, chunk.v_scale[u] = block.value_scale(head) + slot;
        chunk.k_centre[u] = block.key_centre(head) + slot, chunk.v_centre[u] = block.value_centre(head) + slot;
    }

    // One chunk of a tree of drafts that begins at position `start`: its rows see different keys from there on, so each
    // token copies its own over those of the token before, and sums them in the order in which it would without a tree.
    static void branches(Work& w, const Ctx& c, const int32_t* table, int head, int rows, int token, int start,
                         int base, int low, int to, const float* slopes, const float* bias, bool front) {
        const Copied copied{w.copied};
        Chunk<T> chunk;
        for (int u = 0; u < LANES; ++u) point(chunk, u, copied, 0, 16 * u);
        for (int j = low; j < start; ++j)
            copy_slot(block_of(c, table, j), head, j % S::BLOCK, copied, 0, j - base);
        for (int r = 0; r < rows; r += S::GROUP) {
            const int t = token + r / S::GROUP, position = c.batch->positions[t];
            int high = base + KEYS < to ? base + KEYS : to;
            if (position + 1 < high) high = position + 1;
            if (high <= low) continue;
            copy_path(w, c, head, t, base, low > start ? low : start, high);
            chunk.low = low - base, chunk.high = high - base;
            S::qk(w, r, S::GROUP, chunk, false);
            for (int g = 0; g < S::GROUP; ++g)
                soften(w, chunk, r + g, base, front ? based(position) : position, front ? 0 : first_key(position),
                       front ? last_front(position) : position, S::ALIBI ? slopes[g] : 0.0f,
                       S::BIAS ? bias + (int64_t)g * S::BIAS : nullptr);
            S::pv(w, r, S::GROUP, chunk, false);
        }
    }

    // Values of the sixteen keys from `slot` on that are the beginning of keys, as products take values.
    static void copy_values(const Block& block, int head, int slot, const Copied& to, int at) {
        if constexpr (std::is_same<T, float>::value || sizeof(T) == 2) {
            const T* from = &block.key(head, slot, 0);
            T* y = &to.value(0, at, 0);
            transpose_16(from, y, S::VD);
        } else if constexpr (Block::PAIR == 1) {
            const uint8_t* from = (const uint8_t*)&block.key(head, slot, 0);
            transpose_bytes(from, (uint8_t*)&to.value(0, at, 0), Block::VW);
        } else {  // two dims of two slots are four bytes: pairs of slots side by side instead of pairs of dims
            const int8_t* from = &block.key(head, slot, 0);
            const __m128i swap = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
            int d = 0;
            for (; d + 8 <= Block::VW; d += 8)
                for (int half = 0; half < 16; half += 8) {
                    __m128 a[4];
                    for (int i = 0; i < 4; ++i) {
                        const __m128i x = _mm_loadu_si128((const __m128i*)(from + (d + 2 * i) * 16 + 2 * half));
                        a[i] = _mm_castsi128_ps(_mm_shuffle_epi8(x, swap));
                    }
                    _MM_TRANSPOSE4_PS(a[0], a[1], a[2], a[3]);
                    for (int i = 0; i < 4; ++i) _mm_storeu_ps((float*)&to.value(0, at + half + 2 * i, d), a[i]);
                }
            for (; d < Block::VW; ++d)
                for (int j = 0; j < 16; ++j) to.value(0, at + j, d) = block.key(head, slot + j, d);
        }
    }

    // One chunk in which all rows see keys of the same blocks: [low, high). Where they are those of one token, reading keys
    // and values is most of the work: the products fetch the next chunk as they go.
    static void whole(Work& w, const Ctx& c, const int32_t* table, int head, int rows, const int32_t* positions, int base,
                      int context, int low, int high, const float* slopes, const float* bias, bool front) {
        const int last = last_key(positions[0], front ? high : context);
        const bool alone = rows <= S::GROUP, more = alone && base + KEYS <= last;
        Chunk<T> chunk;
        chunk.low = low - base, chunk.high = high - base;
        for (int u = 0; u < LANES; ++u) {
            int j = base + 16 * u;
            const int next = more && j + KEYS <= last ? j + KEYS : low;
            if (j + 16 <= low || j >= high) j = low / 16 * 16;  // sixteen keys that nobody sees: any will do
            point(chunk, u, block_of(c, table, j), head, j % S::BLOCK);
            if (S::SHARED) {
                const Copied copied{w.copied};
                copy_values(block_of(c, table, j), head, j % S::BLOCK / 16 * 16, copied, 16 * u);
                chunk.v[u] = &copied.value(0, 16 * u, 0);
            }
            const Block after = block_of(c, table, next);
            chunk.next_k[u] = &after.key(head, next % S::BLOCK / 16 * 16, 0);
            chunk.next_v[u] = &after.value(head, next % S::BLOCK / 16 * 16, 0);
            if (SCALED && more) {
                _mm_prefetch((const char*)(after.key_scale(head) + next % S::BLOCK), _MM_HINT_T1);
                _mm_prefetch((const char*)(after.value_scale(head) + next % S::BLOCK), _MM_HINT_T1);
            }
        }
        S::qk(w, 0, rows, chunk, more);
        for (int r = 0; r < rows; ++r) {
            const int position = positions[r / S::GROUP];
            const int end = last_key(position, context);
            soften(w, chunk, r, base, front ? based(position) : position, front ? 0 : first_key(position),
                   front ? last_front(end) : end, S::ALIBI ? slopes[r % S::GROUP] : 0.0f,
                   S::BIAS ? bias + (int64_t)(r % S::GROUP) * S::BIAS : nullptr);
        }
        S::pv(w, 0, rows, chunk, more);
    }

    // All chunks of one segment for `rows` rows; row r is token `token` + r / GROUP, query head r % GROUP. The tile is
    // part of a tree of drafts that begins at position `start`, or of none (INT_MAX). front: its keys are the first ones.
    // positions: of the rows' tokens, or where they are in the cache.
    static void segment(Work& w, const Ctx& c, const int32_t* table, int head, int rows, int token, const int32_t* positions,
                        int start, int context, int from, int to, const float* slopes, const float* bias, bool front) {
        for (int r = 0; r < rows; ++r) {
            w.peak[r] = -INFINITY;
            vstore(w.sum[r], vf(0.0f));
        }
        memset(w.o, 0, sizeof(float) * (size_t)rows * WIDTH);
        if (from >= to) return;
        for (int base = from / KEYS * KEYS; base < to; base += KEYS) {
            const int low = base > from ? base : from, high = base + KEYS < to ? base + KEYS : to;
            if (high > start)
                branches(w, c, table, head, rows, token, start, base, low, to, slopes, bias, front);
            else
                whole(w, c, table, head, rows, positions, base, context, low, high, slopes, bias, front);
        }
    }

    static void begin(State& state) {
        state.peak = -INFINITY, state.sum = 0.0f;
        memset(state.o, 0, sizeof state.o);
    }
    static void merge(State& state, float peak, float sum, const float* o) {
        if (peak == -INFINITY && sum == 0.0f) return;  // the row sees nothing of this segment
        if (state.peak == -INFINITY && state.sum == 0.0f) {  // and saw nothing before it
            state.peak = peak, state.sum = sum;
            memcpy(state.o, o, sizeof state.o);
            return;
        }
        const float top = peak > state.peak || peak != peak ? peak : state.peak;
        const float keep = state.peak == -INFINITY ? 0.0f : expf(state.peak - top), add = expf(peak - top);
        state.sum = state.sum * keep + sum * add;
        for (int d = 0; d < WIDTH; d += 16)
            vstore(state.o + d, fma(vload(o + d), vf(add), vload(state.o + d) * vf(keep)));
        state.peak = top;
    }
    static void finish(State& state, const float* sink, float* y) {
        float sum = state.sum, keep = 1.0f;
        if (sink) {
            const float top = *sink > state.peak ? *sink : state.peak;
            keep = expf(state.peak - top);
            sum = sum * keep + expf(*sink - top);
        }
        const VF scale = vf(sum == 0.0f ? 0.0f : keep / sum);
        for (int d = 0; d < S::VD; d += 16)
            vstore_n(y + d, vload(state.o + d) * scale, S::VD - d < 16 ? S::VD - d : 16);
        if (Cell<T>::PER > 1) mix<S::VD>(y);
    }
};
