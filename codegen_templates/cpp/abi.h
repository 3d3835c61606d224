// The C interface of a generated CPU library: one library per ISA level, loaded through ctypes by runtime/executor/cpu/library.py.
// Every pointer stays owned by the caller and must live as long as the handle (weights, arena, kv) or the call (batch).
#pragma once
#include <stdint.h>

#define ICC_ABI_VERSION 6

extern "C" {

// One packed step: T tokens of S sequences, sequence s owning tokens [seq_starts[s], seq_starts[s+1]); as the layers of one
// KV group see it: slot_mapping, block_tables and moves are the group's, all else is the same for all groups.
struct icc_batch {
    int32_t num_tokens;             // T
    int32_t num_seqs;               // S
    int32_t num_logit_rows;         // L
    int32_t max_blocks;             // B, how many entries the rows of block_tables are apart
    int32_t greedy;                 // not 0: of each row only the largest logit is wanted; any other may be minus infinity
    const int32_t* token_ids;       // [T]
    const int32_t* positions;       // [T] position of each token in its sequence
    const int32_t* slot_mapping;    // [T] block * block_size + offset where the token's K and V go
    const int32_t* seq_starts;      // [S+1]
    const int32_t* context_lens;    // [S] tokens in the cache after this step, this step's included
    const int32_t* block_tables;    // [S, B] of a position that no token of the step sees, the entry means nothing
    const int32_t* logit_rows;      // [L] ascending token indices whose logits are wanted
    float* logits;                  // [L, vocab] written by the step
    const int32_t* parents;         // [T] in a sequence that verifies a tree of drafts: the token before each token, as an
                                    // index into the batch; negative elsewhere. NULL: no sequence does
    const int32_t* moves;           // [M, 2] slots whose K and V are copied, from and to, in order, before all else
    int32_t num_moves;              // M
    int32_t* drafts;                // [L, heads, ranks] written by the draft heads of libraries of format 2; others leave it
    const int32_t* prompt_lens;     // [S] tokens that a sequence began with
};

// A tree of drafts: its first token is the last that was sampled, at position p. The others follow their parents, so
// that positions[t] = positions[parents[t]] + 1, but lie in slots in the order of the batch. Each token sees the keys
// before p and, from there on, only those of its own ancestors.

int32_t icc_abi_version(void);

// digests[p] = BLAKE3 of the p-th of the pieces of `piece` bytes, 4 MiB at most, that `size` bytes are; the last may be shorter.
// Begins with piece *next, and adds one to it for each that it takes: threads that call it with one counter share the work.
// Needs no handle.
void icc_blake3(const uint8_t* data, int64_t size, int64_t piece, int64_t* next, uint8_t (*digests)[32]);

// found[r] = the index of the largest of the `width` values of row r, the first of equals; -1 if that is infinite, or one is
// not a number. Needs no handle.
void icc_largest(const float* logits, int32_t rows, int64_t width, int32_t* found);

// weights[i] is the address of the i-th weight of program.json (in its order), 64-byte aligned. kv points to the groups,
// one behind the other, of which g has num_blocks[g] blocks. Starts num_threads - 1 threads, which park between steps.
// NULL on failure.
void* icc_create(int32_t num_threads, const void* const* weights, void* arena, void* kv, const int64_t* num_blocks);

// inputs[i] is where the i-th input that program.json declares lies, in its order: rows of the tokens of a step, one after the
// other. It must live as long as the handle. Before the first step of a program that declares any.
void icc_inputs(void* handle, const void* const* inputs);

// batches[g] is the step as KV group g sees it.
// Executes the whole program once, or one of its sections (program.json, counted from 0). One that runs
// behind a step has logit_rows of its own, which are rows of that step's logits, and the other fields as they were: what it
// is given and gives besides lies in the arena. 0 on success.
int32_t icc_step(void* handle, const struct icc_batch* batches);
int32_t icc_section(void* handle, int32_t section, const struct icc_batch* batches);

void icc_destroy(void* handle);

// What a handle with so many threads takes beside the memory that it is given: working memory of the threads, and what they
// share, of which little is touched unless few sequences have a long context.
void icc_scratch(int32_t num_threads, int64_t* of_threads, int64_t* shared);

// How much of what they share so many sequences of so many tokens touch as they go on token by token.
int64_t icc_shared_touched(int32_t num_threads, int32_t num_seqs, int32_t length);

}
