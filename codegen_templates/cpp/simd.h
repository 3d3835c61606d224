// Sixteen-lane vectors, the same on every ISA level: one zmm register on AVX-512, a pair of ymm registers on AVX2.
// Because the lane structure never changes, a kernel gives the same bits on every level. Loads and stores take any
// alignment. The build forbids the compiler to contract a*b+c, so every fused multiply-add is written out here.
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define ICC_INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)

struct VF { __m512 v; };
struct VI { __m512i v; };
struct VB { __mmask16 m; };

ICC_INLINE VF vf(float x) { return {_mm512_set1_ps(x)}; }
ICC_INLINE VI vi(int32_t x) { return {_mm512_set1_epi32(x)}; }
ICC_INLINE VF vload(const float* p) { return {_mm512_loadu_ps(p)}; }
ICC_INLINE VI viload(const void* p) { return {_mm512_loadu_si512(p)}; }
ICC_INLINE void vstore(float* p, VF x) { _mm512_storeu_ps(p, x.v); }
ICC_INLINE void vistore(void* p, VI x) { _mm512_storeu_si512(p, x.v); }

ICC_INLINE VF operator+(VF a, VF b) { return {_mm512_add_ps(a.v, b.v)}; }
ICC_INLINE VF operator-(VF a, VF b) { return {_mm512_sub_ps(a.v, b.v)}; }
ICC_INLINE VF operator*(VF a, VF b) { return {_mm512_mul_ps(a.v, b.v)}; }
ICC_INLINE VF operator/(VF a, VF b) { return {_mm512_div_ps(a.v, b.v)}; }
ICC_INLINE VF fma(VF a, VF b, VF c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
ICC_INLINE VF fnma(VF a, VF b, VF c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }
ICC_INLINE VF min_raw(VF a, VF b) { return {_mm512_min_ps(a.v, b.v)}; }  // b where either is NaN
ICC_INLINE VF max_raw(VF a, VF b) { return {_mm512_max_ps(a.v, b.v)}; }  // b where either is NaN
ICC_INLINE VF vsqrt(VF a) { return {_mm512_sqrt_ps(a.v)}; }
template <int MODE> ICC_INLINE VF vround(VF a) { return {_mm512_roundscale_ps(a.v, MODE | _MM_FROUND_NO_EXC)}; }
ICC_INLINE VI to_int_nearest(VF a) { return {_mm512_cvtps_epi32(a.v)}; }
ICC_INLINE VI to_int_trunc(VF a) { return {_mm512_cvttps_epi32(a.v)}; }
ICC_INLINE VF to_float(VI a) { return {_mm512_cvtepi32_ps(a.v)}; }
ICC_INLINE VI bits(VF a) { return {_mm512_castps_si512(a.v)}; }
ICC_INLINE VF from_bits(VI a) { return {_mm512_castsi512_ps(a.v)}; }

ICC_INLINE VI operator+(VI a, VI b) { return {_mm512_add_epi32(a.v, b.v)}; }
ICC_INLINE VI operator-(VI a, VI b) { return {_mm512_sub_epi32(a.v, b.v)}; }
ICC_INLINE VI operator*(VI a, VI b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
ICC_INLINE VI operator&(VI a, VI b) { return {_mm512_and_si512(a.v, b.v)}; }
ICC_INLINE VI operator|(VI a, VI b) { return {_mm512_or_si512(a.v, b.v)}; }
ICC_INLINE VI operator^(VI a, VI b) { return {_mm512_xor_si512(a.v, b.v)}; }
ICC_INLINE VI vmin(VI a, VI b) { return {_mm512_min_epi32(a.v, b.v)}; }
ICC_INLINE VI vmax(VI a, VI b) { return {_mm512_max_epi32(a.v, b.v)}; }
template <int N> ICC_INLINE VI shl(VI a) { return {_mm512_slli_epi32(a.v, N)}; }
template <int N> ICC_INLINE VI shr(VI a) { return {_mm512_srli_epi32(a.v, N)}; }
template <int N> ICC_INLINE VI sar(VI a) { return {_mm512_srai_epi32(a.v, N)}; }

#define ICC_CMP(name, fcode, icode)                                                                       \
    ICC_INLINE VB name(VF a, VF b) { return {_mm512_cmp_ps_mask(a.v, b.v, fcode)}; }                      \
    ICC_INLINE VB name(VI a, VI b) { return {_mm512_cmp_epi32_mask(a.v, b.v, icode)}; }
ICC_CMP(eq, _CMP_EQ_OQ, _MM_CMPINT_EQ)
ICC_CMP(ne, _CMP_NEQ_UQ, _MM_CMPINT_NE)
ICC_CMP(lt, _CMP_LT_OQ, _MM_CMPINT_LT)
ICC_CMP(le, _CMP_LE_OQ, _MM_CMPINT_LE)
ICC_CMP(gt, _CMP_GT_OQ, _MM_CMPINT_NLE)
ICC_CMP(ge, _CMP_GE_OQ, _MM_CMPINT_NLT)
#undef ICC_CMP
ICC_INLINE VB both(VB a, VB b) { return {(__mmask16)(a.m & b.m)}; }
ICC_INLINE VF select(VB c, VF a, VF b) { return {_mm512_mask_blend_ps(c.m, b.v, a.v)}; }
ICC_INLINE VI select(VB c, VI a, VI b) { return {_mm512_mask_blend_epi32(c.m, b.v, a.v)}; }

ICC_INLINE VF load_bf16(const uint16_t* p) {
    return {_mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
ICC_INLINE VF load_f16(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
ICC_INLINE VF load_i8(const int8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
ICC_INLINE VF load_u8(const uint8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
ICC_INLINE void store_f16(uint16_t* p, VF x) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x.v, 0)); }
ICC_INLINE void store_low16(uint16_t* p, VI x) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(x.v)); }
ICC_INLINE void store_low8(int8_t* p, VI x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(x.v)); }

ICC_INLINE VI set1_quad(const int8_t* p) {
    int32_t x;
    memcpy(&x, p, 4);
    return {_mm512_set1_epi32(x)};
}
// Low and high nibbles of every byte.
ICC_INLINE VI low_nibbles(VI a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
ICC_INLINE VI high_nibbles(VI a) {
    return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(15))};
}
// Per 32-bit lane: acc + dot of four unsigned bytes (at most 15) and four signed bytes.
ICC_INLINE VI dot_u4(VI acc, VI u, VI s) {
#if defined(__AVX512VNNI__)
    return {_mm512_dpbusd_epi32(acc.v, u.v, s.v)};
#else
    const __m512i pairs = _mm512_maddubs_epi16(u.v, s.v);
    return {_mm512_add_epi32(acc.v, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))};
