#pragma once
ICC_INLINE __m256i half_dot(__m256i acc, __m256i u, __m256i s, short weight) {
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(u, s), _mm256_set1_epi16(weight)));
}
// Per 32-bit lane: acc + dot of four unsigned bytes (at most 15) and four signed bytes.
ICC_INLINE VI dot_u4(VI acc, VI u, VI s) { return {half_dot(acc.a, u.a, s.a, 1), half_dot(acc.b, u.b, s.b, 1)}; }
// The same for any unsigned bytes. maddubs would saturate at 255 * 127 * 2, so the halves of the byte go separately.
constexpr int BYTE_BIAS = 0;  // of the bytes that dot_u8 sees, see simd.h
ICC_INLINE VI dot_u8(VI acc, VI u, VI s) {
    const VI low = low_nibbles(u), high = high_nibbles(u);
    acc = dot_u4(acc, low, s);
    return {half_dot(acc.a, high.a, s.a, 16), half_dot(acc.b, high.b, s.b, 16)};
}
// The same for entries of tables, signed bytes above -128 (see simd_avx512.h): magnitudes with the signs on the other side.
constexpr int TABLE_BIAS = 0;
ICC_INLINE __m256i half_table(__m256i acc, __m256i w, __m256i s) {
    return half_dot(acc, _mm256_abs_epi8(w), _mm256_sign_epi8(s, w), 1);
}
ICC_INLINE VI dot_table(VI acc, VI w, VI s) { return {half_table(acc.a, w.a, s.a), half_table(acc.b, w.b, s.b)}; }
ICC_INLINE VI dot_table_at(VI acc, VI w, const int8_t* s) { return dot_table(acc, w, set1_quad(s)); }
