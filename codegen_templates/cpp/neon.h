// For levels of arm64 in the place of <immintrin.h>: what the headers and kernels of AVX2 use of it, on clang's vectors, of which
// one of 32 bytes is a pair of NEON registers. So a level of arm64 is this and its dot products. Part of simd.h and blake3.h.
#ifndef ICC_NEON
#define ICC_NEON
#include <arm_neon.h>
#include <stdint.h>
#include <string.h>

#define ICC_X86 static inline __attribute__((always_inline))
#define ICC_VECTOR(name, type, bytes) typedef type name __attribute__((vector_size(bytes)))
ICC_VECTOR(__m128, float, 16);
ICC_VECTOR(__m128d, double, 16);
ICC_VECTOR(__m128i, int64_t, 16);
ICC_VECTOR(__m256, float, 32);
ICC_VECTOR(__m256i, int64_t, 32);
namespace x86 {
ICC_VECTOR(i8x8, int8_t, 8);
ICC_VECTOR(u8x8, uint8_t, 8);
ICC_VECTOR(i8x16, int8_t, 16);
ICC_VECTOR(u8x16, uint8_t, 16);
ICC_VECTOR(i16x8, int16_t, 16);
ICC_VECTOR(u16x8, uint16_t, 16);
ICC_VECTOR(i32x4, int32_t, 16);
ICC_VECTOR(f16x8, __fp16, 16);
ICC_VECTOR(i8x32, int8_t, 32);
ICC_VECTOR(i16x16, int16_t, 32);
ICC_VECTOR(u16x16, uint16_t, 32);
ICC_VECTOR(i32x8, int32_t, 32);
ICC_VECTOR(u32x8, uint32_t, 32);
template <class V> ICC_X86 V load(const void* p) {
    V x;
    memcpy(&x, p, sizeof x);
    return x;
}
template <class V> ICC_X86 void store(void* p, V x) { memcpy(p, &x, sizeof x); }
ICC_X86 __m128i low(__m256i x) { return __builtin_shufflevector(x, x, 0, 1); }
ICC_X86 __m128i high(__m256i x) { return __builtin_shufflevector(x, x, 2, 3); }
ICC_X86 __m256i join(__m128i x, __m128i y) { return __builtin_shufflevector(x, y, 0, 1, 2, 3); }
ICC_X86 i8x8 eight(__m128i x) { return __builtin_shufflevector((i8x16)x, (i8x16)x, 0, 1, 2, 3, 4, 5, 6, 7); }
ICC_X86 i32x8 clamp(__m256i x, int32_t least, int32_t most) {
    const i32x8 bottom = i32x8{} + least, top = i32x8{} + most;
    return __builtin_elementwise_min(__builtin_elementwise_max((i32x8)x, bottom), top);
}
}  // namespace x86

// ---- memory ----
#define _MM_HINT_T0 3
#define _MM_HINT_T1 2
#define _mm_prefetch(p, hint) __builtin_prefetch(p, 0, hint)
ICC_X86 void _mm_pause() { asm volatile("yield"); }
ICC_X86 __m128 _mm_loadu_ps(const float* p) { return x86::load<__m128>(p); }
ICC_X86 __m256 _mm256_loadu_ps(const float* p) { return x86::load<__m256>(p); }
ICC_X86 __m128i _mm_loadu_si128(const void* p) { return x86::load<__m128i>(p); }
ICC_X86 __m256i _mm256_loadu_si256(const void* p) { return x86::load<__m256i>(p); }
ICC_X86 __m256i _mm256_load_si256(const void* p) { return x86::load<__m256i>(p); }
ICC_X86 void _mm_storeu_ps(float* p, __m128 x) { x86::store(p, x); }
ICC_X86 void _mm256_storeu_ps(float* p, __m256 x) { x86::store(p, x); }
ICC_X86 void _mm_storeu_si128(void* p, __m128i x) { x86::store(p, x); }
ICC_X86 void _mm256_storeu_si256(void* p, __m256i x) { x86::store(p, x); }
ICC_X86 void _mm256_store_si256(void* p, __m256i x) { x86::store(p, x); }
ICC_X86 void _mm_storel_epi64(void* p, __m128i x) { x86::store(p, (int64_t)x[0]); }
ICC_X86 void _mm_storeh_pd(double* p, __m128d x) { x86::store(p, (double)x[1]); }

