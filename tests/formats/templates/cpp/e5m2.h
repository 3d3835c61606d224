#pragma once
#include "kv.h"

// Floats of 8 bits, the upper half of a Half, that are kept without a scale.
struct E5m2 { uint8_t h; };
template <> constexpr bool is_scaled<E5m2>() { return false; }
ICC_INLINE VF vload(const E5m2* p) {
    Half x[16];
    for (int i = 0; i < 16; ++i) x[i].h = (uint16_t)(p[i].h << 8);
    return vload(x);
}
ICC_INLINE VF vload_n(const E5m2* p, int n) { return vload_n8(p, n); }
ICC_INLINE void assign(E5m2& to, float x) {
    Half half;
    assign(half, x);
    to.h = (uint8_t)((half.h + 0x7f + (half.h >> 8 & 1)) >> 8);
}
