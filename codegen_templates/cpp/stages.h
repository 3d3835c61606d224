// Stages: ranks of a pipeline, each of which runs some of a program's steps and gives what the next one needs. Between two of
// them lies a pipe: the two slots of the rank that gives, and how many pieces were put there and taken away again.
#pragma once

constexpr size_t RANK_PIPES = 24 << 10;  // bytes from the control block, whose memory goes on behind it
static_assert(sizeof(RankControl) <= RANK_PIPES, "the pipes lie behind the control block");

struct RankPipe {
    alignas(64) std::atomic<int32_t> sent;  // both wrap around together
    std::atomic<int32_t> sent_sleepers;
    alignas(64) std::atomic<int32_t> taken;
    std::atomic<int32_t> taken_sleepers;
};

// Puts or takes `nbytes` bytes, in pieces of a slot; gives up where a rank is gone. Of each rank one thread does.
static void transfer(const Ranks& r, int stage, char* data, int64_t nbytes) {
    RankControl& c = *r.control;
    RankPipe& pipe = ((RankPipe*)((char*)r.control + RANK_PIPES))[stage - 1];
    const bool gives = r.rank == stage - 1;
    for (int64_t first = 0; first < nbytes; first += r.slot_bytes) {
        const size_t count = (size_t)(nbytes - first < r.slot_bytes ? nbytes - first : r.slot_bytes);
        if (gives) {
            const int32_t sent = pipe.sent.load(std::memory_order_relaxed);
            if (!rank_wait(c, pipe.taken, pipe.taken_sleepers, (int32_t)((uint32_t)sent - 2))) return;  // both slots are full
            memcpy(r.slot(r.rank, (uint32_t)sent), data + first, count);
            pipe.sent.store((int32_t)((uint32_t)sent + 1), std::memory_order_seq_cst);
            rank_wake(pipe.sent, pipe.sent_sleepers);
        } else {
            const int32_t taken = pipe.taken.load(std::memory_order_relaxed);
            if (!rank_wait(c, pipe.sent, pipe.sent_sleepers, taken)) return;
            memcpy(data + first, r.slot(stage - 1, (uint32_t)taken), count);
            pipe.taken.store((int32_t)((uint32_t)taken + 1), std::memory_order_seq_cst);
            rank_wake(pipe.taken, pipe.taken_sleepers);
        }
    }
}
