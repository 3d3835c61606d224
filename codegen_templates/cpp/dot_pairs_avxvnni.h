#pragma once
// Per 32-bit lane: acc + dot of two 16-bit integers and the same two for every lane, from memory.
ICC_INLINE VI dot_pairs_at(VI acc, VI x, const int16_t* pair) {
    int32_t both;
    memcpy(&both, pair, 4);
    const __m256i y = _mm256_set1_epi32(both);
    return {sum_pairs(acc.a, x.a, y), sum_pairs(acc.b, x.b, y)};
}
