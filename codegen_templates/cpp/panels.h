#pragma once
// Sixteen bytes from byte j on of four rows: y[i] = the i-th four of each row in turns, `stride` bytes apart.
ICC_INLINE void store_quads(int8_t* y, int64_t stride, const int8_t* const (&rows)[4], int64_t j) {
    __m128 a[4];
    for (int r = 0; r < 4; ++r) a[r] = _mm_loadu_ps((const float*)(rows[r] + j));
    _MM_TRANSPOSE4_PS(a[0], a[1], a[2], a[3]);
    for (int i = 0; i < 4; ++i) _mm_storeu_ps((float*)(y + i * stride), a[i]);
}

// Copies rows first..first+rows into a panel: codes interleaved by fours, then the scales and sums of each group.
template <class RowOf>
ICC_INLINE void pack_quant(const QuantRows& x, int first, int rows, const QuantMicro& micro, char* data, RowOf row) {
    const int groups = x.groups(), mr = micro.mr;
    int8_t* panel = (int8_t*)data;
    float* scales = (float*)(data + micro.panel_bytes(x.k));
    float* sums = scales + (int64_t)mr * groups;
    const int8_t* four[4];  // rows that are packed together
    for (int r = 0; r < mr; ++r) {
        const int64_t i = row(first + (r < rows ? r : 0));  // padding rows repeat the first and are dropped
        const int8_t* q = x.q + i * x.k;
        four[r % 4] = q;
#if defined(ICC_MATRIX)
        if (micro.eights) {
            for (int64_t j = 0; j < x.k; j += 8) memcpy(panel + j * mr + 8 * r, q + j, 8);
        } else
#endif
        if (micro.pairs)
            for (int64_t j = 0; j < x.k; j += 16) store_pairs((int16_t*)panel + j * mr + 4 * r, 4 * mr, q + j);
        else if (r >= mr / 4 * 4)
            for (int64_t j = 0; j < x.k; j += 4) memcpy(panel + j * mr + 4 * r, q + j, 4);
        else if (r % 4 == 3)
            for (int64_t j = 0; j < x.k; j += 16) store_quads(panel + j * mr + 4 * (r - 3), 4 * mr, four, j);
        for (int g = 0; g < groups; ++g) scales[g * mr + r] = x.scales[i * groups + g], micro.store_sum(sums + g * mr + r, x.sums[i * groups + g]);
    }
}
