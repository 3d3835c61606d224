// What this machine's cores and memory give: bytes read per second, int8 and float operations per second.
// Called through ctypes by limits.py; every function runs on `threads` threads and returns a rate of all together.
#include <immintrin.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

#include <atomic>
#include <thread>
#include <vector>

static double seconds() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// Runs work(thread) on all threads, which start together; seconds until the last one ends.
template <class Work> static double together(int threads, Work work) {
    std::atomic<int> ready{0};
    std::vector<std::thread> team;
    double start = 0;
    const auto body = [&](int t) {
        ready.fetch_add(1);
        while (ready.load() < threads) {}
        if (t == 0) start = seconds();
        work(t);
    };
    for (int t = 1; t < threads; ++t) team.emplace_back(body, t);
    body(0);
    for (auto& t : team) t.join();
    return seconds() - start;
}

static volatile int64_t sink;

// Bytes per second of reading `bytes` of `memory` once, each thread its part as STREAMS (4 or 8) sequential streams, `ahead` bytes
// of which are prefetched. The streams advance together, a cache line at a time.
template <int STREAMS> static double read_streams(int threads, const char* memory, int64_t bytes, int ahead) {
    const int64_t part = bytes / threads / STREAMS / 4096 * 4096;
    const double took = together(threads, [&](int t) {
        const char* base = memory + t * part * STREAMS;
        __m256i sum[STREAMS] = {};
        for (int64_t at = 0; at < part; at += 64)
#pragma GCC unroll 16
            for (int s = 0; s < STREAMS; ++s) {
                const char* p = base + s * part + at;
                if (ahead) _mm_prefetch(p + ahead, _MM_HINT_T0);
                sum[s] = _mm256_add_epi64(sum[s], _mm256_add_epi64(_mm256_load_si256((const __m256i*)p),
                                                                   _mm256_load_si256((const __m256i*)(p + 32))));
            }
        for (auto& x : sum) sink = sink + _mm256_extract_epi64(x, 0);
    });
    return (double)(part * STREAMS * threads) / took;
}

extern "C" double read_rate(int threads, const char* memory, int64_t bytes, int streams, int ahead) {
    return streams == 4 ? read_streams<4>(threads, memory, bytes, ahead) : read_streams<8>(threads, memory, bytes, ahead);
}

constexpr int ROUNDS = 20000000, CHAINS = 12;
// Twelve chains hide the latency of a multiplication; each has a name, because g++ keeps an array of them on the stack.
#define EACH(STEP) STEP(0) STEP(1) STEP(2) STEP(3) STEP(4) STEP(5) STEP(6) STEP(7) STEP(8) STEP(9) STEP(10) STEP(11)

#if defined(__AVX512F__)
typedef __m512 VF;
static VF fma(VF a, VF b, VF c) { return _mm512_fmadd_ps(a, b, c); }
static VF vf(float x) { return _mm512_set1_ps(x); }
#else
typedef __m256 VF;
static VF fma(VF a, VF b, VF c) { return _mm256_fmadd_ps(a, b, c); }
static VF vf(float x) { return _mm256_set1_ps(x); }
#endif
#if defined(__AVX512VNNI__)
typedef __m512i VI;
static VI dot(VI acc, VI u, VI s) { return _mm512_dpbusd_epi32(acc, u, s); }
static VI vi(int x) { return _mm512_set1_epi8((char)x); }
#else
typedef __m256i VI;
static VI dot(VI acc, VI u, VI s) {
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(u, s), _mm256_set1_epi16(1)));
}
static VI vi(int x) { return _mm256_set1_epi8((char)x); }
#endif

// Integer operations per second (a multiplication and an addition count as two) of products of bytes.
extern "C" double int8_rate(int threads) {
    const double took = together(threads, [&](int t) {
        VI a = vi(t + 1), b = vi(3);
#define START(i) VI c##i = vi(i);
#define STEP(i) asm volatile("" : "+x"(a)); c##i = dot(c##i, a, b);
#define END(i) sink = *(int64_t*)&c##i;
        EACH(START)
        for (int i = 0; i < ROUNDS; ++i) { EACH(STEP) }
        EACH(END)
#undef START
#undef STEP
    });
    return 2.0 * sizeof(VI) * CHAINS * ROUNDS * threads / took;
}

// Float operations per second of fused multiply-additions.
extern "C" double float_rate(int threads) {
    const double took = together(threads, [&](int t) {
        VF a = vf(1e-9f * (float)(t + 1)), b = vf(0.5f);
#define START(i) VF c##i = vf(i);
#define STEP(i) c##i = fma(c##i, b, a);
        EACH(START)
        for (int i = 0; i < ROUNDS; ++i) { EACH(STEP) }
        EACH(END)
    });
    return 2.0 * sizeof(VF) / sizeof(float) * CHAINS * ROUNDS * threads / took;
}
