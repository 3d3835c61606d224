// SHA-256 (FIPS 180-4) of many pieces at a time, one per lane, since the rounds of one piece wait for each other: 3.3 GB/s
// per core with AVX-512 and 1.9 with AVX2 on Zen 4, whose own instructions give 1.8. It checks weights as an engine is opened.
#pragma once
#include <cpuid.h>
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
constexpr int SHA_LANES = 16;
#else
constexpr int SHA_LANES = 8;
#endif

typedef uint32_t ShaWords __attribute__((vector_size(4 * SHA_LANES)));
typedef uint8_t ShaBytes __attribute__((vector_size(4 * SHA_LANES)));

static const uint32_t SHA_START[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
static const uint32_t SHA_ROUND[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be,
    0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa,
    0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85,
    0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3,
    0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f,
    0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

ICC_INLINE ShaWords sha_rotate(ShaWords x, int n) { return (x >> n) | (x << (32 - n)); }
ICC_INLINE ShaWords sha_swap_bytes(ShaWords x) {
    ShaBytes order;
    for (int i = 0; i < 4 * SHA_LANES; ++i) order[i] = (uint8_t)(i ^ 3);
    return (ShaWords)__builtin_shuffle((ShaBytes)x, order);
}

// One step of a transposition: swaps the lanes of `a` that have bit S with those of `b` that have not.
template <int S> ICC_INLINE void sha_exchange(ShaWords& a, ShaWords& b) {
    ShaWords first, second;
    for (uint32_t l = 0; l < SHA_LANES; ++l) {
        first[l] = l & S ? SHA_LANES + l - S : l;
        second[l] = l & S ? SHA_LANES + l : l + S;
    }
    const ShaWords kept = __builtin_shuffle(a, b, first);
    b = __builtin_shuffle(a, b, second), a = kept;
}
template <int S> ICC_INLINE void sha_exchange_all(ShaWords* rows) {
#pragma GCC unroll 16
    for (int i = 0; i < SHA_LANES; ++i)
        if (!(i & S)) sha_exchange<S>(rows[i], rows[i + S]);
}

// words[i] = the i-th big-endian word of every lane's block.
ICC_INLINE void sha_load(const uint8_t* const* blocks, ShaWords* words) {
#pragma GCC unroll 2
    for (int part = 0; part < 16; part += SHA_LANES) {
        ShaWords* rows = words + part;
#pragma GCC unroll 16
        for (int l = 0; l < SHA_LANES; ++l) {
            memcpy(&rows[l], blocks[l] + 4 * part, sizeof(ShaWords));
            rows[l] = sha_swap_bytes(rows[l]);
        }
        sha_exchange_all<1>(rows), sha_exchange_all<2>(rows), sha_exchange_all<4>(rows);
        if (SHA_LANES == 16) sha_exchange_all<SHA_LANES / 2>(rows);
    }
}

// Round J of the eight from `first`. s: the variables a to h, which take turns instead of moving.
template <int J> ICC_INLINE void sha_round(int first, ShaWords* s, ShaWords* w) {
    const int i = first + J;
    const ShaWords a = s[(8 - J) & 7], b = s[(9 - J) & 7], c = s[(10 - J) & 7];
    const ShaWords e = s[(12 - J) & 7], f = s[(13 - J) & 7], g = s[(14 - J) & 7];
    ShaWords &d = s[(11 - J) & 7], &h = s[(15 - J) & 7];
    if (first >= 16) {
        const ShaWords x = w[(i + 1) & 15], y = w[(i + 14) & 15];
        w[i & 15] += (sha_rotate(x, 7) ^ sha_rotate(x, 18) ^ (x >> 3)) + w[(i + 9) & 15] + (sha_rotate(y, 17) ^ sha_rotate(y, 19) ^ (y >> 10));
    }
    const ShaWords t = h + (sha_rotate(e, 6) ^ sha_rotate(e, 11) ^ sha_rotate(e, 25)) + ((e & f) ^ (~e & g)) + SHA_ROUND[i] + w[i & 15];
    d += t;
    h = t + (sha_rotate(a, 2) ^ sha_rotate(a, 13) ^ sha_rotate(a, 22)) + ((a & b) | (c & (a | b)));
}
ICC_INLINE void sha_compress(ShaWords* state, ShaWords* w) {
    ShaWords s[8];
    for (int i = 0; i < 8; ++i) s[i] = state[i];
    for (int i = 0; i < 64; i += 8) {
        sha_round<0>(i, s, w), sha_round<1>(i, s, w), sha_round<2>(i, s, w), sha_round<3>(i, s, w);
        sha_round<4>(i, s, w), sha_round<5>(i, s, w), sha_round<6>(i, s, w), sha_round<7>(i, s, w);
    }
    for (int i = 0; i < 8; ++i) state[i] += s[i];
}

// Where the CPU has instructions for rounds, a piece's wait for each other: SHA_STREAMS pieces take turns. On Zen 3 with AVX2
// 2.7 GB/s, where eight lanes make 1.6 and one stream 1.6; on Zen 5 3.1, where sixteen lanes make 4.4. State and words as the instructions want them: ABEF and CDGH.
constexpr int SHA_STREAMS = 2;
static bool sha_instructions() {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b >> 29 & 1);
}

// Block after block of SHA_STREAMS pieces.
__attribute__((target("sha,avx2"))) static void sha_streams(__m128i (*state)[2], const uint8_t* const* at, int64_t blocks) {
    const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0bll, 0x0405060700010203ll);
    __m128i s[SHA_STREAMS][2], w[SHA_STREAMS][4];
    for (int n = 0; n < SHA_STREAMS; ++n) s[n][0] = state[n][0], s[n][1] = state[n][1];
    for (int64_t block = 0; block < blocks; ++block) {
#pragma GCC unroll 4
        for (int n = 0; n < SHA_STREAMS; ++n) {
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i)
                w[n][i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i*)(at[n] + 64 * block) + i), swap);
            state[n][0] = s[n][0], state[n][1] = s[n][1];
        }
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i)
#pragma GCC unroll 4
            for (int n = 0; n < SHA_STREAMS; ++n) {
                __m128i& now = w[n][i & 3];
                if (i >= 4) {
                    const __m128i last = w[n][(i + 3) & 3];
                    now = _mm_sha256msg1_epu32(now, w[n][(i + 1) & 3]);
                    now = _mm_add_epi32(now, _mm_alignr_epi8(last, w[n][(i + 2) & 3], 4));
                    now = _mm_sha256msg2_epu32(now, last);
                }
                const __m128i k = _mm_add_epi32(now, _mm_loadu_si128((const __m128i*)(SHA_ROUND + 4 * i)));
                s[n][1] = _mm_sha256rnds2_epu32(s[n][1], s[n][0], k);
                s[n][0] = _mm_sha256rnds2_epu32(s[n][0], s[n][1], _mm_shuffle_epi32(k, 0x0e));
            }
