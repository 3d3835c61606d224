// Strided loads and stores of sixteen elements, of which the first n exist.
#pragma once
#include "vmath.h"

template <int64_t STRIDE, class T> ICC_INLINE VF load_f(const T* p, int64_t j, int n) {
    if constexpr (STRIDE == 0) return vf(value(*p));
    if constexpr (STRIDE == 1) return n == 16 ? vload(p + j) : vload_n(p + j, n);
    float t[16] = {};
    for (int i = 0; i < n; ++i) t[i] = value(p[(j + i) * STRIDE]);
    return vload(t);
}
template <int64_t STRIDE> ICC_INLINE VI load_i(const int32_t* p, int64_t j, int n) {
    if constexpr (STRIDE == 0) return vi(*p);
    if constexpr (STRIDE == 1) return n == 16 ? viload(p + j) : viload_n(p + j, n);
    int32_t t[16] = {};
    for (int i = 0; i < n; ++i) t[i] = p[(j + i) * STRIDE];
    return viload(t);
}
template <int64_t STRIDE> ICC_INLINE void store_f(float* p, int64_t j, int n, VF x) {
    if constexpr (STRIDE == 1) {
        n == 16 ? vstore(p + j, x) : vstore_n(p + j, x, n);
    } else {
        float t[16];
        vstore(t, x);
        for (int i = 0; i < n; ++i) p[(j + i) * STRIDE] = t[i];
    }
}
template <int64_t STRIDE> ICC_INLINE void store_i(int32_t* p, int64_t j, int n, VI x) {
    if constexpr (STRIDE == 1) {
        n == 16 ? vistore(p + j, x) : vistore_n(p + j, x, n);
    } else {
        int32_t t[16];
        vistore(t, x);
        for (int i = 0; i < n; ++i) p[(j + i) * STRIDE] = t[i];
    }
}
