// Paged causal attention for a tile of query rows: online softmax over chunks of 64 keys, merged over segments.
//
// Chunks and segments start at multiples of their length in absolute key positions. A row starts afresh in every
// segment and the segments are merged in order, so a long context can be split over threads without changing a bit,
// and a row's bits depend on its own position only. Keys and values are read where they lie; int8 ones enter the products
// as integers, their scales multiply scores and weights. The generated kernel gives the shape as a traits class S:
//   T, KD, VD, HEADS (kv), GROUP (query heads per kv head), BLOCK (a multiple of 16), WINDOW, CHUNK, SOFTCAP, TILE
//   (tokens per tile), qk(q, k, stride, rows, s): scores of a chunk, pv(p, v, stride, keys, rows, o): adds a run of values.
#pragma once
#include "kv.h"

constexpr int KEYS = 64;         // keys of one chunk
constexpr int LANES = KEYS / 16; // vectors of them
constexpr int SEGMENT = 1024;    // keys of one segment

template <class S> struct AttentionTile {
    static constexpr int ROWS = S::TILE * S::GROUP, WIDTH = (S::VD + 15) / 16 * 16;
    static constexpr bool SCALED = sizeof(typename S::T) == 1;
    typedef KvBlock<typename S::T, S::HEADS, S::KD, S::VD, S::BLOCK> Block;
    struct Work {  // lies in the thread's scratch
        float q[ROWS * S::KD], s[ROWS * KEYS], o[ROWS * WIDTH];
        float peak[ROWS], sum[ROWS][16];
        float k[S::KD * KEYS], v[KEYS * WIDTH], ks[KEYS], vs[KEYS];  // a chunk of a tree of drafts
    };
    struct State {  // of one row over the segments so far
        float peak, sum, o[WIDTH];
    };
    struct Scales { const float *k[LANES], *v[LANES]; };  // of the sixteen keys of each vector; null where there are none

    static int first_key(int position) {
        int low = 0;
        if (S::WINDOW && position - S::WINDOW + 1 > low) low = position - S::WINDOW + 1;
        if (S::CHUNK) {
            const int chunk = S::CHUNK ? S::CHUNK : 1;
            if (position / chunk * chunk > low) low = position / chunk * chunk;
        }
        return low;
    }

    static Block block_of(const Ctx& c, const int32_t* table, int j) {
        return Block{c.kv + table[j / S::BLOCK] * c.kv_block_bytes};
    }

    // Copies key and value of one slot into place `at` of the scratch chunk.
    static void copy(Work& w, const Block& block, int head, int slot, int at) {
        if (SCALED) w.ks[at] = block.key_scale(head)[slot], w.vs[at] = block.value_scale(head)[slot];
        for (int d = 0; d < S::KD; ++d) w.k[d * KEYS + at] = value(block.key(head)[d * S::BLOCK + slot]);
        const typename S::T* x = block.value(head) + slot * S::VD;
        float* v = w.v + at * WIDTH;
        for (int d = 0; d < S::VD; d += 16) vstore(v + d, S::VD - d >= 16 ? vload(x + d) : vload_n(x + d, S::VD - d));
    }

    // Copies [low, high) of the chunk at `base` from the slots of draft token t's ancestors.
    static void copy_path(Work& w, const Ctx& c, int head, int t, int base, int low, int high) {
        const icc_batch& b = *c.batch;
        for (; b.positions[t] >= low; t = b.parents[t]) {
            const int j = b.positions[t], slot = b.slot_mapping[t];
            if (j < high) copy(w, Block{c.kv + slot / S::BLOCK * c.kv_block_bytes}, head, slot % S::BLOCK, j - base);
            if (b.parents[t] < 0) return;
        }
    }

    // Online softmax of one row over the chunk: scores become weights, the row's output is rescaled.
    static void soften(Work& w, const Scales& scales, int row, int base, int position, float slope) {
        float* s = w.s + row * KEYS;
        const int low = first_key(position);
        const bool whole = low <= base && position >= base + KEYS - 1;
        VF x[4], top = vf(-INFINITY);
        for (int u = 0; u < 4; ++u) {
            x[u] = vload(s + 16 * u);
            if (SCALED) x[u] = x[u] * vload(scales.k[u]);
            const VI j = iota() + vi(base + 16 * u);
            if (S::SOFTCAP != 0.0f) x[u] = vf(S::SOFTCAP) * vtanh(x[u] * vf(1.0f / (S::SOFTCAP != 0.0f ? S::SOFTCAP : 1.0f)));
            if (S::ALIBI) x[u] = fma(vf(slope), to_float(j - vi(position)), x[u]);
            if (!whole) x[u] = select(both(ge(j, vi(low)), le(j, vi(position))), x[u], vf(-INFINITY));
            top = max_raw(top, x[u]);
        }
        const float old = w.peak[row], chunk_peak = hmax(top);
        const float peak = chunk_peak > old ? chunk_peak : old;
        const float base_peak = peak == -INFINITY ? 0.0f : peak;
        VF sum = vload(w.sum[row]);
        if (peak != old) {
            const VF shrink = vexp(vf(old - base_peak));
            sum = sum * shrink;
            float* o = w.o + row * WIDTH;
            for (int d = 0; d < WIDTH; d += 16) vstore(o + d, vload(o + d) * shrink);
        }
        for (int u = 0; u < 4; ++u) {
            const VF e = vexp(x[u] - vf(base_peak));
            sum = sum + e;
            vstore(s + 16 * u, SCALED ? e * vload(scales.v[u]) : e);
        }
        vstore(w.sum[row], sum);
        w.peak[row] = peak;
    }

    // One chunk of a tree of drafts that begins at position `start`: its rows see different keys, so each token loads
    // its own, and sums them in the order in which it would without a tree.
    static void branches(Work& w, const Ctx& c, const int32_t* table, int head, int rows, int token, int start,
                         int base, int low, int to, const float* slopes) {
        for (int r = 0; r < rows; r += S::GROUP) {
            const int t = token + r / S::GROUP, position = c.batch->positions[t];
            int high = base + KEYS < to ? base + KEYS : to;
            if (position + 1 < high) high = position + 1;
            if (high <= low) continue;
            for (int j = low; j < high && j < start; ++j) copy(w, block_of(c, table, j), head, j % S::BLOCK, j - base);
            copy_path(w, c, head, t, base, low > start ? low : start, high);
            const float* k[LANES];
            Scales scales;
            for (int u = 0; u < LANES; ++u) k[u] = w.k + 16 * u, scales.k[u] = w.ks + 16 * u, scales.v[u] = w.vs + 16 * u;
            S::qk(w.q + r * S::KD, k, KEYS, S::GROUP, w.s + r * KEYS, false, nullptr);
            for (int g = 0; g < S::GROUP; ++g) soften(w, scales, r + g, base, position, S::ALIBI ? slopes[g] : 0.0f);
            S::pv(w.s + r * KEYS + (low - base), w.v + (low - base) * WIDTH, WIDTH, high - low, S::GROUP, w.o + r * WIDTH, false, nullptr);
        }
    }

    // One chunk in which all rows see keys of the same blocks: [low, high). Where they are those of one token, reading keys
    // and values is most of the work: the products fetch this chunk's values and the next chunk's keys as they go.
    static void whole(Work& w, const Ctx& c, const int32_t* table, int head, int rows, const int32_t* positions, int base,
                      int low, int high, const float* slopes) {
        const bool alone = rows == S::GROUP;
        const typename S::T* k[LANES];
        const char* values[LANES];
        Scales scales;
        for (int u = 0; u < LANES; ++u) {
            int j = base + 16 * u;
            if (j + 16 <= low || j >= high) j = low / 16 * 16;  // sixteen keys that nobody sees: any will do
            const Block block = block_of(c, table, j);
            k[u] = block.key(head) + j % S::BLOCK;
            values[u] = (const char*)(block.value(head) + j % S::BLOCK * S::VD);
            scales.k[u] = block.key_scale(head) + j % S::BLOCK, scales.v[u] = block.value_scale(head) + j % S::BLOCK;
        }
        S::qk(w.q, k, S::BLOCK, rows, w.s, alone, values);
        for (int r = 0; r < rows; ++r)
            soften(w, scales, r, base, positions[r / S::GROUP], S::ALIBI ? slopes[r % S::GROUP] : 0.0f);
        for (int j = low; j < high;) {
            const int end = (j / S::BLOCK + 1) * S::BLOCK, to = end < high ? end : high, next = j + KEYS;
            const bool more = alone && next <= positions[0];
            const Block after = block_of(c, table, more ? next : j);
            const char* ahead = (const char*)after.key(head) + j % S::BLOCK * S::KD * (int)sizeof(typename S::T);
            S::pv(w.s + (j - base), block_of(c, table, j).value(head) + j % S::BLOCK * S::VD, S::VD, to - j, rows, w.o, more, ahead);
            j = to;
        }
    }

    // All chunks of one segment for `rows` rows; row r is token `token` + r / GROUP, query head r % GROUP. The tile is
    // part of a tree of drafts that begins at position `start`, or of none (INT_MAX).
    static void segment(Work& w, const Ctx& c, const int32_t* table, int head, int rows, int token, int start, int from,
                        int to, const float* slopes) {
        const int32_t* positions = c.batch->positions + token;
        for (int r = 0; r < rows; ++r) {
            w.peak[r] = -INFINITY;
            vstore(w.sum[r], vf(0.0f));
        }
        memset(w.o, 0, sizeof(float) * (size_t)rows * WIDTH);
        for (int base = from / KEYS * KEYS; base < to; base += KEYS) {
            const int low = base > from ? base : from, high = base + KEYS < to ? base + KEYS : to;
            if (high > start)
                branches(w, c, table, head, rows, token, start, base, low, to, slopes);
            else
                whole(w, c, table, head, rows, positions, base, low, high, slopes);
        }
    }

    static void begin(State& state) {
        state.peak = -INFINITY, state.sum = 0.0f;
        memset(state.o, 0, sizeof state.o);
    }
    static void merge(State& state, float peak, float sum, const float* o) {
        if (peak == -INFINITY && sum == 0.0f) return;  // the row sees nothing of this segment
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
    }
};
