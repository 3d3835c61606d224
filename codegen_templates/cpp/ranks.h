// Ranks: processes of one machine that run one program together, each with parts of the weights. They share a piece of
// memory, laid out by runtime/executor/cpu/ranks.py: this control block, then for each rank two slots.
// Rank 0 has the batches: it posts each call as a command, which the others follow.
#pragma once
#include <time.h>

#include "team.h"

#define ICC_EXPORT __attribute__((visibility("default")))

enum RankCommand : int32_t { RANK_RUN = 1, RANK_ZERO = 2, RANK_END = 3, RANK_COPY = 4 };
constexpr int RANK_ROWS = 4096;  // logit rows that a section can be asked for

struct RankControl {
    std::atomic<int32_t> stopped;  // not 0: a rank is gone, and nobody waits for it; written by whoever sees it
    alignas(64) std::atomic<int32_t> arrived;
    alignas(64) std::atomic<int32_t> phase;
    std::atomic<int32_t> phase_sleepers;
    alignas(64) std::atomic<int32_t> posted;  // commands so far
    std::atomic<int32_t> posted_sleepers;
    alignas(64) std::atomic<int32_t> done;    // ranks that have carried out the last command
    std::atomic<int32_t> done_sleepers;
    alignas(64) int32_t command, section, num_tokens, num_seqs, num_logit_rows, greedy, num_moves, has_trees, asks;
    int64_t offset, nbytes, source;  // of RANK_ZERO, and of RANK_COPY, which copies from `source`: in the KV cache
    int32_t rows[RANK_ROWS];
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

    float* slot(int of, uint32_t turn) const { return (float*)(slots + (of * 2 + turn % 2) * slot_bytes); }

    // All threads of all ranks meet. Which slots are read between two meetings is not written before the next.
    void meet() const {
        RankControl& c = *control;
        if (c.stopped.load(std::memory_order_acquire)) return;
        const int32_t phase = c.phase.load(std::memory_order_relaxed);
        if (c.arrived.fetch_add(1, std::memory_order_acq_rel) == threads - 1) {
            c.arrived.store(0, std::memory_order_relaxed);
            c.phase.fetch_add(1, std::memory_order_seq_cst);
            rank_wake(c.phase, c.phase_sleepers);
        } else {
            rank_wait(c, c.phase, c.phase_sleepers, phase);
        }
    }
};

// What a kernel sees of a step that ranks run together.
struct RankCtx : Ctx {
    const Ranks* ranks;
    mutable uint32_t turn;
};
