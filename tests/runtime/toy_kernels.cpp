// A model of a few lines behind the kernel interface: it keeps token ids where a model keeps keys and values, and reads
// each context back through the block tables. weights[0][0] picks the rule for the next token: 0 = last + 1,
// 1 = a hash of the whole context. The vocabulary size is weights[0][1].
#include <cstdlib>
#include <cstring>
#include "abi.h"
#define ICC_INLINE static inline __attribute__((always_inline))
#include "blake3.h"

namespace {
constexpr int kBlock = 4;
constexpr int kBlockBytes = 64;

struct Engine {
    const int32_t* config;
    char* kv;
    int64_t num_blocks;
    int32_t* arena;
};

int32_t* slot(Engine* e, int64_t index) {
    return reinterpret_cast<int32_t*>(e->kv + index / kBlock * kBlockBytes) + index % kBlock;
}
}  // namespace

extern "C" {
int32_t icc_abi_version(void) { return TOY_ABI; }

void icc_blake3(const uint8_t* data, int64_t size, int64_t piece, int64_t* next, uint8_t (*digests)[32]) {
    hash_pieces(data, size, piece, next, digests);
}

void* icc_create(int32_t num_threads, const void* const* weights, void* arena, void* kv, const int64_t* num_blocks) {
    if (num_threads < 1 || reinterpret_cast<uintptr_t>(weights[0]) % 64 || reinterpret_cast<uintptr_t>(arena) % 64)
        return nullptr;
    Engine* e = static_cast<Engine*>(std::malloc(sizeof(Engine)));
    *e = {static_cast<const int32_t*>(weights[0]), static_cast<char*>(kv), num_blocks[0], static_cast<int32_t*>(arena)};
    return e;
}

int32_t icc_step(void* handle, const icc_batch* b) {
    Engine* e = static_cast<Engine*>(handle);
    const int32_t rule = e->config[0], vocab = e->config[1];
    for (int m = 0; m < b->num_moves; m++) *slot(e, b->moves[2 * m + 1]) = *slot(e, b->moves[2 * m]);
    for (int t = 0; t < b->num_tokens; t++) {
        if (b->token_ids[t] < 0 || b->token_ids[t] >= vocab) return 1;
        if (b->slot_mapping[t] < 0 || b->slot_mapping[t] >= e->num_blocks * kBlock) return 2;
        *slot(e, b->slot_mapping[t]) = b->token_ids[t];
        e->arena[t] = b->token_ids[t];  // the arena holds four bytes per token
    }
    int row = 0;
    for (int s = 0; s < b->num_seqs; s++) {
        const int first = b->seq_starts[s], last = b->seq_starts[s + 1] - 1;
        const bool tree = b->parents && last > first && b->parents[first + 1] >= 0;
        if (b->positions[first] + last - first + 1 != b->context_lens[s]) return 3;
        for (; row < b->num_logit_rows && b->logit_rows[row] <= last; row++) {
            const int token = b->logit_rows[row];
            if (token < first) return 4;
            int64_t hash = 0;
            int32_t seen = 0;
            for (int p = 0; p <= b->positions[token]; p++) {
                const int64_t block = b->block_tables[(int64_t)s * b->max_blocks + p / kBlock];
                seen = *slot(e, block * kBlock + p % kBlock);
                if (tree && p >= b->positions[first]) {  // from here on the token's own ancestors
                    int t = token;
                    while (b->positions[t] > p) t = b->parents[t];
                    seen = *slot(e, b->slot_mapping[t]);
                }
                hash = (hash * 31 + seen + 7) % 1000003;
            }
            if (seen != b->token_ids[token]) return 5;
            float* logits = b->logits + (int64_t)row * vocab;
            std::memset(logits, 0, sizeof(float) * vocab);
            logits[rule == 0 ? (seen + 1) % vocab : hash % vocab] = 10.0f;
        }
    }
    return row == b->num_logit_rows ? 0 : 6;
}

int32_t icc_section(void*, int32_t, const icc_batch*) { return 1; }

void icc_destroy(void* handle) { std::free(handle); }
}
