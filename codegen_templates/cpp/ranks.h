// Ranks: processes of one machine that run one program together, each with parts of the weights. They share a piece of
// memory, laid out by runtime/executor/cpu/rank_memory.py: this control block, then for each rank two slots.
// Rank 0 has the batches: it posts each call as a command, which the others follow.
#pragma once
#include <time.h>

#include "team.h"

#define ICC_EXPORT __attribute__((visibility("default")))

enum RankCommand : int32_t { RANK_RUN = 1, RANK_ZERO = 2, RANK_END = 3, RANK_COPY = 4, RANK_WRITE = 5 };

struct RankControl {
    std::atomic<int32_t> stopped;  // not 0: a rank is gone, and nobody waits for it; written by whoever sees it
    alignas(64) std::atomic<int32_t> arrived;
    alignas(64) std::atomic<int32_t> phase;
    std::atomic<int32_t> phase_sleepers;
    alignas(64) std::atomic<int32_t> posted;  // commands so far
    std::atomic<int32_t> posted_sleepers;
    alignas(64) std::atomic<int32_t> done;    // ranks that have carried out the last command
    std::atomic<int32_t> done_sleepers;
    alignas(64) int32_t command, section, num_tokens, num_seqs, num_logit_rows, greedy, num_moves, has_trees;
    int32_t wanted;                  // of each row of logits only so many of the largest are wanted; 0: all
    int32_t weight, only;            // of RANK_WRITE: the weight that is written, -1 for the arena; the rank that writes, 0 for all
    int64_t asked;                   // where the rows that a section is asked for lie, in bytes behind this; 0: the step's own
    int64_t offset, nbytes, source;  // in the KV cache; of RANK_WRITE, whose bytes lie in the slots, where its target has them
};

static void rank_wake(std::atomic<int32_t>& value, std::atomic<int32_t>& sleepers) {
    if (sleepers.load(std::memory_order_seq_cst) > 0) syscall(SYS_futex, &value, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Waits until `value` is no longer `old`; false where a rank is gone. Sleeps in short pieces: a rank that dies wakes nobody.
static bool rank_wait(RankControl& c, std::atomic<int32_t>& value, std::atomic<int32_t>& sleepers, int32_t old) {
    for (int i = 0; i < 4000; ++i) {
        if (value.load(std::memory_order_acquire) != old) return true;
        _mm_pause();
    }
    for (int i = 0; i < 64; ++i) {
        if (value.load(std::memory_order_acquire) != old) return true;
        sched_yield();
    }
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    const timespec piece = {0, 50 * 1000 * 1000};
    bool moved = value.load(std::memory_order_seq_cst) != old;
    while (!moved && !c.stopped.load(std::memory_order_acquire)) {
        syscall(SYS_futex, &value, FUTEX_WAIT, old, &piece, nullptr, 0);
        moved = value.load(std::memory_order_seq_cst) != old;
    }
    sleepers.fetch_sub(1, std::memory_order_seq_cst);
    return moved;
}

struct Ranks {
    RankControl* control;
    char* slots;
    int64_t slot_bytes;
    int32_t rank, count, threads;  // threads: of all ranks
    uint32_t turn;                 // which of the two slots a rank writes next
    int64_t given;                 // bytes that this rank has given the others, in slots

    float* slot(int of, uint32_t turn) const { return (float*)(slots + (of * 2 + turn % 2) * slot_bytes); }

    // All threads of all ranks meet. Which slots are read between two meetings is not written before the next. False where a rank
    // is gone: then slots may hold anything.
    bool meet() const {
        RankControl& c = *control;
        if (c.stopped.load(std::memory_order_acquire)) return false;
        const int32_t phase = c.phase.load(std::memory_order_relaxed);
        if (c.arrived.fetch_add(1, std::memory_order_acq_rel) == threads - 1) {
            c.arrived.store(0, std::memory_order_relaxed);
            c.phase.fetch_add(1, std::memory_order_seq_cst);
            rank_wake(c.phase, c.phase_sleepers);
            return true;
        }
        return rank_wait(c, c.phase, c.phase_sleepers, phase);
    }
};

// What a kernel sees of a step that ranks run together.
struct RankCtx : Ctx {
    const Ranks* ranks;
    mutable uint32_t turn;
    mutable int64_t given;
};

// One of a row's largest logits, by its column in the whole row; a column of -1 is none.
struct Candidate { int32_t column; float value; };

// An integer that is as large among others as the value; that of what is no number is beyond those of the infinities.
ICC_INLINE int32_t rank_order(float value) {
    int32_t bits;
    memcpy(&bits, &value, sizeof bits);
    bits ^= bits >> 31 & INT32_MAX;
    return bits + (bits == -1);  // zeros are equal
}

// The `count` largest of x[0, n), of equals the first, in any order; column: of x[0]. What is no number is among them.
static void find_candidates(const float* x, int64_t n, int32_t column, int count, Candidate* found) {
    const int32_t most = rank_order(INFINITY), least = rank_order(-INFINITY);
    for (int i = 0; i < count; ++i) found[i] = {-1, -INFINITY};
    int have = 0, weakest = 0;  // the smallest of those found, of equals the last
    int32_t limit = INT32_MIN;
    const auto take = [&](int64_t i, int place) {
        found[place] = {column + (int32_t)i, x[i]};
        if (++have < count) return;
        have = count, weakest = 0;
        for (int k = 1; k < count; ++k) {
            const int32_t a = rank_order(found[k].value), b = rank_order(found[weakest].value);
            if (a < b || (a == b && found[k].column > found[weakest].column)) weakest = k;
        }
        limit = rank_order(found[weakest].value);
    };
    for (int64_t begin = 0; begin < n; begin += 64) {
        const int64_t end = begin + 64 < n ? begin + 64 : n;
        int32_t high = INT32_MIN, low = INT32_MAX;
        for (int64_t i = begin; i < end; ++i) {
            const int32_t order = rank_order(x[i]);
            high = order > high ? order : high;
            low = order < low ? order : low;
        }
        if (low < least || high > most) {
            for (int64_t i = begin; i < end; ++i)
                if (x[i] != x[i]) found[0] = {column + (int32_t)i, x[i]};
            return;
        }
        if (have == count && high <= limit) continue;
        for (int64_t i = begin; i < end; ++i)
            if (have < count || rank_order(x[i]) > limit) take(i, have < count ? have : weakest);
    }
}
