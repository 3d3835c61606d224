// Read before a library's source by clang alone: what g++ has and clang lacks.
#pragma once

// A shuffle of vectors by a vector, which clang makes one instruction of where the lanes are constants.
template <typename V, typename L> static inline __attribute__((always_inline)) V __builtin_shuffle(V x, L lanes) {
    V y;
    for (int i = 0; i < (int)(sizeof(L) / sizeof(lanes[0])); ++i) y[i] = x[lanes[i]];
    return y;
}
template <typename V, typename L> static inline __attribute__((always_inline)) V __builtin_shuffle(V a, V b, L lanes) {
    constexpr int n = (int)(sizeof(L) / sizeof(lanes[0]));
    V y;
    for (int i = 0; i < n; ++i) y[i] = (int)lanes[i] < n ? a[lanes[i]] : b[lanes[i] - n];
    return y;
}
