#pragma once
// AVX-VNNI: the sum of four products of bytes, or of two of 16-bit integers, and what there was, in one instruction on ymm
// registers. Written out, because g++ 12 copies accumulators around the intrinsic. Compiled without the instruction set
// (tests do, for machines that lack it), it is the intrinsic that AVX-512 has for the same.
#if defined(__AVXVNNI__)
ICC_INLINE __m256i sum_bytes(__m256i acc, __m256i u, __m256i s) {
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(u), "x"(s));
    return acc;
}
ICC_INLINE __m256i sum_pairs(__m256i acc, __m256i x, __m256i y) {
    asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(acc) : "x"(x), "x"(y));
    return acc;
}
#else
ICC_INLINE __m256i sum_bytes(__m256i acc, __m256i u, __m256i s) { return _mm256_dpbusd_epi32(acc, u, s); }
ICC_INLINE __m256i sum_pairs(__m256i acc, __m256i x, __m256i y) { return _mm256_dpwssd_epi32(acc, x, y); }
#endif
// Per 32-bit lane: acc + dot of four unsigned bytes and four signed bytes.
constexpr int BYTE_BIAS = 0;  // of the bytes that dot_u8 sees, see simd.h
ICC_INLINE VI dot_u8(VI acc, VI u, VI s) { return {sum_bytes(acc.a, u.a, s.a), sum_bytes(acc.b, u.b, s.b)}; }
ICC_INLINE VI dot_u4(VI acc, VI u, VI s) { return dot_u8(acc, u, s); }
// The same for entries of tables, which are signed but for this bias here: whoever uses them takes it off again.
constexpr int TABLE_BIAS = 128;
ICC_INLINE VI dot_table(VI acc, VI w, VI s) { return dot_u8(acc, w, s); }
ICC_INLINE VI dot_table_at(VI acc, VI w, const int8_t* s) { return dot_u8(acc, w, set1_quad(s)); }
