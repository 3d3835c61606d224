// Paged causal attention for a tile of query rows: online softmax over chunks of 64 keys, merged over segments.
//
// Chunks and segments start at multiples of their length in absolute key positions. A row starts afresh in every
// segment and the segments are merged in order, so a long context can be split over threads without changing a bit,
// and a row's bits depend on its own position only. The generated kernel gives the shape as a traits class S:
//   T, KD, VD, HEADS (kv), GROUP (query heads per kv head), BLOCK, WINDOW, CHUNK, SOFTCAP, TILE (tokens per tile),
//   qk(q, k, rows, s), pv(p, v, keys, rows, o): products over a chunk.
#pragma once
#include "kv.h"

constexpr int KEYS = 64;         // keys of one chunk
constexpr int SEGMENT = 1024;    // keys of one segment

template <class S> struct AttentionTile {
    static constexpr int ROWS = S::TILE * S::GROUP, WIDTH = (S::VD + 15) / 16 * 16;
    struct Work {  // lies in the thread's scratch
        float q[ROWS * S::KD], k[S::KD * KEYS], v[KEYS * WIDTH], s[ROWS * KEYS], o[ROWS * WIDTH];
        float peak[ROWS], sum[ROWS][16];
    };
    struct State {  // of one row over the segments so far
        float peak, sum, o[WIDTH];
    };

    static int first_key(int position) {
        int low = 0;
        if (S::WINDOW && position - S::WINDOW + 1 > low) low = position - S::WINDOW + 1;
        if (S::CHUNK) {
            const int chunk = S::CHUNK ? S::CHUNK : 1;
            if (position / chunk * chunk > low) low = position / chunk * chunk;
        }
        return low;
    }

    // Copies keys and values [low, high) of the chunk that starts at `base` into float scratch.
    static void load(Work& w, const Ctx& c, const int32_t* table, int head, int base, int low, int high) {
        typedef KvBlock<typename S::T, S::HEADS, S::KD, S::VD, S::BLOCK> Block;
        const auto block_of = [&](int j) { return Block{c.kv + table[j / S::BLOCK] * c.kv_block_bytes}; };
        if (S::BLOCK % 16 == 0) {
            for (int j = low / 16 * 16; j < high; j += 16) {
                const Block block = block_of(j);
                const typename S::T* key = block.key(head) + j % S::BLOCK;
                float* k = w.k + (j - base);
                VF scale = vf(1.0f);
                if (Block::SCALED) scale = vload(block.key_scale(head) + j % S::BLOCK);
                for (int d = 0; d < S::KD; ++d) {
                    const VF x = vload(key + d * S::BLOCK);
                    vstore(k + d * KEYS, Block::SCALED ? x * scale : x);
                }
            }
        } else {
            for (int j = low; j < high; ++j) {
                const Block block = block_of(j);
                const int at = j % S::BLOCK;
                const float scale = Block::SCALED ? block.key_scale(head)[at] : 1.0f;
                for (int d = 0; d < S::KD; ++d)
                    w.k[d * KEYS + j - base] = value(block.key(head)[d * S::BLOCK + at]) * scale;
            }
        }
        for (int j = low; j < high; ++j) load_value(w, block_of(j), head, j % S::BLOCK, j - base);
    }

    // Copies keys and values [low, high) of the chunk that starts at `base` from the slots of draft token t's ancestors.
    static void load_path(Work& w, const Ctx& c, int head, int t, int base, int low, int high) {
        typedef KvBlock<typename S::T, S::HEADS, S::KD, S::VD, S::BLOCK> Block;
        const icc_batch& b = *c.batch;
        for (; b.positions[t] >= low; t = b.parents[t]) {
            const int j = b.positions[t], slot = b.slot_mapping[t], at = slot % S::BLOCK;
            if (j < high) {
                const Block block{c.kv + slot / S::BLOCK * c.kv_block_bytes};
                const float scale = Block::SCALED ? block.key_scale(head)[at] : 1.0f;
                for (int d = 0; d < S::KD; ++d)
                    w.k[d * KEYS + j - base] = value(block.key(head)[d * S::BLOCK + at]) * scale;
                load_value(w, block, head, at, j - base);
            }
            if (b.parents[t] < 0) return;
        }
    }

    template <class Block> static void load_value(Work& w, const Block& block, int head, int at, int row) {
        const typename S::T* x = block.value(head) + at * S::VD;
        const VF scale = vf(Block::SCALED ? block.value_scale(head)[at] : 1.0f);
        float* v = w.v + row * WIDTH;
        for (int d = 0; d < S::VD; d += 16) {
            const VF y = S::VD - d >= 16 ? vload(x + d) : vload_n(x + d, S::VD - d);
            vstore(v + d, Block::SCALED ? y * scale : y);
        }
    }

    // Online softmax of one row over the chunk: scores become weights, the row's output is rescaled.
    static void soften(Work& w, int row, int base, int position, float slope) {
        float* s = w.s + row * KEYS;
        const int low = first_key(position);
        const bool whole = low <= base && position >= base + KEYS - 1;
        VF x[4], top = vf(-INFINITY);
        for (int u = 0; u < 4; ++u) {
            x[u] = vload(s + 16 * u);
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
            vstore(s + 16 * u, e);
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
            if (low < start) load(w, c, table, head, base, low, start < high ? start : high);
            load_path(w, c, head, t, base, low > start ? low : start, high);
            S::qk(w.q + r * S::KD, w.k, S::GROUP, w.s + r * KEYS);
            for (int g = 0; g < S::GROUP; ++g) soften(w, r + g, base, position, S::ALIBI ? slopes[g] : 0.0f);
            S::pv(w.s + r * KEYS + (low - base), w.v + (low - base) * WIDTH, high - low, S::GROUP, w.o + r * WIDTH);
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
            if (high > start) {
                branches(w, c, table, head, rows, token, start, base, low, to, slopes);
                continue;
            }
            load(w, c, table, head, base, low, high);
            S::qk(w.q, w.k, rows, w.s);
            for (int r = 0; r < rows; ++r) soften(w, r, base, positions[r / S::GROUP], S::ALIBI ? slopes[r % S::GROUP] : 0.0f);
            S::pv(w.s + (low - base), w.v + (low - base) * WIDTH, high - low, rows, w.o);
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
