// Sixteen-lane vectors as a pair of ymm registers. Part of simd.h.
#pragma once

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
ICC_INLINE VF halves_to_float(__m256i h) {
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(h)), _mm256_cvtph_ps(_mm256_extracti128_si256(h, 1))};
}
ICC_INLINE VF load_i8(const int8_t* p) {
    const __m128i x = _mm_loadu_si128((const __m128i*)p);
    return to_float({_mm256_cvtepi8_epi32(x), _mm256_cvtepi8_epi32(_mm_srli_si128(x, 8))});
}
ICC_INLINE VI load_bytes(const uint8_t* p) {
    const __m128i x = _mm_loadu_si128((const __m128i*)p);
    return {_mm256_cvtepu8_epi32(x), _mm256_cvtepu8_epi32(_mm_srli_si128(x, 8))};
}
// Sixteen fields of BITS (4 or 2), from the low bits up.
template <int BITS> ICC_INLINE VI fields(uint64_t x) {
    const __m256i at = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), mask = _mm256_set1_epi32((1 << BITS) - 1);
    const __m256i shift = _mm256_mullo_epi32(at, _mm256_set1_epi32(BITS));
    const __m256i a = _mm256_set1_epi32((int)(uint32_t)x), b = _mm256_set1_epi32((int)(uint32_t)(x >> (8 * BITS)));
    return {_mm256_and_si256(_mm256_srlv_epi32(a, shift), mask), _mm256_and_si256(_mm256_srlv_epi32(b, shift), mask)};
}
// The sum of a lane's two products of 16-bit integers.
ICC_INLINE VI mul_pairs(VI x, VI y) { return {_mm256_madd_epi16(x.a, y.a), _mm256_madd_epi16(x.b, y.b)}; }
// Sixteen 4-bit fields of two numbers as pairs, times two: 16-bit integers.
ICC_INLINE VI twice_field_pairs(uint64_t x, uint64_t y) {
    const __m128i bytes = _mm_unpacklo_epi8(_mm_cvtsi64_si128((int64_t)x), _mm_cvtsi64_si128((int64_t)y));
    const __m256i pairs = _mm256_cvtepu8_epi16(_mm_shuffle_epi32(bytes, 0xd8)), mask = _mm256_set1_epi16(30);
    const __m256i low = _mm256_and_si256(_mm256_slli_epi16(pairs, 1), mask), high = _mm256_and_si256(_mm256_srli_epi16(pairs, 3), mask);
    return {_mm256_unpacklo_epi32(low, high), _mm256_unpackhi_epi32(low, high)};
}
ICC_INLINE VI sub16(VI x, VI y) { return {_mm256_sub_epi16(x.a, y.a), _mm256_sub_epi16(x.b, y.b)}; }
ICC_INLINE VF load_u8(const uint8_t* p) {
    const __m128i x = _mm_loadu_si128((const __m128i*)p);
    return to_float({_mm256_cvtepu8_epi32(x), _mm256_cvtepu8_epi32(_mm_srli_si128(x, 8))});
}
ICC_INLINE void store_f16(uint16_t* p, VF x) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.a, 0));
    _mm_storeu_si128((__m128i*)p + 1, _mm256_cvtps_ph(x.b, 0));
}
ICC_INLINE void store_bf16(uint16_t* p, VF x) {  // as bf16_bits
    const auto rounded = [](__m256 v) {
        const __m256i u = _mm256_castps_si256(v), high = _mm256_srli_epi32(u, 16);
        const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
        const __m256i near = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
        const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
        return _mm256_blendv_epi8(near, _mm256_or_si256(high, _mm256_set1_epi32(64)), nan);
    };
    const __m256i both = _mm256_packus_epi32(rounded(x.a), rounded(x.b));
    _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(both, 0xd8));
}
ICC_INLINE void store_low16(uint16_t* p, VI x) {
    int32_t t[16];
    vistore(t, x);
    for (int i = 0; i < 16; ++i) p[i] = (uint16_t)t[i];
}
ICC_INLINE void store_i16(int16_t* p, VI x) {
    _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8));
}
ICC_INLINE void store_low8(int8_t* p, VI x) {
    const __m256i low = _mm256_set1_epi32(255);
    const __m256i pairs = _mm256_packus_epi32(_mm256_and_si256(x.a, low), _mm256_and_si256(x.b, low));
    const __m256i order = _mm256_permute4x64_epi64(pairs, 0xd8);
    _mm_storeu_si128((__m128i*)p, _mm_packus_epi16(_mm256_castsi256_si128(order), _mm256_extracti128_si256(order, 1)));
}
ICC_INLINE VI set1_quad(const int8_t* p) {
    int32_t x;
    memcpy(&x, p, 4);
    const __m256i v = _mm256_set1_epi32(x);
    return {v, v};
}
#include "nibbles_avx2.h"
// Bytes of their high and low nibbles: from the low nibbles of both arguments, and from the high ones.
ICC_INLINE __m256i take_nibbles(__m256i high, __m256i low) {  // the high four bits of one, the low four of the other
    const __m256i m = _mm256_set1_epi8(15);
    return _mm256_or_si256(_mm256_andnot_si256(m, high), _mm256_and_si256(m, low));
}
ICC_INLINE VI join_low(VI high, VI low) {
    return {take_nibbles(_mm256_slli_epi16(high.a, 4), low.a), take_nibbles(_mm256_slli_epi16(high.b, 4), low.b)};
}
ICC_INLINE VI join_high(VI high, VI low) {
    return {take_nibbles(high.a, _mm256_srli_epi16(low.a, 4)), take_nibbles(high.b, _mm256_srli_epi16(low.b, 4))};
}
#include "dots_avx2.h"
// Kernels that sum products in 16 bits (micro_short.cpp.jinja): per 16-bit lane that of two unsigned and two signed bytes; of
// signed bytes, where the second are above -128; such sums in 32-bit lanes; unsigned bytes less 128.
ICC_INLINE VI products(VI u, VI s) { return {_mm256_maddubs_epi16(u.a, s.a), _mm256_maddubs_epi16(u.b, s.b)}; }
ICC_INLINE VI products_signed(VI w, VI s) {
    return {_mm256_maddubs_epi16(_mm256_abs_epi8(w.a), _mm256_sign_epi8(s.a, w.a)),
            _mm256_maddubs_epi16(_mm256_abs_epi8(w.b), _mm256_sign_epi8(s.b, w.b))};
}
ICC_INLINE VI add16(VI x, VI y) {  // g++ would add in another order, which needs more registers than there are
    VI sum = {_mm256_add_epi16(x.a, y.a), _mm256_add_epi16(x.b, y.b)};
    asm("" : "+x"(sum.a), "+x"(sum.b));
    return sum;
}
ICC_INLINE VI widen(VI x) {
    const __m256i ones = _mm256_set1_epi16(1);
    return {_mm256_madd_epi16(x.a, ones), _mm256_madd_epi16(x.b, ones)};
}
ICC_INLINE VI add_wide(VI dot, VI part) {
    VI sum = dot + widen(part);
    asm("" : "+x"(sum.a), "+x"(sum.b));
    return sum;
}
ICC_INLINE VI flip(VI x) { return x ^ vi((int)0x80808080); }
// The same four signed bytes for every lane, from memory.
ICC_INLINE VI dot_u4_at(VI acc, VI u, const int8_t* s) { return dot_u4(acc, u, set1_quad(s)); }
ICC_INLINE VI dot_u8_at(VI acc, VI u, const int8_t* s) { return dot_u8(acc, u, set1_quad(s)); }
// Sixteen pairs of signed bytes as pairs of 16-bit integers; sixteen single ones, each with a zero behind it.
ICC_INLINE VI load_pairs(const int8_t* p) {
    const __m128i *x = (const __m128i*)p, *y = x + 1;
    return {_mm256_cvtepi8_epi16(_mm_loadu_si128(x)), _mm256_cvtepi8_epi16(_mm_loadu_si128(y))};
}
ICC_INLINE VI load_singles(const int8_t* p) {
    const __m128i x = _mm_loadu_si128((const __m128i*)p);
    const __m256i low = _mm256_set1_epi32(0xffff);
    return {_mm256_and_si256(_mm256_cvtepi8_epi32(x), low),
            _mm256_and_si256(_mm256_cvtepi8_epi32(_mm_srli_si128(x, 8)), low)};
}
#include "dot_pairs_avx2.h"
// Of each four bytes without sign the first and the third, and the other two, as pairs of 16-bit integers.
ICC_INLINE VI even_bytes(VI x) {
    const __m256i m = _mm256_set1_epi32(0x00ff00ff);
    return {_mm256_and_si256(x.a, m), _mm256_and_si256(x.b, m)};
}
ICC_INLINE VI odd_bytes(VI x) { return {_mm256_srli_epi16(x.a, 8), _mm256_srli_epi16(x.b, 8)}; }
// Products of 7 bits, unsigned activations and signed weights: per 32-bit lane acc + dot of four bytes; of half the lanes, of
// eight bytes, whose products are summed in 16 bits first, which holds them.
ICC_INLINE VI dot_i7(VI acc, VI w, VI x) { return dot_u4(acc, x, w); }
ICC_INLINE VI dot_i7_at(VI acc, VI w, const int8_t* x) { return dot_i7(acc, w, set1_quad(x)); }
ICC_INLINE __m256i load_half(const char* p) { return _mm256_loadu_si256((const __m256i*)p); }
ICC_INLINE __m256i dot_chain(__m256i acc, const int8_t* x, __m256i w, const int8_t* next_x, __m256i next_w) {
    const __m256i first = _mm256_maddubs_epi16(set1_quad(x).a, w), second = _mm256_maddubs_epi16(set1_quad(next_x).a, next_w);
    acc = _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_add_epi16(first, second), _mm256_set1_epi16(1)));
    asm("" : "+x"(acc));  // as in add16
    return acc;
}
// The same with a sum that stays in 16 bits, for up to eight times four k of codes of 4 bits (8 x 2 x 15 x 128 < 2^15), and what
// it is in 32 bits, COUNTS times, with what there was before (`more`).
ICC_INLINE VI chain_u4(VI sum, VI codes, const int8_t* x) {
    const VI four = set1_quad(x);
    sum = {_mm256_add_epi16(sum.a, _mm256_maddubs_epi16(codes.a, four.a)), _mm256_add_epi16(sum.b, _mm256_maddubs_epi16(codes.b, four.b))};
    asm("" : "+x"(sum.a), "+x"(sum.b));  // as in add16
    return sum;
}
template <short COUNTS> ICC_INLINE void add_chain(int32_t* to, VI sum, bool more) {
    const __m256i counts = _mm256_set1_epi16(COUNTS);
    const VI wide = {_mm256_madd_epi16(sum.a, counts), _mm256_madd_epi16(sum.b, counts)};
    vistore(to, more ? viload(to) + wide : wide);
}
ICC_INLINE __m256 fold(VF x) { return _mm256_add_ps(x.a, x.b); }
ICC_INLINE __m256 fold_max(VF x) { return _mm256_max_ps(x.a, x.b); }