#endif
}
// The same for any unsigned bytes. maddubs would saturate at 255 * 127 * 2, so the halves of the byte go separately.
ICC_INLINE VI dot_u8(VI acc, VI u, VI s) {
#if defined(__AVX512VNNI__)
    return {_mm512_dpbusd_epi32(acc.v, u.v, s.v)};
#else
    const __m512i low = _mm512_maddubs_epi16(low_nibbles(u).v, s.v);
    const __m512i high = _mm512_maddubs_epi16(high_nibbles(u).v, s.v);
    const __m512i sum =
        _mm512_add_epi32(_mm512_madd_epi16(low, _mm512_set1_epi16(1)), _mm512_madd_epi16(high, _mm512_set1_epi16(16)));
    return {_mm512_add_epi32(acc.v, sum)};
#endif
}
ICC_INLINE __m256 fold(VF a) {
    return _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
}
ICC_INLINE __m256 fold_max(VF a) {
    return _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
}

#else  // AVX2

struct VF { __m256 a, b; };
struct VI { __m256i a, b; };
struct VB { __m256 a, b; };

ICC_INLINE VF vf(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
ICC_INLINE VI vi(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
ICC_INLINE VF vload(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
ICC_INLINE VI viload(const void* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
ICC_INLINE void vstore(float* p, VF x) { _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(p + 8, x.b); }
ICC_INLINE void vistore(void* p, VI x) {
    _mm256_storeu_si256((__m256i*)p, x.a), _mm256_storeu_si256((__m256i*)p + 1, x.b);
}

ICC_INLINE VF operator+(VF x, VF y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
ICC_INLINE VF operator-(VF x, VF y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
ICC_INLINE VF operator*(VF x, VF y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
ICC_INLINE VF operator/(VF x, VF y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
ICC_INLINE VF fma(VF x, VF y, VF z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
ICC_INLINE VF fnma(VF x, VF y, VF z) { return {_mm256_fnmadd_ps(x.a, y.a, z.a), _mm256_fnmadd_ps(x.b, y.b, z.b)}; }
ICC_INLINE VF min_raw(VF x, VF y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
ICC_INLINE VF max_raw(VF x, VF y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
ICC_INLINE VF vsqrt(VF x) { return {_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }
template <int MODE> ICC_INLINE VF vround(VF x) {
    return {_mm256_round_ps(x.a, MODE | _MM_FROUND_NO_EXC), _mm256_round_ps(x.b, MODE | _MM_FROUND_NO_EXC)};
}
ICC_INLINE VI to_int_nearest(VF x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
ICC_INLINE VI to_int_trunc(VF x) { return {_mm256_cvttps_epi32(x.a), _mm256_cvttps_epi32(x.b)}; }
ICC_INLINE VF to_float(VI x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
ICC_INLINE VI bits(VF x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
ICC_INLINE VF from_bits(VI x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }

ICC_INLINE VI operator+(VI x, VI y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
ICC_INLINE VI operator-(VI x, VI y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
ICC_INLINE VI operator*(VI x, VI y) { return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)}; }
ICC_INLINE VI operator&(VI x, VI y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
ICC_INLINE VI operator|(VI x, VI y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
ICC_INLINE VI operator^(VI x, VI y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
ICC_INLINE VI vmin(VI x, VI y) { return {_mm256_min_epi32(x.a, y.a), _mm256_min_epi32(x.b, y.b)}; }
ICC_INLINE VI vmax(VI x, VI y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
template <int N> ICC_INLINE VI shl(VI x) { return {_mm256_slli_epi32(x.a, N), _mm256_slli_epi32(x.b, N)}; }
template <int N> ICC_INLINE VI shr(VI x) { return {_mm256_srli_epi32(x.a, N), _mm256_srli_epi32(x.b, N)}; }
template <int N> ICC_INLINE VI sar(VI x) { return {_mm256_srai_epi32(x.a, N), _mm256_srai_epi32(x.b, N)}; }

ICC_INLINE VB as_mask(VI x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
ICC_INLINE VB inverse(VB x) {
    const __m256 ones = _mm256_castsi256_ps(_mm256_set1_epi32(-1));
    return {_mm256_xor_ps(x.a, ones), _mm256_xor_ps(x.b, ones)};
}
#define ICC_CMP(name, code) \
    ICC_INLINE VB name(VF x, VF y) { return {_mm256_cmp_ps(x.a, y.a, code), _mm256_cmp_ps(x.b, y.b, code)}; }
ICC_CMP(eq, _CMP_EQ_OQ)
ICC_CMP(ne, _CMP_NEQ_UQ)
ICC_CMP(lt, _CMP_LT_OQ)
ICC_CMP(le, _CMP_LE_OQ)
ICC_CMP(gt, _CMP_GT_OQ)
ICC_CMP(ge, _CMP_GE_OQ)
#undef ICC_CMP
ICC_INLINE VB eq(VI x, VI y) { return as_mask({_mm256_cmpeq_epi32(x.a, y.a), _mm256_cmpeq_epi32(x.b, y.b)}); }
ICC_INLINE VB gt(VI x, VI y) { return as_mask({_mm256_cmpgt_epi32(x.a, y.a), _mm256_cmpgt_epi32(x.b, y.b)}); }
ICC_INLINE VB ne(VI x, VI y) { return inverse(eq(x, y)); }
ICC_INLINE VB lt(VI x, VI y) { return gt(y, x); }
ICC_INLINE VB le(VI x, VI y) { return inverse(gt(x, y)); }
ICC_INLINE VB ge(VI x, VI y) { return inverse(gt(y, x)); }
ICC_INLINE VB both(VB x, VB y) { return {_mm256_and_ps(x.a, y.a), _mm256_and_ps(x.b, y.b)}; }
ICC_INLINE VF select(VB c, VF x, VF y) { return {_mm256_blendv_ps(y.a, x.a, c.a), _mm256_blendv_ps(y.b, x.b, c.b)}; }
ICC_INLINE VI select(VB c, VI x, VI y) { return bits(select(c, from_bits(x), from_bits(y))); }

ICC_INLINE VF load_bf16(const uint16_t* p) {
    const __m256i lo = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
    const __m256i hi = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p + 1));
    return from_bits({_mm256_slli_epi32(lo, 16), _mm256_slli_epi32(hi, 16)});
}
ICC_INLINE VF load_f16(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p + 1))};
}
ICC_INLINE VF load_i8(const int8_t* p) {
    const __m128i x = _mm_loadu_si128((const __m128i*)p);
    return to_float({_mm256_cvtepi8_epi32(x), _mm256_cvtepi8_epi32(_mm_srli_si128(x, 8))});
}
ICC_INLINE VF load_u8(const uint8_t* p) {
    const __m128i x = _mm_loadu_si128((const __m128i*)p);
    return to_float({_mm256_cvtepu8_epi32(x), _mm256_cvtepu8_epi32(_mm_srli_si128(x, 8))});
}
ICC_INLINE void store_f16(uint16_t* p, VF x) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.a, 0));
    _mm_storeu_si128((__m128i*)p + 1, _mm256_cvtps_ph(x.b, 0));
}
ICC_INLINE void store_low16(uint16_t* p, VI x) {
    int32_t t[16];
    vistore(t, x);
    for (int i = 0; i < 16; ++i) p[i] = (uint16_t)t[i];
}
ICC_INLINE void store_low8(int8_t* p, VI x) {
    int32_t t[16];
    vistore(t, x);
    for (int i = 0; i < 16; ++i) p[i] = (int8_t)t[i];
}
ICC_INLINE VI set1_quad(const int8_t* p) {
    int32_t x;
    memcpy(&x, p, 4);
    const __m256i v = _mm256_set1_epi32(x);
    return {v, v};
}
ICC_INLINE VI low_nibbles(VI x) {
    const __m256i m = _mm256_set1_epi8(15);
    return {_mm256_and_si256(x.a, m), _mm256_and_si256(x.b, m)};
}
ICC_INLINE VI high_nibbles(VI x) {
    const __m256i m = _mm256_set1_epi8(15);
    return {_mm256_and_si256(_mm256_srli_epi16(x.a, 4), m), _mm256_and_si256(_mm256_srli_epi16(x.b, 4), m)};
}
ICC_INLINE __m256i half_dot(__m256i acc, __m256i u, __m256i s, short weight) {
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(u, s), _mm256_set1_epi16(weight)));
}
// Per 32-bit lane: acc + dot of four unsigned bytes (at most 15) and four signed bytes.
ICC_INLINE VI dot_u4(VI acc, VI u, VI s) { return {half_dot(acc.a, u.a, s.a, 1), half_dot(acc.b, u.b, s.b, 1)}; }
// The same for any unsigned bytes. maddubs would saturate at 255 * 127 * 2, so the halves of the byte go separately.
ICC_INLINE VI dot_u8(VI acc, VI u, VI s) {
    const VI low = low_nibbles(u), high = high_nibbles(u);
    acc = dot_u4(acc, low, s);
    return {half_dot(acc.a, high.a, s.a, 16), half_dot(acc.b, high.b, s.b, 16)};
}
ICC_INLINE __m256 fold(VF x) { return _mm256_add_ps(x.a, x.b); }
ICC_INLINE __m256 fold_max(VF x) { return _mm256_max_ps(x.a, x.b); }

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

ICC_INLINE VF vload_n(const float* p, int n) {
    float t[16] = {};
    memcpy(t, p, 4 * (size_t)n);
    return vload(t);
}
ICC_INLINE VI viload_n(const int32_t* p, int n) {
    int32_t t[16] = {};
    memcpy(t, p, 4 * (size_t)n);
    return viload(t);
}
ICC_INLINE void vstore_n(float* p, VF x, int n) {
    float t[16];
    vstore(t, x);
    memcpy(p, t, 4 * (size_t)n);
}
ICC_INLINE void vistore_n(int32_t* p, VI x, int n) {
    int32_t t[16];
    vistore(t, x);
    memcpy(p, t, 4 * (size_t)n);
}

#endif

// ---- the same on both ----

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
ICC_INLINE float f16_value(uint16_t h) { return _cvtsh_ss(h); }
ICC_INLINE uint16_t f16_bits(float f) { return (uint16_t)_cvtss_sh(f, 0); }

// Typed element access, so that one kernel source serves every storage format.
struct Bf16 { uint16_t h; };
struct Half { uint16_t h; };
ICC_INLINE VF vload(const Bf16* p) { return load_bf16((const uint16_t*)p); }
ICC_INLINE VF vload(const Half* p) { return load_f16((const uint16_t*)p); }
template <class T> ICC_INLINE VF vload_n16(const T* p, int n) {
    T t[16] = {};
    memcpy(t, p, 2 * (size_t)n);
    return vload(t);
}
ICC_INLINE VF vload_n(const Bf16* p, int n) { return vload_n16(p, n); }
ICC_INLINE VF vload_n(const Half* p, int n) { return vload_n16(p, n); }
ICC_INLINE float value(float x) { return x; }
ICC_INLINE float value(Bf16 x) { return bf16_value(x.h); }
ICC_INLINE float value(Half x) { return f16_value(x.h); }
ICC_INLINE void assign(float& d, float x) { d = x; }
ICC_INLINE void assign(Bf16& d, float x) { d.h = bf16_bits(x); }
ICC_INLINE void assign(Half& d, float x) { d.h = f16_bits(x); }
