// The inside of one KV block, shared by the kernel that writes it and the kernel that reads it.
//
// Keys lie transposed by sixteen, [head][slot / 16][dim][slot % 16], so that scores are computed for sixteen tokens at a
// time; values lie [head][slot][dim]. Codes of 8 bits have one float scale per head and slot at the block's begin,
// keys then values; smaller ones two half floats, [keys][scale, centre][head][slot], then those of values. Products multiply pairs of integers: of int8, two neighbouring dims of a key, and two neighbouring
// slots of values, lie side by side: keys [head][slot / 16][dim / 2][slot % 16][dim % 2] (a last odd dim alone), values
// [head][slot / 2][dim][slot % 2]. Smaller codes fill bytes with neighbouring dims, from the low bits up:
// keys [head][slot / 16][byte][slot % 16], values [head][slot][byte].
#pragma once
#include <type_traits>

#include "rows.h"

// Codes of 4 and 2 bits stand for the odd numbers from -TOP to TOP, so that none is lost, times the vector's scale, about the
// vector's centre: asymmetric codes, in as many bits as one float. What they hold is mixed first (see `mix`): then the dims of a
// vector are about alike, whatever channels stood out.
struct I4 { uint8_t h; };
struct I2 { uint8_t h; };
template <class T> struct Cell { static constexpr int PER = 1, TOP = 0; };  // codes per byte
template <> struct Cell<I4> { static constexpr int PER = 2, TOP = 15; };
template <> struct Cell<I2> { static constexpr int PER = 4, TOP = 3; };
template <class T> constexpr bool is_integer() { return Cell<T>::PER > 1; }
template <> constexpr bool is_integer<int8_t>() { return true; }
// Whether each vector has a scale beside it, or two halves. A type of 8 bits that has none says so in a header of its own.
template <class T> constexpr bool is_scaled() { return sizeof(T) == 1; }
// Codes of 8 bits with a scale: `code` of a float, the largest magnitude being TOP, and UNIT, what `vload` gives codes divided by.
template <class T> struct Coding;
template <> struct Coding<int8_t> {
    static constexpr float TOP = 127.0f, UNIT = 1.0f;
    static int8_t code(float x) { return (int8_t)lrintf(x); }
};
template <> struct Coding<FiniteE4m3> {
    static constexpr float TOP = E4M3_TOP, UNIT = E4M3_UNIT;
    static FiniteE4m3 code(float x) { return FiniteE4m3{e4m3_bits(x)}; }
};
template <class T> using ScaleOf = typename std::conditional<(Cell<T>::PER > 1), Half, float>::type;

// SHARED: values are the first VD dims of keys, and have no place and no scale of their own; of mixed ones VD is a multiple of 64.
template <class T_, int HEADS, int KD, int VD, int BLOCK, bool SHARED_ = false> struct KvBlock {
    typedef T_ T;
    static constexpr bool SHARED = SHARED_;
    static constexpr int SCALES = SHARED ? 4 : 8;  // bytes per head and slot
    static constexpr bool SCALED = is_scaled<T>();
    static constexpr int PER = Cell<T>::PER, PAIR = SCALED && PER == 1 && is_integer<T>() ? 2 : 1;
    static constexpr int KW = (KD + PER - 1) / PER, VW = (VD + PER - 1) / PER;  // elements of a vector
    static constexpr int64_t BYTES = HEADS * BLOCK * ((KW + (SHARED ? 0 : VW)) * (int64_t)sizeof(T) + (SCALED ? SCALES : 0));
    char* base;

    typedef ScaleOf<T> Scale;
    static constexpr bool CENTRED = PER > 1;
    Scale* key_scale(int head) const { return (Scale*)base + head * BLOCK; }
    Scale* key_centre(int head) const { return (Scale*)base + (HEADS + head) * BLOCK; }
    Scale* value_scale(int head) const { return (Scale*)base + ((SHARED ? 0 : CENTRED ? 2 : 1) * HEADS + head) * BLOCK; }
    Scale* value_centre(int head) const { return (Scale*)base + ((SHARED ? 1 : 3) * HEADS + head) * BLOCK; }
    // The attention that a slot got, where it is counted: behind all else.
    float* score(int head) const { return (float*)(base + (BYTES + 3) / 4 * 4) + head * BLOCK; }
    T* data() const { return (T*)(base + (SCALED ? SCALES * HEADS * BLOCK : 0)); }
    T* keys(int head) const { return data() + (int64_t)head * KW * BLOCK; }
    T* values(int head) const { return data() + (int64_t)HEADS * KW * BLOCK + (int64_t)head * BLOCK * VW; }
    // Element d of a vector: dim d, or the codes of PER dims.
    T& key(int head, int slot, int d) const {
        const bool alone = PAIR == 1 || (KD % 2 && d == KD - 1);
        T* sixteen = keys(head) + slot / 16 * 16 * KW;
        return sixteen[d / PAIR * PAIR * 16 + (alone ? slot % 16 : slot % 16 * PAIR + d % PAIR)];
    }
    T& value(int head, int slot, int d) const {
        if (SHARED) return key(head, slot, d);
        return values(head)[slot / PAIR * PAIR * VW + d * PAIR + slot % PAIR];
    }
};

