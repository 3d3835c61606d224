// The inside of one KV block, shared by the kernel that writes it and the kernel that reads it.
//
// Keys lie transposed, [head][dim][slot], so that scores are computed for sixteen tokens at a time; values lie
// [head][slot][dim]. An i8 cache begins with one float scale per head and slot, keys then values.
#pragma once
#include "rows.h"

template <class T, int HEADS, int KD, int VD, int BLOCK> struct KvBlock {
    static constexpr bool SCALED = sizeof(T) == 1;
    char* base;

    float* key_scale(int head) const { return (float*)base + head * BLOCK; }
    float* value_scale(int head) const { return (float*)base + (HEADS + head) * BLOCK; }
    T* data() const { return (T*)(base + (SCALED ? 8 * HEADS * BLOCK : 0)); }
    T* key(int head) const { return data() + (int64_t)head * KD * BLOCK; }
    T* value(int head) const { return data() + (int64_t)HEADS * KD * BLOCK + (int64_t)head * BLOCK * VD; }
};

ICC_INLINE float value(int8_t x) { return (float)x; }
ICC_INLINE VF vload(const int8_t* p) { return load_i8(p); }
ICC_INLINE VF vload_n(const int8_t* p, int n) {
    int8_t t[16] = {};
    memcpy(t, p, (size_t)n);
    return load_i8(t);
}

// Stores one head's vector of n floats with `step` between elements; returns through *scale what multiplies int8 codes.
template <class T> ICC_INLINE void store_kv(T* dst, int64_t step, const float* x, int n, float* scale) {
    if constexpr (sizeof(T) == 1) {
        float peak = 0.0f, poison = 0.0f;
        for (int i = 0; i < n; ++i) {
            peak = fabsf(x[i]) > peak ? fabsf(x[i]) : peak;
            poison += x[i] * 0.0f;
        }
        const bool finite = poison == 0.0f;
        const float inverse = finite && peak > 1e-30f ? 127.0f / peak : 0.0f;
        for (int i = 0; i < n; ++i) dst[i * step] = finite ? (int8_t)lrintf(x[i] * inverse) : (int8_t)0;
        *scale = finite ? peak / 127.0f : NAN;
    } else {
        for (int i = 0; i < n; ++i) assign(dst[i * step], x[i]);
    }
}

// Copies K and V of slot `from` to slot `to` in one layer, whose blocks are block_bytes apart.
template <class T, int HEADS, int KD, int VD, int BLOCK>
static void copy_slot(char* kv, int64_t block_bytes, int32_t from, int32_t to) {
    typedef KvBlock<T, HEADS, KD, VD, BLOCK> Block;
    const Block source{kv + from / BLOCK * block_bytes}, target{kv + to / BLOCK * block_bytes};
    const int i = from % BLOCK, j = to % BLOCK;
    for (int head = 0; head < HEADS; ++head) {
        if (Block::SCALED) {
            target.key_scale(head)[j] = source.key_scale(head)[i];
            target.value_scale(head)[j] = source.value_scale(head)[i];
        }
        for (int d = 0; d < KD; ++d) target.key(head)[d * BLOCK + j] = source.key(head)[d * BLOCK + i];
        memmove(target.value(head) + j * VD, source.value(head) + i * VD, sizeof(T) * VD);
    }
}
