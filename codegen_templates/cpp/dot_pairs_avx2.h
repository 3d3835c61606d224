#pragma once
// Per 32-bit lane: acc + dot of two 16-bit integers and the same two for every lane, from memory.
ICC_INLINE VI dot_pairs_at(VI acc, VI x, const int16_t* pair) {
    int32_t both;
    memcpy(&both, pair, 4);
    const __m256i y = _mm256_set1_epi32(both);
    VI sum = {_mm256_add_epi32(acc.a, _mm256_madd_epi16(x.a, y)), _mm256_add_epi32(acc.b, _mm256_madd_epi16(x.b, y))};
    asm("" : "+x"(sum.a), "+x"(sum.b));  // as in add16
    return sum;
}