// An orthonormal Walsh-Hadamard transform, which is its own inverse, of every 64 of a vector's N elements, and of the powers
// of two that the rest is a sum of. Mixed vectors have the products that they had (QuaRot: Ashkboos et al. 2024).
template <int N> static void mix(float* x) {
    for (int at = 0, size = 64; at < N; at += size) {
        while (size > N - at) size /= 2;
        float* y = x + at;
        for (int half = 1; half < size; half *= 2)
            for (int i = 0; i < size; i += 2 * half)
                for (int j = i; j < i + half; ++j) {
                    const float a = y[j], b = y[j + half];
                    y[j] = a + b, y[j + half] = a - b;
                }
        const float scale = 1.0f / sqrtf((float)size);
        for (int i = 0; i < size; ++i) y[i] *= scale;
    }
}

// The code of x in units of a scale: the nearest odd number.
template <int TOP> ICC_INLINE int odd_code(float x) {
    const float code = floorf(x * 0.5f) + (float)((TOP + 1) / 2);
    return code < 0.0f ? 0 : code > (float)TOP ? TOP : (int)code;
}

// Where a vector's codes are centred, and what odd numbers are multiplied by: of 4 bits, so that both ends are reached; of 2,
// what loses least of normal numbers. Halves as they are stored.
struct Span { Half scale, centre; };
template <int TOP> ICC_INLINE Span code_span(const float* x, int n) {
    float low = x[0], high = x[0], sum = 0.0f, squares = 0.0f;
    for (int i = 0; i < n; ++i) {
        low = x[i] < low ? x[i] : low, high = x[i] > high ? x[i] : high;
        sum += x[i];
    }
    const float centre = TOP > 3 ? 0.5f * low + 0.5f * high : sum / (float)n;
    for (int i = 0; i < n; ++i) squares += (x[i] - centre) * (x[i] - centre);
    const float scale = TOP > 3 ? (0.5f * high - 0.5f * low) / (float)TOP : 0.498f * sqrtf(squares / (float)n);
    Span span;
    assign(span.scale, scale < F16_TOP ? scale : F16_TOP);
    assign(span.centre, centre > F16_TOP ? F16_TOP : centre < -F16_TOP ? -F16_TOP : centre);
    return span;
}

// Stores one head's vector of n floats, dst(i) being where element i goes, with what multiplies codes and is added to them.
template <class F, class Scale> ICC_INLINE void store_kv(F dst, const float* x, int n, Scale* scale, Scale* centre) {
    typedef typename std::remove_reference<decltype(dst(0))>::type T;
    if constexpr (is_scaled<T>()) {
        float peak = 0.0f, poison = 0.0f;
        for (int i = 0; i < n; ++i) {
            peak = fabsf(x[i]) > peak ? fabsf(x[i]) : peak;
            poison += x[i] * 0.0f;
        }
        const bool finite = poison == 0.0f;
        if constexpr (Cell<T>::PER > 1) {
            constexpr int PER = Cell<T>::PER, TOP = Cell<T>::TOP, BITS = 8 / PER;
            const Span span = code_span<TOP>(x, n);
            const float unit = value(span.scale), middle = value(span.centre), inverse = unit > 0.0f ? 1.0f / unit : 0.0f;
            for (int i = 0; i < n; i += PER) {
                int byte = 0;
                for (int j = 0; j < PER && i + j < n; ++j) byte |= odd_code<TOP>(finite ? (x[i + j] - middle) * inverse : 0.0f) << (BITS * j);
                dst(i / PER).h = (uint8_t)byte;
            }
            assign(*scale, finite ? unit : NAN), assign(*centre, finite ? middle : NAN);
        } else {
            const float inverse = finite && peak > 1e-30f ? Coding<T>::TOP / peak : 0.0f;
            for (int i = 0; i < n; ++i) dst(i) = finite ? Coding<T>::code(x[i] * inverse) : T{};
            *scale = finite ? peak / Coding<T>::TOP * Coding<T>::UNIT : NAN;
        }
    } else {
        for (int i = 0; i < n; ++i) assign(dst(i), x[i]);
    }
}

