// The inside of one KV block, shared by the kernel that writes it and the kernel that reads it.
//
// Keys lie transposed by sixteen, [head][slot / 16][dim][slot % 16], so that scores are computed for sixteen tokens at a
// time; values lie [head][slot][dim]. An i8 cache begins with one float scale per head and slot, keys then values; its
// products multiply pairs of integers, so two neighbouring dims of a key, and two neighbouring slots of values, lie side by
// side: keys [head][slot / 16][dim / 2][slot % 16][dim % 2] (a last odd dim alone), values [head][slot / 2][dim][slot % 2].
#pragma once
#include "rows.h"

template <class T_, int HEADS, int KD, int VD, int BLOCK> struct KvBlock {
    typedef T_ T;
    static constexpr bool SCALED = sizeof(T) == 1;
    static constexpr int PAIR = SCALED ? 2 : 1;
    static constexpr int64_t BYTES = HEADS * BLOCK * ((KD + VD) * (int64_t)sizeof(T) + (SCALED ? 8 : 0));
    char* base;

    float* key_scale(int head) const { return (float*)base + head * BLOCK; }
    float* value_scale(int head) const { return (float*)base + (HEADS + head) * BLOCK; }
    T* data() const { return (T*)(base + (SCALED ? 8 * HEADS * BLOCK : 0)); }
    T* keys(int head) const { return data() + (int64_t)head * KD * BLOCK; }
    T* values(int head) const { return data() + (int64_t)HEADS * KD * BLOCK + (int64_t)head * BLOCK * VD; }
    T& key(int head, int slot, int d) const {
        const bool alone = PAIR == 1 || (KD % 2 && d == KD - 1);
        T* sixteen = keys(head) + slot / 16 * 16 * KD;
        return sixteen[d / PAIR * PAIR * 16 + (alone ? slot % 16 : slot % 16 * PAIR + d % PAIR)];
    }
    T& value(int head, int slot, int d) const {
        return values(head)[slot / PAIR * PAIR * VD + d * PAIR + slot % PAIR];
    }
};

// Stores one head's vector of n floats, dst(i) being where element i goes; returns through *scale what multiplies int8 codes.
template <class F> ICC_INLINE void store_kv(F dst, const float* x, int n, float* scale) {
    if constexpr (sizeof(dst(0)) == 1) {
        float peak = 0.0f, poison = 0.0f;
        for (int i = 0; i < n; ++i) {
            peak = fabsf(x[i]) > peak ? fabsf(x[i]) : peak;
            poison += x[i] * 0.0f;
        }
        const bool finite = poison == 0.0f;
        const float inverse = finite && peak > 1e-30f ? 127.0f / peak : 0.0f;
        for (int i = 0; i < n; ++i) dst(i) = finite ? (int8_t)lrintf(x[i] * inverse) : (int8_t)0;
        *scale = finite ? peak / 127.0f : NAN;
    } else {
        for (int i = 0; i < n; ++i) assign(dst(i), x[i]);
    }
}

// Copies K and V of one head and slot of one block to those of another, which may be of another length.
template <int HEADS, int TO_HEADS, class T, int KD, int VD, int BLOCK, int TO_BLOCK>
ICC_INLINE void copy_slot(const KvBlock<T, HEADS, KD, VD, BLOCK>& source, int head, int slot,
                          const KvBlock<T, TO_HEADS, KD, VD, TO_BLOCK>& target, int to_head, int to) {
    if (sizeof(T) == 1) {
        target.key_scale(to_head)[to] = source.key_scale(head)[slot];
        target.value_scale(to_head)[to] = source.value_scale(head)[slot];
    }
    for (int d = 0; d < KD; ++d) target.key(to_head, to, d) = source.key(head, slot, d);
    for (int d = 0; d < VD; ++d) target.value(to_head, to, d) = source.value(head, slot, d);
}

// Copies K and V of slot `from` to slot `to` in one layer, whose blocks are block_bytes apart.
template <class T, int HEADS, int KD, int VD, int BLOCK>
static void move_slot(char* kv, int64_t block_bytes, int32_t from, int32_t to) {
    typedef KvBlock<T, HEADS, KD, VD, BLOCK> Block;
    const Block source{kv + from / BLOCK * block_bytes}, target{kv + to / BLOCK * block_bytes};
    for (int head = 0; head < HEADS; ++head) copy_slot(source, head, from % BLOCK, target, head, to % BLOCK);
}
