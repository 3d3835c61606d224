// The keys that attention reads, chosen by an index: scores of its cached keys, of which the best stay. See compiler/ops/selecting.py.
#pragma once
#include <algorithm>

#include "kv.h"

constexpr int CHOICE_SEGMENT = 512;  // keys of one work item

// S: T, KD, HEADS (of queries), BLOCK, COUNT, WIDTH, MIXED (whether cached vectors are), LEFT_OUT.
template <class S> struct KeyChoice {
    typedef KvBlock<typename S::T, 1, S::KD, S::KD, S::BLOCK, true> Block;
    struct Work {  // lies in the thread's scratch
        float q[S::HEADS * S::KD], keys[16 * S::KD], found[16], row[S::WIDTH];
    };

    // Sixteen keys from `slot` on as floats, [KD][16].
    static void read(const Block& block, int slot, float* keys) {
        if constexpr (Block::PER == 1 && Block::PAIR == 1) {
            for (int d = 0; d < S::KD; ++d) {
                VF x = vload(&block.key(0, slot, d));
                if (Block::SCALED) x = x * vload((const float*)block.key_scale(0) + slot);
                vstore(keys + 16 * d, x);
            }
        } else {
            constexpr int PER = Block::PER, TOP = Cell<typename S::T>::TOP, BITS = 8 / PER;
            for (int i = 0; i < 16; ++i)
                for (int d = 0; d < S::KD; ++d) {
                    if constexpr (PER == 1) {
                        keys[16 * d + i] = (float)block.key(0, slot + i, d) * block.key_scale(0)[slot + i];
                    } else {
                        const int code = block.key(0, slot + i, d / PER).h >> BITS * (d % PER) & ((1 << BITS) - 1);
                        keys[16 * d + i] = (float)(2 * code - TOP) * value(block.key_scale(0)[slot + i]) + value(block.key_centre(0)[slot + i]);
                    }
                }
        }
    }

    // w relu(q k), summed over `N` heads from the first of q and w on.
    template <int N> static VF add(VF sum, const float* q, const float* w, const float* keys) {
        VF x[N];
        for (int h = 0; h < N; ++h) x[h] = vf(0.0f);
        for (int d = 0; d < S::KD; ++d) {
            const VF k = vload(keys + 16 * d);
            for (int h = 0; h < N; ++h) x[h] = fma(vf(q[h * S::KD + d]), k, x[h]);
        }
        for (int h = 0; h < N; ++h) sum = fma(vf(w[h]), max_raw(x[h], vf(0.0f)), sum);
        return sum;
    }

    // Scores of the sixteen keys from `slot` on go to work.found: minus infinity instead of what is no number.
    static void score(Work& work, const Block& block, int slot, const float* w) {
        read(block, slot, work.keys);
        VF sum = vf(0.0f);
        int h = 0;
        for (; h + 4 <= S::HEADS; h += 4) sum = add<4>(sum, work.q + h * S::KD, w + h, work.keys);
        for (; h < S::HEADS; ++h) sum = add<1>(sum, work.q + h * S::KD, w + h, work.keys);
        vstore(work.found, sum);
        for (float& x : work.found) x = x == x ? x : -INFINITY;
    }

    // Scores of the keys [low, high) of token t, to row[position - key]. From `start` on it sees only its own ancestors in a tree
    // of drafts (see abi.h).
    static void scores(Work& work, const Ctx& c, const int32_t* table, int t, int start, int low, int high, const float* q,
                       const float* w, float* row) {
        const icc_batch& b = *c.batch;
        const int position = b.positions[t], end = high < start ? high : start;
        memcpy(work.q, q, sizeof work.q);
        if (S::MIXED)
            for (int h = 0; h < S::HEADS; ++h) mix<S::KD>(work.q + h * S::KD);
        for (int base = low; base < end; base += 16) {
            score(work, Block{c.kv + table[base / S::BLOCK] * c.kv_block_bytes}, base % S::BLOCK, w);
            for (int i = 0; i < 16 && base + i < end; ++i) row[position - base - i] = work.found[i];
        }
        for (int u = t; start < high && b.positions[u] >= start; u = b.parents[u]) {
            const int j = b.positions[u], slot = b.slot_mapping[u];
            if (j >= low && j < high) {
                score(work, Block{c.kv + slot / S::BLOCK * c.kv_block_bytes}, slot % S::BLOCK / 16 * 16, w);
                row[position - j] = work.found[slot % 16];
            }
            if (b.parents[u] < 0) break;
        }
    }

    // Scores of the keys of one token become 0 where they are among the best, of equal ones the earlier; nothing is behind them.
    static void choose(Work& work, int position, float* row) {
        const int keys = position + 1;
        if (keys <= S::COUNT) {
            memset(row, 0, sizeof(float) * S::WIDTH);
            return;
        }
        memcpy(work.row, row, sizeof(float) * (size_t)keys);
        std::nth_element(work.row, work.row + S::COUNT - 1, work.row + keys, [](float a, float b) { return a > b; });
        const float limit = work.row[S::COUNT - 1];
        int equal = S::COUNT - (int)std::count_if(row, row + keys, [=](float x) { return x > limit; });
        for (int i = position; i >= 0; --i) row[i] = row[i] > limit || (row[i] == limit && equal-- > 0) ? 0.0f : S::LEFT_OUT;
        memset(row + keys, 0, sizeof(float) * (size_t)(S::WIDTH - keys));
    }
};