// How products read codes by sixteen, pairs of 16-bit integers in 32-bit lanes. keys: dims d and d + 1 (`both`, or the last
// one alone) of sixteen slots; `next_keys` is how far the next two are. values: columns of a slot and the slot after, `width`
// elements further; n of sixteen where there are fewer.
ICC_INLINE VI code_keys(const int8_t* k, int, bool both) { return both ? load_pairs(k) : load_singles(k); }
ICC_INLINE VI code_keys(const I4* k, int, bool) {
    // of a byte both fields times two, 16 bits apart: a product, as no bits of b * 2 and b << 13 meet, of which the rest is cut off
    const VI x = mul_pairs(load_bytes((const uint8_t*)k), vi(0x2002));
    return sub16(x & vi(0x1e001e), vi(0xf000f));
}
ICC_INLINE VI code_keys(const I2* k, int d, bool) {
    VI x = load_bytes((const uint8_t*)k);
    if (d % 4) x = shr<4>(x);
    return odd_pairs<3>((x & vi(3)) | shl<14>(x & vi(12)));
}
template <class T> ICC_INLINE int next_keys(int d) {
    return Cell<T>::PER == 1 ? (is_integer<T>() ? 32 : 16) : Cell<T>::PER == 2 || d % 4 == 2 ? 16 : 0;
}
ICC_INLINE VI code_values(const int8_t* v, int, int n) { return n < 16 ? load_pairs_n(v, n) : load_pairs(v); }
ICC_INLINE VI code_values(const I4* v, int width, int n) {
    uint64_t x = 0, y = 0;
    memcpy(&x, v, (size_t)(n + 1) / 2), memcpy(&y, v + width, (size_t)(n + 1) / 2);
    return sub16(twice_field_pairs(x, y), vi(0xf000f));
}
template <class T> ICC_INLINE VI code_values(const T* v, int width, int n) {
    constexpr int PER = Cell<T>::PER;
    uint64_t x = 0, y = 0;
    memcpy(&x, v, (size_t)(n + PER - 1) / PER), memcpy(&y, v + width, (size_t)(n + PER - 1) / PER);
    return odd_pairs<Cell<T>::TOP>(fields<8 / PER>(x) | shl<16>(fields<8 / PER>(y)));
}

// Copies K and V of one head and slot of one block to those of another, which may be of another length.
template <class Source, class Target>
ICC_INLINE void copy_slot(const Source& source, int head, int slot, const Target& target, int to_head, int to) {
    if (Source::SCALED) {
        target.key_scale(to_head)[to] = source.key_scale(head)[slot];
        target.value_scale(to_head)[to] = source.value_scale(head)[slot];
        if (source.CENTRED) {
            target.key_centre(to_head)[to] = source.key_centre(head)[slot];
            target.value_centre(to_head)[to] = source.value_centre(head)[slot];
        }
    }
    for (int d = 0; d < source.KW; ++d) target.key(to_head, to, d) = source.key(head, slot, d);
    for (int d = 0; d < (Target::SHARED ? 0 : source.VW); ++d) target.value(to_head, to, d) = source.value(head, slot, d);
}

// Copies K and V of slot `from` to slot `to` in one layer, whose blocks are block_bytes apart.
template <class T, int HEADS, int KD, int VD, int BLOCK, bool SHARED>
static void move_slot(char* kv, int64_t block_bytes, int32_t from, int32_t to) {
    typedef KvBlock<T, HEADS, KD, VD, BLOCK, SHARED> Block;
    const Block source{kv + from / BLOCK * block_bytes}, target{kv + to / BLOCK * block_bytes};
    for (int head = 0; head < HEADS; ++head) copy_slot(source, head, from % BLOCK, target, head, to % BLOCK);
}