// ---- constants and casts ----
ICC_X86 __m256 _mm256_set1_ps(float x) { return __m256{x, x, x, x, x, x, x, x}; }  // 0 + x would be 0 of -0
ICC_X86 __m256i _mm256_set1_epi32(int32_t x) { return (__m256i)(x86::i32x8{} + x); }
ICC_X86 __m256i _mm256_set1_epi16(int16_t x) { return (__m256i)(x86::i16x16{} + x); }
ICC_X86 __m256i _mm256_set1_epi8(int8_t x) { return (__m256i)(x86::i8x32{} + x); }
ICC_X86 __m128i _mm_set1_epi8(int8_t x) { return (__m128i)(x86::i8x16{} + x); }
ICC_X86 __m256i _mm256_setzero_si256() { return __m256i{}; }
ICC_X86 __m128 _mm_set_ss(float x) { return __m128{x, 0, 0, 0}; }
ICC_X86 float _mm_cvtss_f32(__m128 x) { return x[0]; }
ICC_X86 __m128i _mm_cvtsi64_si128(int64_t x) { return __m128i{x, 0}; }
template <class... Byte> ICC_X86 __m128i _mm_setr_epi8(Byte... x) { return (__m128i)(x86::i8x16){(int8_t)x...}; }  // char has no sign
#define _mm256_setr_epi32(...) ((__m256i)(x86::i32x8){__VA_ARGS__})
ICC_X86 __m256 _mm256_castsi256_ps(__m256i x) { return (__m256)x; }
ICC_X86 __m256i _mm256_castps_si256(__m256 x) { return (__m256i)x; }
ICC_X86 __m128 _mm_castsi128_ps(__m128i x) { return (__m128)x; }
ICC_X86 __m128d _mm_castsi128_pd(__m128i x) { return (__m128d)x; }
ICC_X86 __m128i _mm256_castsi256_si128(__m256i x) { return x86::low(x); }
ICC_X86 __m128 _mm256_castps256_ps128(__m256 x) { return (__m128)x86::low((__m256i)x); }
#define _mm256_extracti128_si256(x, half) ((half) ? x86::high(x) : x86::low(x))
#define _mm256_extractf128_ps(x, half) ((__m128)((half) ? x86::high((__m256i)(x)) : x86::low((__m256i)(x))))
ICC_X86 __m256i _mm256_broadcastsi128_si256(__m128i x) { return x86::join(x, x); }

