// BLAKE3 (https://github.com/BLAKE3-team/BLAKE3-specs; its hash without a key): 32 chunks of a message at a time, or 16 on
// AVX2, one per lane. It checks weights as an engine is opened; SHA-256 takes twice as long, with the CPU's instructions too.
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "system_linux.h"

#if defined(__AVX512F__)
constexpr int HASH_LANES = 16;
#else
constexpr int HASH_LANES = 8;
#endif
constexpr int64_t HASH_CHUNK = 1024, HASH_MOST = 4 << 20;  // bytes of a leaf of the tree, and of the largest message

typedef uint32_t HashWords __attribute__((vector_size(4 * HASH_LANES)));
typedef uint8_t HashBytes __attribute__((vector_size(4 * HASH_LANES)));
typedef uint8_t HashDigest[32];

enum HashFlag : uint32_t { HASH_CHUNK_START = 1, HASH_CHUNK_END = 2, HASH_PARENT = 4, HASH_ROOT = 8 };
static const uint32_t HASH_START[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

// Which words of a block the rounds take: each permutes the ones before it.
struct HashSchedule {
    uint8_t word[7][16];
    constexpr HashSchedule() : word() {
        const uint8_t next[16] = {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8};
        for (int i = 0; i < 16; ++i) word[0][i] = (uint8_t)i;
        for (int r = 1; r < 7; ++r)
            for (int i = 0; i < 16; ++i) word[r][i] = word[r - 1][next[i]];
    }
};
constexpr HashSchedule HASH_SCHEDULE;

template <int N> ICC_INLINE HashWords hash_rotate(HashWords x) {
#if !defined(__AVX512F__)
    if (N == 16 || N == 8) {  // whole bytes: one shuffle
        HashBytes order;
        for (int i = 0; i < 4 * HASH_LANES; ++i) order[i] = (uint8_t)((i & ~3) | ((i + N / 8) & 3));
        return (HashWords)__builtin_shuffle((HashBytes)x, order);
    }
#endif
    return (x >> N) | (x << (32 - N));
}

// One step of a transposition: swaps the lanes of `a` that have bit S with those of `b` that have not.
template <int S> ICC_INLINE void hash_exchange(HashWords& a, HashWords& b) {
    HashWords first, second;
    for (uint32_t l = 0; l < HASH_LANES; ++l) {
        first[l] = l & S ? HASH_LANES + l - S : l;
        second[l] = l & S ? HASH_LANES + l : l + S;
    }
    const HashWords kept = __builtin_shuffle(a, b, first);
    b = __builtin_shuffle(a, b, second), a = kept;
}
template <int S> ICC_INLINE void hash_exchange_all(HashWords* rows) {
#pragma GCC unroll 16
    for (int i = 0; i < HASH_LANES; ++i)
        if (!(i & S)) hash_exchange<S>(rows[i], rows[i + S]);
}

// words[i] = the i-th word of every lane's block; lane l's lies `apart` bytes behind lane l - 1's.
ICC_INLINE void hash_load(const uint8_t* block, int64_t apart, HashWords* words) {
#pragma GCC unroll 2
    for (int part = 0; part < 16; part += HASH_LANES) {
        HashWords* rows = words + part;
#pragma GCC unroll 16
        for (int l = 0; l < HASH_LANES; ++l) memcpy(&rows[l], block + l * apart + 4 * part, sizeof(HashWords));
        hash_exchange_all<1>(rows), hash_exchange_all<2>(rows), hash_exchange_all<4>(rows);
        if (HASH_LANES == 16) hash_exchange_all<HASH_LANES / 2>(rows);
    }
}

// Two vectors in turns: the steps of one wait for each other.
constexpr int HASH_SETS = 2, HASH_NODES = HASH_SETS * HASH_LANES;
struct HashPair { HashWords set[HASH_SETS]; };
#define HASH_EACH _Pragma("GCC unroll 2") for (int s = 0; s < HASH_SETS; ++s)

ICC_INLINE HashPair hash_all(uint32_t value) {
    HashPair x;
    HASH_EACH x.set[s] = HashWords{} + value;
    return x;
}
ICC_INLINE void hash_mix(HashPair& a, HashPair& b, HashPair& c, HashPair& d, const HashPair& x, const HashPair& y) {
    HASH_EACH a.set[s] = (a.set[s] + x.set[s]) + b.set[s];
    HASH_EACH d.set[s] = hash_rotate<16>(d.set[s] ^ a.set[s]);
    HASH_EACH c.set[s] += d.set[s];
    HASH_EACH b.set[s] = hash_rotate<12>(b.set[s] ^ c.set[s]);
    HASH_EACH a.set[s] = (a.set[s] + y.set[s]) + b.set[s];
    HASH_EACH d.set[s] = hash_rotate<8>(d.set[s] ^ a.set[s]);
    HASH_EACH c.set[s] += d.set[s];
    HASH_EACH b.set[s] = hash_rotate<7>(b.set[s] ^ c.set[s]);
}
ICC_INLINE void hash_round(HashPair* v, const HashPair* w, const uint8_t* at) {
    hash_mix(v[0], v[4], v[8], v[12], w[at[0]], w[at[1]]), hash_mix(v[1], v[5], v[9], v[13], w[at[2]], w[at[3]]);
    hash_mix(v[2], v[6], v[10], v[14], w[at[4]], w[at[5]]), hash_mix(v[3], v[7], v[11], v[15], w[at[6]], w[at[7]]);
    hash_mix(v[0], v[5], v[10], v[15], w[at[8]], w[at[9]]), hash_mix(v[1], v[6], v[11], v[12], w[at[10]], w[at[11]]);
    hash_mix(v[2], v[7], v[8], v[13], w[at[12]], w[at[13]]), hash_mix(v[3], v[4], v[9], v[14], w[at[14]], w[at[15]]);
}
// state: of each lane the eight words of what came before, and then of this block too.
ICC_INLINE void hash_compress(HashPair* state, const HashPair* words, const HashPair& counter, uint32_t length, uint32_t flags) {
    HashPair v[16];
    for (int i = 0; i < 8; ++i) v[i] = state[i];
    for (int i = 0; i < 4; ++i) v[8 + i] = hash_all(HASH_START[i]);
    v[12] = counter, v[13] = hash_all(0), v[14] = hash_all(length), v[15] = hash_all(flags);
#pragma GCC unroll 1  // as fast as seven copies, which take a third of a small library and of its compile
    for (int r = 0; r < 7; ++r) hash_round(v, words, HASH_SCHEDULE.word[r]);
    for (int i = 0; i < 8; ++i) HASH_EACH state[i].set[s] = v[i].set[s] ^ v[i + 8].set[s];
}

// digests[l] = the value of the l-th of `used` nodes, which lie `apart` bytes from each other: chunks of `bytes` bytes,
// the first of which is the counter-th, or pairs of values of nodes below. All HASH_NODES are read. flags: of all
// blocks; first and last: of those as well.
static void hash_nodes(const uint8_t* data, int64_t apart, int used, int64_t bytes, uint32_t counter, uint32_t flags, uint32_t first,
                       uint32_t last, HashDigest* digests) {
    HashPair state[8], words[16], counters;
    for (int i = 0; i < 8; ++i) state[i] = hash_all(HASH_START[i]);
    for (uint32_t l = 0; l < HASH_NODES; ++l) counters.set[l / HASH_LANES][l % HASH_LANES] = flags & HASH_PARENT ? 0 : counter + l;
    const int64_t blocks = bytes > 64 ? (bytes + 63) / 64 : 1;
    for (int64_t b = 0; b < blocks; ++b) {
        if (HASH_LANES == 16 && apart == HASH_CHUNK)  // what comes next; with fewer lanes the arithmetic is what takes long
            for (int l = 0; l < HASH_NODES; ++l) _mm_prefetch((const char*)data + HASH_NODES * (HASH_CHUNK + 64 * b) + 64 * l, _MM_HINT_T1);
        HASH_EACH {
            HashWords own[16];
            hash_load(data + 64 * b + s * HASH_LANES * apart, apart, own);
            for (int i = 0; i < 16; ++i) words[i].set[s] = own[i];
        }
        const uint32_t own = flags | (b == 0 ? first : 0) | (b == blocks - 1 ? last : 0);
        hash_compress(state, words, counters, (uint32_t)(b == blocks - 1 ? bytes - 64 * b : 64), own);
    }
    uint32_t lanes[8][HASH_NODES];
    memcpy(lanes, state, sizeof lanes);
    for (int l = 0; l < used; ++l)
        for (int i = 0; i < 8; ++i) memcpy(digests[l] + 4 * i, &lanes[i][l], 4);
}

// The digest of a message of at most HASH_MOST bytes. What nodes beyond the last pair read means nothing.
static void hash_message(const uint8_t* data, int64_t size, uint8_t* digest) {
    alignas(64) HashDigest nodes[HASH_MOST / HASH_CHUNK + 2 * HASH_NODES];
    populate(data, (size_t)size);
    const int64_t full = size / HASH_CHUNK, rest = size % HASH_CHUNK;
    const uint32_t root = size <= HASH_CHUNK ? HASH_ROOT : 0;
    int64_t count = 0;
    for (; count + HASH_NODES <= full; count += HASH_NODES)
        hash_nodes(data + count * HASH_CHUNK, HASH_CHUNK, HASH_NODES, HASH_CHUNK, (uint32_t)count, 0, HASH_CHUNK_START, HASH_CHUNK_END, nodes + count);
    for (; count < full; ++count)
        hash_nodes(data + count * HASH_CHUNK, 0, 1, HASH_CHUNK, (uint32_t)count, 0, HASH_CHUNK_START, HASH_CHUNK_END | root, nodes + count);
    if (rest || !full) {
        uint8_t end[HASH_CHUNK] = {};
        memcpy(end, data + full * HASH_CHUNK, (size_t)rest);
        hash_nodes(end, 0, 1, rest, (uint32_t)count, 0, HASH_CHUNK_START, HASH_CHUNK_END | root, nodes + count);
        ++count;
    }
    while (count > 1) {  // pairs; what is left over waits for the level above
        const int64_t pairs = count / 2;
        for (int64_t at = 0; at < pairs; at += HASH_NODES) {
            const int used = (int)(pairs - at < HASH_NODES ? pairs - at : HASH_NODES);
            hash_nodes(nodes[2 * at], 64, used, 64, 0, HASH_PARENT | (count == 2 ? HASH_ROOT : 0), 0, 0, nodes + at);
        }
        if (count & 1) memcpy(nodes[pairs], nodes[count - 1], sizeof(HashDigest));
        count -= pairs;
    }
    memcpy(digest, nodes[0], sizeof(HashDigest));
}

// See icc_blake3 in abi.h.
static void hash_pieces(const uint8_t* data, int64_t size, int64_t piece, int64_t* next, HashDigest* digests) {
    for (int64_t p; (p = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED)) * piece < size;)
        hash_message(data + p * piece, size - p * piece < piece ? size - p * piece : piece, digests[p]);
}