#pragma GCC unroll 4
        for (int n = 0; n < SHA_STREAMS; ++n)
            s[n][0] = _mm_add_epi32(s[n][0], state[n][0]), s[n][1] = _mm_add_epi32(s[n][1], state[n][1]);
    }
    for (int n = 0; n < SHA_STREAMS; ++n) state[n][0] = s[n][0], state[n][1] = s[n][1];
}

static void sha256_by_instructions(const uint8_t* data, int64_t count, int64_t size, uint8_t (*digests)[32]) {
    uint8_t end[64] = {0x80};
    for (int i = 0; i < 8; ++i) end[56 + i] = (uint8_t)((uint64_t)size * 8 >> (56 - 8 * i));
    for (int64_t first = 0; first < count; first += SHA_STREAMS) {
        const int used = (int)(count - first < SHA_STREAMS ? count - first : SHA_STREAMS);
        const uint8_t *at[SHA_STREAMS], *ends[SHA_STREAMS];
        __m128i state[SHA_STREAMS][2];
        for (int n = 0; n < SHA_STREAMS; ++n) {  // streams beyond the last piece do it again
            at[n] = data + (first + (n < used ? n : used - 1)) * size, ends[n] = end;
            const uint32_t* h = SHA_START;
            state[n][0] = _mm_set_epi32((int)h[0], (int)h[1], (int)h[4], (int)h[5]);
            state[n][1] = _mm_set_epi32((int)h[2], (int)h[3], (int)h[6], (int)h[7]);
        }
        sha_streams(state, at, size / 64), sha_streams(state, ends, 1);
        for (int n = 0; n < used; ++n) {
            uint32_t abef[4], cdgh[4];
            memcpy(abef, &state[n][0], 16), memcpy(cdgh, &state[n][1], 16);
            const uint32_t h[8] = {abef[3], abef[2], cdgh[3], cdgh[2], abef[1], abef[0], cdgh[1], cdgh[0]};
            for (int i = 0; i < 8; ++i) {
                const uint32_t word = __builtin_bswap32(h[i]);
                memcpy(digests[first + n] + 4 * i, &word, 4);
            }
        }
    }
}

// digests[p] = SHA-256 of the p-th piece; `size` bytes each, a multiple of 64.
static void sha256_pieces(const uint8_t* data, int64_t count, int64_t size, uint8_t (*digests)[32]) {
    int64_t in_lanes = count;
#ifndef ICC_SHA_LANES  // in tests
    if (sha_instructions()) {  // 16 lanes are faster where most have a piece of their own, 8 never
        const int64_t filled = (count + 4) / SHA_LANES * SHA_LANES;
        in_lanes = SHA_LANES < 16 ? 0 : filled < count ? filled : count;
        sha256_by_instructions(data + in_lanes * size, count - in_lanes, size, digests + in_lanes);
    }
#endif
    for (int64_t first = 0; first < in_lanes; first += SHA_LANES) {
        const int used = (int)(in_lanes - first < SHA_LANES ? in_lanes - first : SHA_LANES);
        const uint8_t* at[SHA_LANES];  // lanes beyond the last piece do it again
        for (int l = 0; l < SHA_LANES; ++l) at[l] = data + (first + (l < used ? l : used - 1)) * size;
        ShaWords state[8], words[16];
        for (int i = 0; i < 8; ++i) state[i] = ShaWords{} + SHA_START[i];
        for (int64_t done = 0; done < size; done += 64) {
            sha_load(at, words);
            sha_compress(state, words);
            for (int l = 0; l < SHA_LANES; ++l) at[l] += 64;
        }
        for (int i = 0; i < 16; ++i) words[i] = ShaWords{};
        words[0] += 0x80000000u, words[14] += (uint32_t)(size >> 29), words[15] += (uint32_t)(size << 3);
        sha_compress(state, words);
        for (int l = 0; l < used; ++l)
            for (int i = 0; i < 8; ++i) {
                const uint32_t word = __builtin_bswap32(state[i][l]);
                memcpy(digests[first + l] + 4 * i, &word, 4);
            }
    }
}