// ---- floats ----
ICC_X86 __m256 _mm256_add_ps(__m256 x, __m256 y) { return x + y; }
ICC_X86 __m256 _mm256_sub_ps(__m256 x, __m256 y) { return x - y; }
ICC_X86 __m256 _mm256_mul_ps(__m256 x, __m256 y) { return x * y; }
ICC_X86 __m256 _mm256_div_ps(__m256 x, __m256 y) { return x / y; }
ICC_X86 __m256 _mm256_fmadd_ps(__m256 x, __m256 y, __m256 z) { return __builtin_elementwise_fma(x, y, z); }
ICC_X86 __m256 _mm256_fnmadd_ps(__m256 x, __m256 y, __m256 z) { return __builtin_elementwise_fma(-x, y, z); }
ICC_X86 __m256 _mm256_sqrt_ps(__m256 x) { return __builtin_elementwise_sqrt(x); }
ICC_X86 __m256 _mm256_max_ps(__m256 x, __m256 y) { return x > y ? x : y; }  // the second where either is no number
ICC_X86 __m256 _mm256_min_ps(__m256 x, __m256 y) { return x < y ? x : y; }
ICC_X86 __m256 _mm256_and_ps(__m256 x, __m256 y) { return (__m256)((__m256i)x & (__m256i)y); }
ICC_X86 __m256 _mm256_xor_ps(__m256 x, __m256 y) { return (__m256)((__m256i)x ^ (__m256i)y); }
ICC_X86 __m256 _mm256_blendv_ps(__m256 x, __m256 y, __m256 choose) { return (x86::i32x8)choose < 0 ? y : x; }
enum { _MM_FROUND_TO_NEAREST_INT, _MM_FROUND_TO_NEG_INF, _MM_FROUND_TO_POS_INF, _MM_FROUND_TO_ZERO, _MM_FROUND_NO_EXC = 8 };
ICC_X86 __m256 _mm256_round_ps(__m256 x, int mode) {
    switch (mode & 3) {
        case _MM_FROUND_TO_NEAREST_INT: return __builtin_elementwise_roundeven(x);
        case _MM_FROUND_TO_NEG_INF: return __builtin_elementwise_floor(x);
        case _MM_FROUND_TO_POS_INF: return __builtin_elementwise_ceil(x);
        default: return __builtin_elementwise_trunc(x);
    }
}
enum { _CMP_EQ_OQ, _CMP_NEQ_UQ, _CMP_LT_OQ, _CMP_LE_OQ, _CMP_GT_OQ, _CMP_GE_OQ, _CMP_UNORD_Q };
ICC_X86 __m256 _mm256_cmp_ps(__m256 x, __m256 y, int code) {
    switch (code) {
        case _CMP_EQ_OQ: return (__m256)(x == y);
        case _CMP_NEQ_UQ: return (__m256)(x != y);
        case _CMP_LT_OQ: return (__m256)(x < y);
        case _CMP_LE_OQ: return (__m256)(x <= y);
        case _CMP_GT_OQ: return (__m256)(x > y);
        case _CMP_GE_OQ: return (__m256)(x >= y);
        default: return (__m256)((x != x) | (y != y));
    }
}
ICC_X86 __m128 _mm_add_ps(__m128 x, __m128 y) { return x + y; }
ICC_X86 __m128 _mm_max_ps(__m128 x, __m128 y) { return x > y ? x : y; }
ICC_X86 __m128 _mm_add_ss(__m128 x, __m128 y) { return __m128{x[0] + y[0], x[1], x[2], x[3]}; }
ICC_X86 __m128 _mm_max_ss(__m128 x, __m128 y) { return __m128{x[0] > y[0] ? x[0] : y[0], x[1], x[2], x[3]}; }
ICC_X86 __m128 _mm_sqrt_ss(__m128 x) { return __m128{__builtin_sqrtf(x[0]), x[1], x[2], x[3]}; }
ICC_X86 __m128 _mm_movehl_ps(__m128 x, __m128 y) { return __builtin_shufflevector(y, x, 2, 3, 6, 7); }
ICC_X86 __m128 _mm_movehdup_ps(__m128 x) { return __builtin_shufflevector(x, x, 1, 1, 3, 3); }
#define _MM_TRANSPOSE4_PS(a, b, c, d)                                                                                       \
    do {                                                                                                                    \
        const __m128 ab = __builtin_shufflevector(a, b, 0, 4, 1, 5), cd = __builtin_shufflevector(c, d, 0, 4, 1, 5);        \
        const __m128 more_ab = __builtin_shufflevector(a, b, 2, 6, 3, 7), more_cd = __builtin_shufflevector(c, d, 2, 6, 3, 7); \
        a = __builtin_shufflevector(ab, cd, 0, 1, 4, 5), b = __builtin_shufflevector(ab, cd, 2, 3, 6, 7);                   \
        c = __builtin_shufflevector(more_ab, more_cd, 0, 1, 4, 5), d = __builtin_shufflevector(more_ab, more_cd, 2, 3, 6, 7); \
    } while (0)

// ---- conversions ----
ICC_X86 __m256i _mm256_cvtps_epi32(__m256 x) {
    return x86::join((__m128i)vcvtnq_s32_f32((float32x4_t)x86::low((__m256i)x)),
                     (__m128i)vcvtnq_s32_f32((float32x4_t)x86::high((__m256i)x)));
}
ICC_X86 __m256i _mm256_cvttps_epi32(__m256 x) {
    return x86::join((__m128i)vcvtq_s32_f32((float32x4_t)x86::low((__m256i)x)),
                     (__m128i)vcvtq_s32_f32((float32x4_t)x86::high((__m256i)x)));
}
ICC_X86 __m256 _mm256_cvtepi32_ps(__m256i x) { return __builtin_convertvector((x86::i32x8)x, __m256); }
ICC_X86 __m256 _mm256_cvtph_ps(__m128i x) { return __builtin_convertvector((x86::f16x8)x, __m256); }
ICC_X86 __m128i _mm256_cvtps_ph(__m256 x, int) { return (__m128i)__builtin_convertvector(x, x86::f16x8); }
ICC_X86 float _cvtsh_ss(uint16_t x) { return (float)x86::load<__fp16>(&x); }
ICC_X86 uint16_t _cvtss_sh(float x, int) {
    const __fp16 half = (__fp16)x;
    return x86::load<uint16_t>(&half);
}
ICC_X86 __m256i _mm256_cvtepi8_epi16(__m128i x) { return (__m256i)__builtin_convertvector((x86::i8x16)x, x86::i16x16); }
ICC_X86 __m256i _mm256_cvtepu8_epi16(__m128i x) { return (__m256i)__builtin_convertvector((x86::u8x16)x, x86::i16x16); }
ICC_X86 __m256i _mm256_cvtepi8_epi32(__m128i x) { return (__m256i)__builtin_convertvector(x86::eight(x), x86::i32x8); }
ICC_X86 __m256i _mm256_cvtepu8_epi32(__m128i x) {
    return (__m256i)__builtin_convertvector((x86::u8x8)x86::eight(x), x86::i32x8);
}
ICC_X86 __m256i _mm256_cvtepu16_epi32(__m128i x) { return (__m256i)__builtin_convertvector((x86::u16x8)x, x86::i32x8); }

