// The thread team of a library: threads that walk the same step list, one barrier per step, asleep between steps.
// A waiting thread spins for a short while, then yields, then sleeps: on a busy machine a pure spin would
// burn the time slice that the late thread needs. Where threads outnumber cores it does not spin at all.
#pragma once
#include <atomic>

#include "abi.h"
#include "simd.h"
#include "system_linux.h"

struct Gate {  // a counter that threads wait on to move past a value
    alignas(64) std::atomic<int32_t> value{0};
    std::atomic<int32_t> sleepers{0};
    int32_t spins = 2000;

    void advance() {
        value.fetch_add(1, std::memory_order_seq_cst);
        if (sleepers.load(std::memory_order_seq_cst) > 0) wake_all(value);
    }
    void wait_past(int32_t old) {
        for (int i = 0; i < spins; ++i) {
            if (value.load(std::memory_order_acquire) != old) return;
            _mm_pause();
        }
        for (int i = 0; i < 64; ++i) {
            if (value.load(std::memory_order_acquire) != old) return;
            give_way();
        }
        sleepers.fetch_add(1, std::memory_order_seq_cst);
        while (value.load(std::memory_order_seq_cst) == old) sleep_while(value, old);
        sleepers.fetch_sub(1, std::memory_order_seq_cst);
    }
};

// Arrivals are counted by groups of threads, each on a cache line of its own, and the last of a group arrives for it: one line that
// 64 threads change in turn would travel 64 times (Mellor-Crummey and Scott 1991, combining trees).
struct Barrier {
    static constexpr int32_t GROUP = 8, MOST = 1024 / GROUP;  // 1024 threads: runtime/executor/cpu/device.py
    struct alignas(64) Arrived { std::atomic<int32_t> count{0}; };

    int32_t members = 1;
    Arrived groups[MOST], all;
    Gate gate;

    // Whether the caller is the last of `size` that arrive.
    static bool last(Arrived& at, int32_t size) {
        if (at.count.fetch_add(1, std::memory_order_acq_rel) != size - 1) return false;
        at.count.store(0, std::memory_order_relaxed);
        return true;
    }
    void wait(int tid) {
        if (members == 1) return;
        const int32_t phase = gate.value.load(std::memory_order_relaxed), group = tid / GROUP, rest = members - group * GROUP;
        const int32_t count = (members + GROUP - 1) / GROUP;
        if (last(groups[group], rest < GROUP ? rest : GROUP) && (count == 1 || last(all, count))) gate.advance();
        else gate.wait_past(phase);
    }
};

// What a kernel sees of the step being executed.
struct Ctx {
    const icc_batch* batch;
    int tid, threads;
    char* kv;                    // first block of this step's KV layer
    int64_t kv_block_bytes;
    void* in[10];
    void* out[4];
    char* scratch;               // this thread's, ICC_SCRATCH_BYTES
    char* shared;                // the team's, ICC_SHARED_BYTES
    std::atomic<int32_t>* next;  // work counters of this step, one per thread, zero at its start: see Items
    int32_t* rest;               // this thread's in this step, kept between calls, zero at first: see screen.h
    Barrier* barrier;

    int tokens() const { return batch->num_tokens; }
    int logit_rows() const { return batch->num_logit_rows; }
    template <class T> T* input(int i) const { return (T*)in[i]; }
    template <class T> T* output(int i) const { return (T*)out[i]; }
};

struct Range { int64_t begin, end; };

// This thread's contiguous share of `count` items.
ICC_INLINE Range share(const Ctx& c, int64_t count) {
    return {count * c.tid / c.threads, count * (c.tid + 1) / c.threads};
}

// Hands out `count` items of unequal work: a thread takes those of its own share, whose rows it made and will go on with,
// then what is left of the others'.
struct Items {
    const Ctx& c;
    int64_t count;
    int turn = 0;

    Items(const Ctx& c, int64_t count) : c(c), count(count) {}
    bool take(int64_t& item) {
        for (; turn < c.threads; ++turn) {
            const int64_t owner = (c.tid + turn) % c.threads, end = count * (owner + 1) / c.threads;
            item = count * owner / c.threads + c.next[owner].fetch_add(1, std::memory_order_relaxed);
            if (item < end) return true;
        }
        return false;
    }
};
