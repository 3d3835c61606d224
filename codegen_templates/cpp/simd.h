// Sixteen-lane vectors, the same on every ISA level: one zmm register on AVX-512, a pair of ymm registers on AVX2.
// Because the lane structure never changes, a kernel gives the same bits on every level. Loads and stores take any
// alignment. The build forbids the compiler to contract a*b+c, so every fused multiply-add is written out here.
#pragma once
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define ICC_INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
#include "simd_avx512.h"
#else
#include "simd_avx2.h"
#endif

// ---- the first n lanes ----
// AVX-512 has masks for it. Sanitizers do not see what a masked access touches, so their builds do as AVX2 does.

#if defined(__AVX512F__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)

ICC_INLINE __mmask16 lanes(int n) { return (__mmask16)((1u << n) - 1u); }
ICC_INLINE VF vload_n(const float* p, int n) { return {_mm512_maskz_loadu_ps(lanes(n), p)}; }
ICC_INLINE VI viload_n(const int32_t* p, int n) { return {_mm512_maskz_loadu_epi32(lanes(n), p)}; }
ICC_INLINE void vstore_n(float* p, VF x, int n) { _mm512_mask_storeu_ps(p, lanes(n), x.v); }
ICC_INLINE void vistore_n(int32_t* p, VI x, int n) { _mm512_mask_storeu_epi32(p, lanes(n), x.v); }

#else

// Nearly always all sixteen are there: a copy of so many bytes as the code says later is a call, and a store that waits.
ICC_INLINE VF vload_n(const float* p, int n) {
    if (n == 16) return vload(p);
    float t[16] = {};
    memcpy(t, p, 4 * (size_t)n);
    return vload(t);
}
ICC_INLINE VI viload_n(const int32_t* p, int n) {
    if (n == 16) return viload(p);
    int32_t t[16] = {};
    memcpy(t, p, 4 * (size_t)n);
    return viload(t);
}
ICC_INLINE void vstore_n(float* p, VF x, int n) {
    if (n == 16) return vstore(p, x);
    float t[16];
    vstore(t, x);
    memcpy(p, t, 4 * (size_t)n);
}
ICC_INLINE void vistore_n(int32_t* p, VI x, int n) {
    if (n == 16) return vistore(p, x);
    int32_t t[16];
    vistore(t, x);
    memcpy(p, t, 4 * (size_t)n);
}

#endif

// ---- the same on both ----

ICC_INLINE VI load_pairs_n(const int8_t* p, int n) {
    int8_t t[32] = {};
    memcpy(t, p, 2 * (size_t)n);
    return load_pairs(t);
}

// Codes in pairs of 16 bits, which stand for the odd numbers from -TOP to TOP.
template <int TOP> ICC_INLINE VI odd_pairs(VI codes) { return sub16(shl<1>(codes), vi(TOP * 0x10001)); }

// What sums by dot_u8 of bytes times signed ones begin with: where a level multiplies what bytes are more than BYTE_BIAS, that
// times the sum of the signed ones.
ICC_INLINE VI begin_bytes(float sum) { return BYTE_BIAS ? vi(BYTE_BIAS * (int32_t)sum) : vi(0); }

