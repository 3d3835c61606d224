// Sixteen-lane vectors as one zmm register. Part of simd.h.
#pragma once

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
ICC_INLINE VF halves_to_float(__m256i h) { return {_mm512_cvtph_ps(h)}; }
ICC_INLINE VF load_i8(const int8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
ICC_INLINE VI load_bytes(const uint8_t* p) { return {_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))}; }
// Sixteen fields of BITS (4 or 2), from the low bits up.
template <int BITS> ICC_INLINE VI fields(uint64_t x) {
    const __m512i at = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7);
    const __m512i shift = _mm512_mullo_epi32(at, _mm512_set1_epi32(BITS));
    const __m256i a = _mm256_set1_epi32((int)(uint32_t)x), b = _mm256_set1_epi32((int)(uint32_t)(x >> (8 * BITS)));
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
    return {_mm512_and_si512(_mm512_srlv_epi32(both, shift), _mm512_set1_epi32((1 << BITS) - 1))};
}
// The sum of a lane's two products of 16-bit integers.
ICC_INLINE VI mul_pairs(VI x, VI y) { return {_mm512_madd_epi16(x.v, y.v)}; }
// Sixteen 4-bit fields of two numbers as pairs, times two: 16-bit integers.
ICC_INLINE VI twice_field_pairs(uint64_t x, uint64_t y) {
    const __m128i bytes = _mm_unpacklo_epi8(_mm_cvtsi64_si128((int64_t)x), _mm_cvtsi64_si128((int64_t)y));
    const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7), shift = _mm512_set1_epi64(3ll << 32 | 31);
    const __m512i pairs = _mm512_permutexvar_epi32(twice, _mm512_castsi256_si512(_mm256_cvtepu8_epi16(bytes)));
    return {_mm512_and_si512(_mm512_rorv_epi32(pairs, shift), _mm512_set1_epi32(0x1e001e))};
}
ICC_INLINE void store_bf16(uint16_t* p, VF x) {  // as bf16_bits
    const __m512i u = _mm512_castps_si512(x.v), high = _mm512_srli_epi32(u, 16);
    const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
    const __m512i near = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
    const __m512i bits = _mm512_mask_or_epi32(near, nan, high, _mm512_set1_epi32(64));
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(bits));
}
ICC_INLINE VI sub16(VI x, VI y) { return {_mm512_sub_epi16(x.v, y.v)}; }
ICC_INLINE VF load_u8(const uint8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
ICC_INLINE void store_f16(uint16_t* p, VF x) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x.v, 0)); }
ICC_INLINE void store_low16(uint16_t* p, VI x) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(x.v)); }
ICC_INLINE void store_i16(int16_t* p, VI x) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtsepi32_epi16(x.v)); }
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
// Bytes of their high and low nibbles: from the low nibbles of both arguments, and from the high ones.
ICC_INLINE VI join_low(VI high, VI low) {  // 0xca: the second where the first is set, else the third
    return {_mm512_ternarylogic_epi64(_mm512_set1_epi8(15), low.v, _mm512_slli_epi16(high.v, 4), 0xca)};
}
ICC_INLINE VI join_high(VI high, VI low) {
    return {_mm512_ternarylogic_epi64(_mm512_set1_epi8(15), _mm512_srli_epi16(low.v, 4), high.v, 0xca)};
}
// Per 32-bit lane: acc + dot of four unsigned bytes (at most 15) and four signed bytes. `_at` reads the same four signed
// bytes for every lane from memory: in one instruction where there is VNNI, and written out because g++ 12 makes it two and
// copies every accumulator besides. (Sanitizers do not see what an asm reads.)
#if defined(__AVX512VNNI__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
ICC_INLINE VI dot_u4(VI acc, VI u, VI s) {
    asm("vpdpbusd %2, %1, %0" : "+v"(acc.v) : "v"(u.v), "v"(s.v));
    return acc;
}
ICC_INLINE VI dot_u4_at(VI acc, VI u, const int8_t* s) {
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc.v) : "v"(u.v), "m"(*(const int32_t(*)[1])s));
    return acc;
}
#else
ICC_INLINE VI dot_u4(VI acc, VI u, VI s) {
#if defined(__AVX512VNNI__)
    return {_mm512_dpbusd_epi32(acc.v, u.v, s.v)};
#else
    const __m512i pairs = _mm512_maddubs_epi16(u.v, s.v);
    return {_mm512_add_epi32(acc.v, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))};
#endif
}
ICC_INLINE VI dot_u4_at(VI acc, VI u, const int8_t* s) { return dot_u4(acc, u, set1_quad(s)); }
#endif
// The same for any unsigned bytes. maddubs would saturate at 255 * 127 * 2, so the halves of the byte go separately.
constexpr int BYTE_BIAS = 0;  // of the bytes that dot_u8 sees, see simd.h
ICC_INLINE VI dot_u8(VI acc, VI u, VI s) {
#if defined(__AVX512VNNI__)
    return dot_u4(acc, u, s);
#else
    const __m512i low = _mm512_maddubs_epi16(low_nibbles(u).v, s.v);
    const __m512i high = _mm512_maddubs_epi16(high_nibbles(u).v, s.v);
    const __m512i sum =
        _mm512_add_epi32(_mm512_madd_epi16(low, _mm512_set1_epi16(1)), _mm512_madd_epi16(high, _mm512_set1_epi16(16)));
    return {_mm512_add_epi32(acc.v, sum)};
#endif
}
ICC_INLINE VI dot_u8_at(VI acc, VI u, const int8_t* s) {
#if defined(__AVX512VNNI__)
    return dot_u4_at(acc, u, s);
#else
    return dot_u8(acc, u, set1_quad(s));
#endif
}
// The same for entries of tables, which are signed but for this bias here: whoever uses them takes it off again.
constexpr int TABLE_BIAS = 128;
ICC_INLINE VI dot_table(VI acc, VI w, VI s) { return dot_u8(acc, w, s); }
ICC_INLINE VI dot_table_at(VI acc, VI w, const int8_t* s) { return dot_u8_at(acc, w, s); }
// Products of 7 bits, unsigned activations and signed weights.
ICC_INLINE VI dot_i7(VI acc, VI w, VI x) { return dot_u4(acc, x, w); }
ICC_INLINE VI dot_i7_at(VI acc, VI w, const int8_t* x) { return dot_i7(acc, w, set1_quad(x)); }
// Sixteen pairs of signed bytes as pairs of 16-bit integers; sixteen single ones, each with a zero behind it.
ICC_INLINE VI load_pairs(const int8_t* p) { return {_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p))}; }
ICC_INLINE VI load_singles(const int8_t* p) {
    return {_mm512_and_si512(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)), _mm512_set1_epi32(0xffff))};
}
// Per 32-bit lane: acc + dot of two 16-bit integers and the same two for every lane, from memory. See dot_u4_at.
ICC_INLINE VI dot_pairs_at(VI acc, VI x, const int16_t* pair) {
#if defined(__AVX512VNNI__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    asm("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(acc.v) : "v"(x.v), "m"(*(const int32_t(*)[1])pair));
    return acc;
#else
    int32_t both;
    memcpy(&both, pair, 4);
    return {_mm512_add_epi32(acc.v, _mm512_madd_epi16(x.v, _mm512_set1_epi32(both)))};
#endif
}
ICC_INLINE __m256 fold(VF a) {
    return _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
}
ICC_INLINE __m256 fold_max(VF a) {
    return _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
}