// ---- integers ----
ICC_X86 __m256i _mm256_add_epi32(__m256i x, __m256i y) { return (__m256i)((x86::u32x8)x + (x86::u32x8)y); }
ICC_X86 __m256i _mm256_sub_epi32(__m256i x, __m256i y) { return (__m256i)((x86::u32x8)x - (x86::u32x8)y); }
ICC_X86 __m256i _mm256_mullo_epi32(__m256i x, __m256i y) { return (__m256i)((x86::u32x8)x * (x86::u32x8)y); }
ICC_X86 __m256i _mm256_add_epi16(__m256i x, __m256i y) { return (__m256i)((x86::u16x16)x + (x86::u16x16)y); }
ICC_X86 __m256i _mm256_sub_epi16(__m256i x, __m256i y) { return (__m256i)((x86::u16x16)x - (x86::u16x16)y); }
ICC_X86 __m256i _mm256_and_si256(__m256i x, __m256i y) { return x & y; }
ICC_X86 __m256i _mm256_andnot_si256(__m256i x, __m256i y) { return ~x & y; }
ICC_X86 __m256i _mm256_or_si256(__m256i x, __m256i y) { return x | y; }
ICC_X86 __m256i _mm256_xor_si256(__m256i x, __m256i y) { return x ^ y; }
ICC_X86 __m128i _mm_or_si128(__m128i x, __m128i y) { return x | y; }
ICC_X86 __m256i _mm256_max_epi32(__m256i x, __m256i y) {
    return (__m256i)__builtin_elementwise_max((x86::i32x8)x, (x86::i32x8)y);
}
ICC_X86 __m256i _mm256_min_epi32(__m256i x, __m256i y) {
    return (__m256i)__builtin_elementwise_min((x86::i32x8)x, (x86::i32x8)y);
}
ICC_X86 __m256i _mm256_slli_epi32(__m256i x, int n) { return (__m256i)((x86::u32x8)x << (uint32_t)n); }
ICC_X86 __m256i _mm256_srli_epi32(__m256i x, int n) { return (__m256i)((x86::u32x8)x >> (uint32_t)n); }
ICC_X86 __m256i _mm256_srai_epi32(__m256i x, int n) { return (__m256i)((x86::i32x8)x >> (int32_t)n); }
ICC_X86 __m256i _mm256_srlv_epi32(__m256i x, __m256i n) { return (__m256i)((x86::u32x8)x >> (x86::u32x8)n); }
ICC_X86 __m256i _mm256_slli_epi16(__m256i x, int n) { return (__m256i)((x86::u16x16)x << (uint16_t)n); }
ICC_X86 __m256i _mm256_srli_epi16(__m256i x, int n) { return (__m256i)((x86::u16x16)x >> (uint16_t)n); }
ICC_X86 __m256i _mm256_cmpeq_epi32(__m256i x, __m256i y) { return (__m256i)((x86::i32x8)x == (x86::i32x8)y); }
ICC_X86 __m256i _mm256_cmpgt_epi32(__m256i x, __m256i y) { return (__m256i)((x86::i32x8)x > (x86::i32x8)y); }
ICC_X86 __m128i _mm_cmpeq_epi8(__m128i x, __m128i y) { return (__m128i)((x86::i8x16)x == (x86::i8x16)y); }
ICC_X86 __m256i _mm256_blendv_epi8(__m256i x, __m256i y, __m256i choose) {
    return (__m256i)((x86::i8x32)choose < (int8_t)0 ? (x86::i8x32)y : (x86::i8x32)x);
}
ICC_X86 __m256i _mm256_abs_epi8(__m256i x) { return (__m256i)__builtin_elementwise_abs((x86::i8x32)x); }
ICC_X86 __m256i _mm256_sign_epi8(__m256i x, __m256i sign) {
    const x86::i8x32 s = (x86::i8x32)sign, v = (x86::i8x32)x;
    return (__m256i)(s < (int8_t)0 ? -v : (x86::i8x32)(v & (s != (int8_t)0)));
}
ICC_X86 __m128i x86_madd(__m128i x, __m128i y) {
    const int32x4_t low = vmull_s16(vget_low_s16((int16x8_t)x), vget_low_s16((int16x8_t)y));
    return (__m128i)vpaddq_s32(low, vmull_high_s16((int16x8_t)x, (int16x8_t)y));
}
ICC_X86 __m256i _mm256_madd_epi16(__m256i x, __m256i y) {
    return x86::join(x86_madd(x86::low(x), x86::low(y)), x86_madd(x86::high(x), x86::high(y)));
}
ICC_X86 __m128i x86_maddubs(__m128i x, __m128i y) {
    const uint8x16_t u = (uint8x16_t)x;
    const int8x16_t s = (int8x16_t)y;
    const int16x8_t low = vmulq_s16((int16x8_t)vmovl_u8(vget_low_u8(u)), vmovl_s8(vget_low_s8(s)));
    const int16x8_t high = vmulq_s16((int16x8_t)vmovl_high_u8(u), vmovl_high_s8(s));
    return (__m128i)vqaddq_s16(vuzp1q_s16(low, high), vuzp2q_s16(low, high));
}
ICC_X86 __m256i _mm256_maddubs_epi16(__m256i x, __m256i y) {
    return x86::join(x86_maddubs(x86::low(x), x86::low(y)), x86_maddubs(x86::high(x), x86::high(y)));
}

