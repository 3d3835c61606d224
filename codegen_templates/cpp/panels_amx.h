#pragma once
// AMX: a micro-kernel of whole sixteens of rows reads its panel as tiles, panel[k / depth][mr][depth]; others as on every level.
#define pack_quant pack_interleaved
#include "panels.h"
#undef pack_quant
constexpr int TILE_ROWS = 16;
ICC_INLINE bool by_tiles(const QuantMicro& micro) { return micro.mr % TILE_ROWS == 0; }

// k of a tile: 64 bytes at most, and no group ends inside one.
ICC_INLINE int tile_depth(int group) { return group % 64 == 0 ? 64 : group % 32 == 0 ? 32 : 16; }

// What the instructions read or wrote by address has been, or will be: compilers do not see it.
ICC_INLINE void tile_fence(const void* memory) { asm volatile("" : : "r"(memory) : "memory"); }

template <class RowOf>
ICC_INLINE void pack_quant(const QuantRows& x, int first, int rows, const QuantMicro& micro, char* data, RowOf row) {
    if (!by_tiles(micro)) return pack_interleaved(x, first, rows, micro, data, row);
    const int groups = x.groups(), mr = micro.mr, depth = tile_depth(x.group);
    float* scales = (float*)(data + micro.panel_bytes(x.k));
    float* sums = scales + (int64_t)mr * groups;
    for (int r = 0; r < mr; ++r) {
        const int64_t i = row(first + (r < rows ? r : 0));  // padding rows repeat the first and are dropped
        for (int64_t j = 0; j < x.k; j += depth) memcpy(data + j * mr + r * depth, x.q + i * x.k + j, depth);
        for (int g = 0; g < groups; ++g) scales[g * mr + r] = x.scales[i * groups + g], sums[g * mr + r] = x.sums[i * groups + g];
    }
}

// The thread's tiles while it multiplies `rows` rows, where a micro-kernel for so many uses them: 0 to 3 hold sums, 4 and 5
// rows of x, 6 and 7 codes. Given back afterwards: a core whose tiles are in use sleeps less deeply and switches more slowly.
struct TilesInUse {
    bool used;

    template <int COUNT> TilesInUse(const QuantMicro (&list)[COUNT], int rows, int group) : used(by_tiles(list[pick(list, rows)])) {
        if (!used) return;
        struct alignas(64) { uint8_t palette, start_row, reserved[14]; uint16_t row_bytes[16]; uint8_t rows[16]; } shape = {1};
        const int depth = tile_depth(group);
        for (int i = 0; i < 8; ++i) shape.row_bytes[i] = 64, shape.rows[i] = TILE_ROWS;
        shape.row_bytes[4] = shape.row_bytes[5] = (uint16_t)depth;
        shape.rows[6] = shape.rows[7] = (uint8_t)(depth / 4);
        tile_fence(&shape);
        _tile_loadconfig(&shape);
    }
    ~TilesInUse() {
        if (used) _tile_release();
    }
};
