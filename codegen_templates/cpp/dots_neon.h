#pragma once
// NEON: sixteen products of signed bytes, summed by fours, in one instruction; with i8mm, of unsigned bytes and signed ones.
ICC_INLINE __m128i sum_signed(__m128i acc, __m128i x, __m128i y) {
    return (__m128i)vdotq_s32((int32x4_t)acc, (int8x16_t)x, (int8x16_t)y);
}
ICC_INLINE __m256i half_signed(__m256i acc, __m256i x, __m256i y) {
    return x86::join(sum_signed(x86::low(acc), x86::low(x), x86::low(y)), sum_signed(x86::high(acc), x86::high(x), x86::high(y)));
}
// Per 32-bit lane: acc + dot of four unsigned bytes (at most 127) and four signed bytes.
ICC_INLINE VI dot_u4(VI acc, VI u, VI s) { return {half_signed(acc.a, u.a, s.a), half_signed(acc.b, u.b, s.b)}; }
// As dot_u4, with four of sixteen signed bytes for every lane.
template <int LANE> ICC_INLINE __m256i half_signed_lane(__m256i acc, __m256i x, __m128i y) {
    const auto part = [&](__m128i sum, __m128i four) {
        return (__m128i)vdotq_laneq_s32((int32x4_t)sum, (int8x16_t)four, (int8x16_t)y, LANE);
    };
    return x86::join(part(x86::low(acc), x86::low(x)), part(x86::high(acc), x86::high(x)));
}
template <int LANE> ICC_INLINE VI dot_u4_lane(VI acc, VI u, __m128i s) {
    return {half_signed_lane<LANE>(acc.a, u.a, s), half_signed_lane<LANE>(acc.b, u.b, s)};
}
template <int LANE> ICC_INLINE VI dot_table_lane(VI acc, VI w, __m128i s) { return dot_u4_lane<LANE>(acc, w, s); }
template <int LANE> ICC_INLINE VI dot_i7_lane(VI acc, VI w, __m128i x) { return dot_u4_lane<LANE>(acc, w, x); }
// dot_u4 for any unsigned bytes: without i8mm of what they are more than BYTE_BIAS, see simd.h.
#if defined(__ARM_FEATURE_MATMUL_INT8)
ICC_INLINE __m128i sum_bytes(__m128i acc, __m128i u, __m128i s) {
    return (__m128i)vusdotq_s32((int32x4_t)acc, (uint8x16_t)u, (int8x16_t)s);
}
ICC_INLINE __m256i half_bytes(__m256i acc, __m256i u, __m256i s) {
    return x86::join(sum_bytes(x86::low(acc), x86::low(u), x86::low(s)), sum_bytes(x86::high(acc), x86::high(u), x86::high(s)));
}
template <int LANE> ICC_INLINE __m256i half_bytes_lane(__m256i acc, __m256i u, __m128i s) {
    const auto part = [&](__m128i sum, __m128i four) {
        return (__m128i)vusdotq_laneq_s32((int32x4_t)sum, (uint8x16_t)four, (int8x16_t)s, LANE);
    };
    return x86::join(part(x86::low(acc), x86::low(u)), part(x86::high(acc), x86::high(u)));
}
constexpr int BYTE_BIAS = 0;
#define ICC_MATRIX
#include "matrix_neon.h"
#else
constexpr int BYTE_BIAS = 128;
ICC_INLINE __m256i less_bias(__m256i u) { return u ^ _mm256_set1_epi8((int8_t)-128); }
ICC_INLINE __m256i half_bytes(__m256i acc, __m256i u, __m256i s) { return half_signed(acc, less_bias(u), s); }
template <int LANE> ICC_INLINE __m256i half_bytes_lane(__m256i acc, __m256i u, __m128i s) {
    return half_signed_lane<LANE>(acc, less_bias(u), s);
}
#endif
template <int LANE> ICC_INLINE VI dot_u8_lane(VI acc, VI u, __m128i s) {
    return {half_bytes_lane<LANE>(acc.a, u.a, s), half_bytes_lane<LANE>(acc.b, u.b, s)};
}
ICC_INLINE VI dot_u8(VI acc, VI u, VI s) { return {half_bytes(acc.a, u.a, s.a), half_bytes(acc.b, u.b, s.b)}; }
// The same for entries of tables, signed bytes.
constexpr int TABLE_BIAS = 0;
ICC_INLINE VI dot_table(VI acc, VI w, VI s) { return dot_u4(acc, w, s); }
ICC_INLINE VI dot_table_at(VI acc, VI w, const int8_t* s) { return dot_table(acc, w, set1_quad(s)); }