// ---- orders ----
ICC_X86 __m256i _mm256_packus_epi32(__m256i x, __m256i y) {
    const auto a = __builtin_convertvector(x86::clamp(x, 0, 65535), x86::u16x8);
    const auto b = __builtin_convertvector(x86::clamp(y, 0, 65535), x86::u16x8);
    return (__m256i)__builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15);
}
ICC_X86 __m256i _mm256_packs_epi32(__m256i x, __m256i y) {
    const auto a = __builtin_convertvector(x86::clamp(x, -32768, 32767), x86::i16x8);
    const auto b = __builtin_convertvector(x86::clamp(y, -32768, 32767), x86::i16x8);
    return (__m256i)__builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15);
}
ICC_X86 __m128i _mm_packus_epi16(__m128i x, __m128i y) {
    return (__m128i)vqmovun_high_s16(vqmovun_s16((int16x8_t)x), (int16x8_t)y);
}
#define _mm256_permute4x64_epi64(x, i) __builtin_shufflevector(x, x, (i) & 3, (i) >> 2 & 3, (i) >> 4 & 3, (i) >> 6 & 3)
#define _mm_shuffle_epi32(x, i) \
    ((__m128i)__builtin_shufflevector((x86::i32x4)(x), (x86::i32x4)(x), (i) & 3, (i) >> 2 & 3, (i) >> 4 & 3, (i) >> 6 & 3))
#define _mm_srli_si128(x, bytes) ((__m128i)vextq_u8((uint8x16_t)(x), uint8x16_t{}, bytes))
ICC_X86 __m128i _mm_shuffle_epi8(__m128i x, __m128i from) {  // zero where the upper bit is set
    return (__m128i)vqtbl1q_u8((uint8x16_t)x, vandq_u8((uint8x16_t)from, vdupq_n_u8(0x8f)));
}
ICC_X86 __m256i _mm256_shuffle_epi8(__m256i x, __m256i from) {
    return x86::join(_mm_shuffle_epi8(x86::low(x), x86::low(from)), _mm_shuffle_epi8(x86::high(x), x86::high(from)));
}
#define ICC_ZIP(name, kind, type) \
    ICC_X86 __m128i name(__m128i x, __m128i y) { return (__m128i)kind((type)x, (type)y); }
ICC_ZIP(_mm_unpacklo_epi8, vzip1q_u8, uint8x16_t)
ICC_ZIP(_mm_unpackhi_epi8, vzip2q_u8, uint8x16_t)
ICC_ZIP(_mm_unpacklo_epi16, vzip1q_u16, uint16x8_t)
ICC_ZIP(_mm_unpackhi_epi16, vzip2q_u16, uint16x8_t)
ICC_ZIP(_mm_unpacklo_epi32, vzip1q_u32, uint32x4_t)
ICC_ZIP(_mm_unpackhi_epi32, vzip2q_u32, uint32x4_t)
ICC_ZIP(_mm_unpacklo_epi64, vzip1q_u64, uint64x2_t)
ICC_ZIP(_mm_unpackhi_epi64, vzip2q_u64, uint64x2_t)
ICC_X86 __m256i _mm256_unpacklo_epi32(__m256i x, __m256i y) {
    return x86::join(_mm_unpacklo_epi32(x86::low(x), x86::low(y)), _mm_unpacklo_epi32(x86::high(x), x86::high(y)));
}
ICC_X86 __m256i _mm256_unpackhi_epi32(__m256i x, __m256i y) {
    return x86::join(_mm_unpackhi_epi32(x86::low(x), x86::low(y)), _mm_unpackhi_epi32(x86::high(x), x86::high(y)));
}
#endif
