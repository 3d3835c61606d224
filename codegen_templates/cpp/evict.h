// Tokens that are given up by the attention they got: where they are in the cache, what counts, and which go.
// POOLED and the rules are those of compiler/ops/evicting.py; places those of runtime/kv/places.py.
#pragma once
#include "attention.h"

// S: as in attention.h. H2O: by all attention so far, an eighth when there are BUDGET tokens; else SnapKV: by that of a
// prompt's RECENT last tokens, all but BUDGET, when it has been read. RECENT last ones stay.
template <class S, bool H2O, int BUDGET, int RECENT> struct Evicting {
    typedef AttentionTile<S> Tile;
    typedef typename Tile::Block Block;
    typedef typename S::T T;
    static constexpr int LEFT = H2O ? BUDGET - BUDGET / 8 : BUDGET, POOLED = H2O ? 0 : 7;  // neighbours to each side

    static int place(int position, int prompt) {
        if (H2O) return position < BUDGET ? position : LEFT + (position - BUDGET) % (BUDGET / 8);
        return position < prompt || prompt <= BUDGET ? position : BUDGET + position - prompt;
    }
    static int context(const icc_batch& b, int s) {
        const int begin = b.seq_starts[s], count = b.seq_starts[s + 1] - begin;
        return count ? place(b.positions[begin], b.prompt_lens[s]) + count : 0;
    }
    // The first token of a sequence in the step whose attention counts.
    static int observing(const icc_batch& b, int s) {
        const int begin = b.seq_starts[s], end = b.seq_starts[s + 1], prompt = b.prompt_lens[s];
        if (H2O || begin == end) return begin;
        if (prompt <= BUDGET || b.positions[begin] >= prompt) return end;
        const int first = begin + prompt - RECENT - b.positions[begin];
        return first < begin ? begin : first < end ? first : end;
    }

    // Adds what the rows of `tokens` tokens give to each key they see, one row after the other. Their queries are in w.
    static void count(typename Tile::Work& w, const Ctx& c, const int32_t* table, int head, int tokens,
                      const int32_t* places, const float* sinks) {
        const int rows = tokens * S::GROUP, end = places[tokens - 1] + 1;
        float peak[Tile::ROWS], unit[Tile::ROWS];
        for (int r = 0; r < rows; ++r) peak[r] = sinks ? sinks[r % S::GROUP] : -INFINITY, unit[r] = sinks ? 1.0f : 0.0f;
        for (int pass = 0; pass < 2; ++pass) {
            for (int base = 0; base < end; base += KEYS) {
                Chunk<T> chunk;
                chunk.low = 0, chunk.high = end - base < KEYS ? end - base : KEYS;
                for (int u = 0; u < LANES; ++u) {
                    const int j = base + 16 * u < end ? base + 16 * u : base;
                    Tile::point(chunk, u, Tile::block_of(c, table, j), head, j % S::BLOCK);
                }
                S::qk(w, 0, rows, chunk, false);
                VF given[LANES];
                for (int u = 0; u < LANES; ++u) given[u] = vf(0.0f);
                for (int r = 0; r < rows; ++r) {
                    VF x[LANES], top = vf(-INFINITY), sum = vf(0.0f);
                    for (int u = 0; u < LANES; ++u) {
                        x[u] = select(le(iota() + vi(base + 16 * u), vi(places[r / S::GROUP])), Tile::scored(w, chunk, r, u), vf(-INFINITY));
                        top = max_raw(top, x[u]);
                    }
                    if (pass == 0) {
                        const float found = hmax(top), next = found > peak[r] ? found : peak[r];
                        if (next == -INFINITY) continue;
                        for (int u = 0; u < LANES; ++u) sum = sum + vexp_weight(x[u] - vf(next));
                        unit[r] = unit[r] * expf(peak[r] - next) + hsum(sum), peak[r] = next;
                    } else if (unit[r] > 0.0f) {
                        for (int u = 0; u < LANES; ++u) given[u] = fma(vexp_weight(x[u] - vf(peak[r])), vf(1.0f / unit[r]), given[u]);
                    }
                }
                for (int u = 0; pass == 1 && u < LANES && base + 16 * u < end; ++u) {
                    const int j = base + 16 * u;
                    float* score = Tile::block_of(c, table, j).score(head) + j % S::BLOCK;
                    vstore_n(score, vload_n(score, end - j < 16 ? end - j : 16) + given[u], end - j < 16 ? end - j : 16);
                }
            }
        }
    }

    static uint32_t bits(float x) {  // in the order of what is not negative; of what is no number, least
        uint32_t y;
        memcpy(&y, &x, 4);
        return x >= 0.0f ? y : 0;
    }
    static uint32_t mark(const Ctx& c, const int32_t* table, int head, int j, int end) {
        uint32_t top = 0;
        const int from = j < POOLED ? 0 : j - POOLED, to = j + POOLED < end ? j + POOLED : end - 1;
        for (int i = from; i <= to; ++i) {
            const uint32_t x = bits(Tile::block_of(c, table, i).score(head)[i % S::BLOCK]);
            top = x > top ? x : top;
        }
        return top;
    }

    // After the token before `next` of a sequence: if an eviction is due, what stays moves to the first places.
    static void evict(const Ctx& c, const int32_t* table, int head, int next, int prompt) {
        const int held = H2O ? place(next - 1, prompt) + 1 : next;
        if (H2O ? held < BUDGET : next != prompt || prompt <= BUDGET) return;
        const int older = held - RECENT, wanted = LEFT - RECENT;
        uint32_t least = 0;  // the wanted-th highest mark, bit by bit
        for (uint32_t bit = 1u << 30; bit; bit >>= 1) {
            int above = 0;
            for (int j = 0; j < older; ++j) above += mark(c, table, head, j, older) >= (least | bit);
            if (above >= wanted) least |= bit;
        }
        int above = 0;
        for (int j = 0; j < older; ++j) above += mark(c, table, head, j, older) > least;
        int equal = wanted - above;  // so many of those that are the least, the first
        // marks of pooled scores are looked at again behind what moved: places that were written are remembered here
        uint32_t behind[POOLED + 1] = {};
        int to = 0;
        for (int j = 0; j < held; ++j) {
            const uint32_t own = j < older ? bits(Tile::block_of(c, table, j).score(head)[j % S::BLOCK]) : 0;
            bool stays = j >= older;
            if (!stays) {
                uint32_t top = own;
                for (int i = 0; i < POOLED; ++i) top = behind[i] > top ? behind[i] : top;
                for (int i = j + 1; i <= j + POOLED && i < older; ++i) {
                    const uint32_t x = bits(Tile::block_of(c, table, i).score(head)[i % S::BLOCK]);
                    top = x > top ? x : top;
                }
                stays = top > least || (top == least && equal-- > 0);
            }
            if constexpr (POOLED > 0) {
                for (int i = 0; i + 1 < POOLED; ++i) behind[i] = behind[i + 1];
                behind[POOLED - 1] = own;
            }
            if (!stays) continue;
            if (to != j) {
                const Block from = Tile::block_of(c, table, j), target = Tile::block_of(c, table, to);
                copy_slot(from, head, j % S::BLOCK, target, head, to % S::BLOCK);
                target.score(head)[to % S::BLOCK] = from.score(head)[j % S::BLOCK];
            }
            ++to;
        }
    }
};
