#pragma once
ICC_INLINE VI low_nibbles(VI x) {
    const __m256i m = _mm256_set1_epi8(15);
    return {_mm256_and_si256(x.a, m), _mm256_and_si256(x.b, m)};
}
// Bytes shift here, so that nothing has to be cut off.
ICC_INLINE __m256i half_high_nibbles(__m256i x) {
    return x86::join((__m128i)vshrq_n_u8((uint8x16_t)x86::low(x), 4), (__m128i)vshrq_n_u8((uint8x16_t)x86::high(x), 4));
}
ICC_INLINE VI high_nibbles(VI x) { return {half_high_nibbles(x.a), half_high_nibbles(x.b)}; }
