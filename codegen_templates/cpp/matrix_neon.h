#pragma once
// i8mm: the products of two rows of eight bytes with two others and their sums, in one instruction: 32 products, twice those of
// sdot. Weights are its first operand, activations the second.
ICC_INLINE int32x4_t sum_matrix(int32x4_t acc, int8x16_t w, int8x16_t x) { return vmmlaq_s32(acc, w, x); }
ICC_INLINE int32x4_t sum_matrix(int32x4_t acc, uint8x16_t w, int8x16_t x) { return vusmmlaq_s32(acc, w, x); }

constexpr int MATRIX_K = 256;  // codes of so many k, of sixteen rows of W, lie in the L1 cache meanwhile

// y[i] = rows 2i and 2i+1 of W, eight k each: of sixteen rows the first four k and the other four.
ICC_INLINE void store_eights(int8_t* y, VI first, VI second) {
    const __m128i x[] = {x86::low(first.a), x86::high(first.a), x86::low(first.b), x86::high(first.b)};
    const __m128i next[] = {x86::low(second.a), x86::high(second.a), x86::low(second.b), x86::high(second.b)};
    for (int i = 0; i < 4; ++i) {
        const int32x4x2_t both = {{(int32x4_t)x[i], (int32x4_t)next[i]}};
        vst2q_s32((int32_t*)(y + 32 * i), both);
    }
}

constexpr int PAIRS = 4;       // of rows of W, half a tile: their sums with 12 rows of x take 24 registers

// ROWS rows of x times 2 * PAIRS rows of W: y[ROWS][16] gets their integer sums over `steps` times eight k, or `more` to what it
// has; with BEGINS they begin at the integers begin[ROWS]. w: [steps][8 pairs][2][8], x: [steps][stride]; its registers are
// ROWS * PAIRS / 2 sums, PAIRS pairs of W and some of x.
template <class Code, int ROWS, bool BEGINS>
static __attribute__((noinline)) void matrix_block(const int8_t* w, const int8_t* x, int64_t stride, int steps, int32_t* y,
                                                   bool more, const float* begin) {
    int32x4_t acc[ROWS / 2][PAIRS] = {};
    for (int r = 0; BEGINS && r < ROWS / 2; ++r)
        for (int p = 0; p < PAIRS; ++p) acc[r][p] = (int32x4_t)vdupq_n_s64(x86::load<int64_t>(begin + 2 * r));
    for (int i = 0; i < steps; ++i, w += 128, x += stride) {
        Code pairs[PAIRS];
        for (int p = 0; p < PAIRS; ++p) pairs[p] = x86::load<Code>(w + 16 * p);
        for (int r = 0; r < ROWS / 2; ++r) {
            const int8x16_t two = x86::load<int8x16_t>(x + 16 * r);
            for (int p = 0; p < PAIRS; ++p) acc[r][p] = sum_matrix(acc[r][p], pairs[p], two);
        }
    }
    for (int r = 0; r < ROWS; ++r, y += 16)
        for (int p = 0; p < PAIRS; p += 2) {  // a sum's even lanes are the first row's, its odd ones the second's
            const int32x4_t a = acc[r / 2][p], b = acc[r / 2][p + 1], row = r % 2 ? vuzp2q_s32(a, b) : vuzp1q_s32(a, b);
            vst1q_s32(y + 2 * p, more ? vaddq_s32(row, vld1q_s32(y + 2 * p)) : row);
        }
}

// All ROWS of a panel times sixteen rows of W. begin: as panels hold it, see QuantMicro.
template <class Code, int ROWS, bool BEGINS>
ICC_INLINE void multiply_matrices(const int8_t* w, const int8_t* panel, int steps, int32_t* y, bool more, const float* begin) {
    constexpr int EACH = ROWS <= 12 ? ROWS : ROWS % 12 ? 8 : 12;
    static_assert(ROWS % EACH == 0 && EACH % 2 == 0, "a block of rows has whole pairs");
    for (int row = 0; row < ROWS; row += EACH)
        for (int pair = 0; pair < 8; pair += PAIRS)
            matrix_block<Code, EACH, BEGINS>(w + 16 * pair, panel + 8 * row, 8 * ROWS, steps, y + 16 * row + 2 * pair, more, begin + row);
}