ICC_INLINE float hsum(VF x) {
    const __m256 h = fold(x);
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
ICC_INLINE float hmax(VF x) {
    const __m256 h = fold_max(x);
    __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}
ICC_INLINE VI iota() {
    static const int32_t v[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return viload(v);
}
ICC_INLINE VF vabs(VF x) { return from_bits(bits(x) & vi(0x7fffffff)); }
ICC_INLINE VF vneg(VF x) { return from_bits(bits(x) ^ vi((int32_t)0x80000000)); }
ICC_INLINE VF copysign(VF mag, VF sgn) {
    return from_bits((bits(mag) & vi(0x7fffffff)) | (bits(sgn) & vi((int32_t)0x80000000)));
}
// Maximum and minimum that propagate NaN from either side, as torch does.
ICC_INLINE VF vmax(VF a, VF b) { return select(ne(a, a), a, max_raw(a, b)); }
ICC_INLINE VF vmin(VF a, VF b) { return select(ne(a, a), a, min_raw(a, b)); }
ICC_INLINE VI to_bool(VB c) { return select(c, vi(1), vi(0)); }
ICC_INLINE VB is_true(VI x) { return ne(x, vi(0)); }

// Scalar conversions of the 16-bit formats.
ICC_INLINE float bf16_value(uint16_t h) {
    const uint32_t u = (uint32_t)h << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}
ICC_INLINE uint16_t bf16_bits(float f) {  // to nearest even; NaN stays NaN
    uint32_t u;
    memcpy(&u, &f, 4);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 64u);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
constexpr float F16_TOP = 65504.0f;
ICC_INLINE float f16_value(uint16_t h) { return _cvtsh_ss(h); }
ICC_INLINE uint16_t f16_bits(float f) { return (uint16_t)_cvtss_sh(f, 0); }

// 8-bit floats of 4 exponent bits, bias 7, and 3 mantissa bits; 0x7f and 0xff are NaN. Shifted into a half they are worth
// 2^-8 of themselves, subnormals too: the conversion of halves gives those exactly. So loads of sixteen leave 2^8 to do.
constexpr float E4M3_UNIT = 256.0f;
ICC_INLINE __m256i finite_e4m3_halves(const uint8_t* p) {
    const __m256i shifted = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), 7);
    return _mm256_and_si256(shifted, _mm256_set1_epi16((short)0xbfff));
}
ICC_INLINE __m256i e4m3_halves(const uint8_t* p) {
    const __m128i x = _mm_loadu_si128((const __m128i*)p), sign = _mm_set1_epi8((char)0x80);
    const __m128i nan = _mm_cmpeq_epi8(_mm_or_si128(x, sign), _mm_set1_epi8(-1));
    return _mm256_or_si256(finite_e4m3_halves(p), _mm256_cvtepi8_epi16(nan));
}
constexpr float E4M3_TOP = 448.0f;
ICC_INLINE uint8_t e4m3_bits(float f) {  // to nearest even, at most E4M3_TOP
    uint32_t u;
    memcpy(&u, &f, 4);
    const uint32_t sign = u >> 24 & 0x80;
    u &= 0x7fffffff;
    if (u > 0x43e00000) u = 0x43e00000;
    if (u < 0x3c800000) {  // below 2^-6: multiples of 2^-9
        memcpy(&f, &u, 4);
        return (uint8_t)(sign | (uint32_t)lrintf(f * 512.0f));
    }
    return (uint8_t)(sign | (((u + 0x7ffff + (u >> 20 & 1)) >> 20) - 960));
}
ICC_INLINE float e4m3_value(uint8_t c) {
    if ((c & 0x7f) == 0x7f) return NAN;
    return f16_value((uint16_t)((c & 0x80) << 8 | (c & 0x7f) << 7)) * E4M3_UNIT;
}

// Typed element access, so that one kernel source serves every storage format.
struct Bf16 { uint16_t h; };
struct Half { uint16_t h; };
struct E4m3 { uint8_t h; };
struct FiniteE4m3 { uint8_t h; };  // of a KV cache, where a scale is NaN instead
ICC_INLINE VF vload(const Bf16* p) { return load_bf16((const uint16_t*)p); }
ICC_INLINE VF vload(const Half* p) { return load_f16((const uint16_t*)p); }
ICC_INLINE VF vload(const E4m3* p) { return halves_to_float(e4m3_halves((const uint8_t*)p)); }  // times 2^-8
ICC_INLINE VF vload(const FiniteE4m3* p) { return halves_to_float(finite_e4m3_halves((const uint8_t*)p)); }  // the same
template <class T> ICC_INLINE VF vload_n16(const T* p, int n) {
    T t[16] = {};
    memcpy(t, p, 2 * (size_t)n);
    return vload(t);
}
ICC_INLINE VF vload_n(const Bf16* p, int n) { return vload_n16(p, n); }
ICC_INLINE VF vload_n(const Half* p, int n) { return vload_n16(p, n); }
template <class T> ICC_INLINE VF vload_n8(const T* p, int n) {
    T t[16] = {};
    memcpy(t, p, (size_t)n);
    return vload(t);
}
ICC_INLINE VF vload_n(const E4m3* p, int n) { return vload_n8(p, n); }
ICC_INLINE VF vload_n(const FiniteE4m3* p, int n) { return vload_n8(p, n); }
ICC_INLINE void vstore(Bf16* p, VF x) { store_bf16((uint16_t*)p, x); }
ICC_INLINE void vstore_n(Bf16* p, VF x, int n) {
    Bf16 t[16];
    vstore(t, x);
    memcpy(p, t, 2 * (size_t)n);
}
ICC_INLINE float value(float x) { return x; }
ICC_INLINE float value(Bf16 x) { return bf16_value(x.h); }
ICC_INLINE float value(Half x) { return f16_value(x.h); }
ICC_INLINE void assign(float& d, float x) { d = x; }
ICC_INLINE void assign(Bf16& d, float x) { d.h = bf16_bits(x); }
ICC_INLINE void assign(Half& d, float x) { d.h = f16_bits(x); }
// Sixteen signed bytes as 16-bit integers: of each four the first, third, second and fourth, `stride` integers further on.
ICC_INLINE void store_pairs(int16_t* p, int64_t stride, const int8_t* q) {
    const __m128i order = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
    const __m256i x = _mm256_cvtepi8_epi16(_mm_shuffle_epi8(_mm_loadu_si128((const __m128i*)q), order));
    const __m128i low = _mm256_castsi256_si128(x), high = _mm256_extracti128_si256(x, 1);
    _mm_storel_epi64((__m128i*)p, low), _mm_storeh_pd((double*)(p + stride), _mm_castsi128_pd(low));
    _mm_storel_epi64((__m128i*)(p + 2 * stride), high), _mm_storeh_pd((double*)(p + 3 * stride), _mm_castsi128_pd(high));
}
