// Stages: groups of ranks of a pipeline, each of which runs some of a program's steps and gives what the next one needs. A rank
// gives that to the one in its place in the next group, by a pipe: the two slots of the rank that gives, and how many pieces were
// put there and taken away again. A group has a control block of its own to meet by, and is all that its collectives know of.
#pragma once

constexpr size_t RANK_PIPES = 24 << 10;  // bytes from the control block, whose memory goes on behind it
constexpr size_t RANK_RING = 32 << 10;   // bytes from the control block, of what rank 0 posts and how much of it each rank has done
constexpr size_t RANK_GROUP = 1 << 10;    // bytes from a group's control block to the next one's; the first is that of all
static_assert(sizeof(RankControl) <= RANK_GROUP, "a control block lies before the next");

// What rank 0 posts. Ranks do it one after the other, each when it has done what came before, so that several are under way.
struct alignas(128) StageCommand {
    int32_t command, section, turn, num_tokens, num_seqs, num_logit_rows, greedy, num_moves, has_trees, weight, only;
    int64_t asked, offset, nbytes, source;  // as of RankControl
};

struct alignas(64) RankDone {
    std::atomic<int32_t> count;  // commands that a rank has done; wraps around, as RankControl's `posted` does
    std::atomic<int32_t> sleepers;
};

struct RankRing {
    static constexpr uint32_t MOST = 16;  // commands that may wait
    static constexpr int TURNS = 8;       // steps that may be under way, each with arrays of its own
    StageCommand commands[MOST];
    RankDone done[64];
};
static_assert(sizeof(RankRing) <= 8 << 10, "as rank_memory.py says");

// The ranks of a stage as its collectives see them, and all ranks.
struct StageRanks : Ranks {
    RankControl* whole;
    char* all_slots;
    int32_t stage, number, all;  // number: of this rank, of all

    // Of a group of one rank, which meets nobody, that of all.
    RankControl* group(int stage) const { return (RankControl*)((char*)whole + (count > 1 ? stage * RANK_GROUP : 0)); }

    RankRing& ring() const { return *(RankRing*)((char*)whole + RANK_RING); }

    // Of the commands that were posted, and the one that is posted next.
    StageCommand& command(int32_t number) const { return ring().commands[(uint32_t)number % RankRing::MOST]; }

    // Until all other ranks have done so many of the commands; false where one is gone.
    bool wait_done(int32_t number) const {
        for (int r = 1; r < all; ++r) {
            RankDone& rank = ring().done[r];
            for (int32_t done; (int32_t)((uint32_t)(done = rank.count.load(std::memory_order_acquire)) - (uint32_t)number) < 0;)
                if (!rank_wait(*whole, rank.count, rank.sleepers, done)) return false;
        }
        return !whole->stopped.load(std::memory_order_acquire);
    }
};

struct RankPipe {
    alignas(64) std::atomic<int32_t> sent;  // both wrap around together
    std::atomic<int32_t> sent_sleepers;
    alignas(64) std::atomic<int32_t> taken;
    std::atomic<int32_t> taken_sleepers;
    uint32_t turn;  // of ranks that are not alone in their stage: which slot the piece lies in
};

// Puts or takes `nbytes` bytes, in pieces of a slot; gives up where a rank is gone. Of each rank one thread does.
// turn: of the slot that the rank's next collective would write, which nobody of its stage reads any more: the others may still
// read the other one, so that a rank that is not alone gives one piece at a time.
static void transfer(const StageRanks& r, uint32_t turn, int stage, char* data, int64_t nbytes) {
    const bool alone = r.count == 1;
    RankControl& c = *r.whole;
    const int giver = (stage - 1) * r.count + r.rank;
    RankPipe& pipe = ((RankPipe*)((char*)r.whole + RANK_PIPES))[giver];
    const auto slot = [&](uint32_t turn) { return r.all_slots + (giver * 2 + turn % 2) * r.slot_bytes; };
    const bool gives = r.stage == stage - 1;
    for (int64_t first = 0; first < nbytes; first += r.slot_bytes) {
        const size_t count = (size_t)(nbytes - first < r.slot_bytes ? nbytes - first : r.slot_bytes);
        if (gives) {
            const int32_t sent = pipe.sent.load(std::memory_order_relaxed);
            if (!rank_wait(c, pipe.taken, pipe.taken_sleepers, (int32_t)((uint32_t)sent - (alone ? 2 : 1)))) return;  // the slots are full
            if (!alone) pipe.turn = turn;
            memcpy(slot(alone ? (uint32_t)sent : turn), data + first, count);
            pipe.sent.store((int32_t)((uint32_t)sent + 1), std::memory_order_seq_cst);
            rank_wake(pipe.sent, pipe.sent_sleepers);
        } else {
            const int32_t taken = pipe.taken.load(std::memory_order_relaxed);
            if (!rank_wait(c, pipe.sent, pipe.sent_sleepers, taken)) return;
            memcpy(data + first, slot(alone ? (uint32_t)taken : pipe.turn), count);
            pipe.taken.store((int32_t)((uint32_t)taken + 1), std::memory_order_seq_cst);
            rank_wake(pipe.taken, pipe.taken_sleepers);
        }
    }
}
