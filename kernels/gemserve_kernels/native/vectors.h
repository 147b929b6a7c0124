// Vectors of float32 as long as the processor's, and what is computed with them. GCC's own vector
// types are used, so that this is the same code on every processor.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__FMA__) || defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t hvec __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

static inline vec load(const float *from) { return *reinterpret_cast<const vec *>(from); }
static inline uvec load(const uint32_t *from) { return *reinterpret_cast<const uvec *>(from); }
static inline hvec load(const uint16_t *from) { return *reinterpret_cast<const hvec *>(from); }
static inline void store(float *to, vec value) { *reinterpret_cast<vec *>(to) = value; }
static inline vec all(float value) { return value - vec{}; }

// a · b + c. A compiler that may choose between one rounding and two does not choose alike for
// every number of rows, and a row's sums must not depend on that number.
static inline vec fused(vec a, vec b, vec c) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

typedef float quad __attribute__((vector_size(16), aligned(4), may_alias));

// Four numbers with the same total as all lanes.
static inline quad fold(vec value) {
#if defined(__AVX512F__)
    const auto half = __builtin_shufflevector(value, value, 0, 1, 2, 3, 4, 5, 6, 7) +
                      __builtin_shufflevector(value, value, 8, 9, 10, 11, 12, 13, 14, 15);
    return __builtin_shufflevector(half, half, 0, 1, 2, 3) +
           __builtin_shufflevector(half, half, 4, 5, 6, 7);
#elif defined(__AVX2__)
    return __builtin_shufflevector(value, value, 0, 1, 2, 3) +
           __builtin_shufflevector(value, value, 4, 5, 6, 7);
#else
    return value;
#endif
}

static inline float sum(vec value) {
    const quad four = fold(value);
    return (four[0] + four[2]) + (four[1] + four[3]);
}

// The sums of four vectors.
static inline quad sums_of(vec a, vec b, vec c, vec d) {
    const quad p = fold(a), q = fold(b), r = fold(c), s = fold(d);
    const quad pq = __builtin_shufflevector(p, q, 0, 4, 1, 5) +
                    __builtin_shufflevector(p, q, 2, 6, 3, 7);
    const quad rs = __builtin_shufflevector(r, s, 0, 4, 1, 5) +
                    __builtin_shufflevector(r, s, 2, 6, 3, 7);
    return __builtin_shufflevector(pq, rs, 0, 1, 4, 5) + __builtin_shufflevector(pq, rs, 2, 3, 6, 7);
}

// e^x to 1e-7 of its value; 0 below −87.
static inline vec exponential(vec x) {
    const vec least = all(-87.0f), most = all(88.0f);
    const ivec is_tiny = x < least;
    x = x > most ? most : (x < least ? least : x);
    const vec magic = all(12582912.0f);  // 1.5 · 2^23: adding it rounds to an integer
    const vec shifted = x * 1.44269504f + magic;
    const vec count = shifted - magic;
    vec rest = x - count * 0.693359375f;
    rest = rest + count * 2.12194440e-4f;
    vec sum = all(1.98756915e-4f);
    sum = sum * rest + 1.39819995e-3f;
    sum = sum * rest + 8.33345205e-3f;
    sum = sum * rest + 4.16657962e-2f;
    sum = sum * rest + 1.66666657e-1f;
    sum = sum * rest + 0.5f;
    sum = sum * rest * rest + rest + 1.0f;
    const ivec power = ((ivec)shifted - (ivec)magic + 127) << 23;
    const vec result = sum * (vec)power;
    return is_tiny ? vec{} : result;
}

// Numbers of either dtype as float32.
static inline vec load_float(const float *from) { return load(from); }
static inline vec load_float(const uint16_t *from) {
    return (vec)(__builtin_convertvector(load(from), uvec) << 16);
}
static inline float number(float value) { return value; }
static inline float number(uint16_t value) {
    const uint32_t bits = uint32_t(value) << 16;
    float wide;
    std::memcpy(&wide, &bits, 4);
    return wide;
}
static inline void store_kv(float *to, float value) { *to = value; }
static inline void store_kv(uint16_t *to, float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    *to = value != value ? 0x7fc0 : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// float16 numbers as float32
static inline vec load_half(const uint8_t *from) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)));
#elif defined(__AVX2__) && defined(__F16C__)
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
#else
    vec wide = {};
    for (int i = 0; i < LANES; i++) {
        uint16_t half;
        std::memcpy(&half, from + 2 * i, 2);
        const uint32_t sign = uint32_t(half & 0x8000) << 16, rest = half & 0x7fff;
        uint32_t bits = rest >= 0x7c00 ? 0x7f800000 | (rest & 0x3ff) << 13 : (rest + 0x1c000) << 13;
        float number;
        std::memcpy(&number, &bits, 4);
        if (rest < 0x400) number = std::ldexp(float(rest), -24);
        wide[i] = sign ? -number : number;
    }
    return wide;
#endif
}

// Bytes as float32, without and with a sign
static inline vec load_bytes(const uint8_t *from) {
#if defined(__AVX512F__)
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(from));
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes));
#elif defined(__AVX2__)
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(from));
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
#else
    vec wide;
    for (int i = 0; i < LANES; i++) wide[i] = float(from[i]);
    return wide;
#endif
}
static inline vec load_signed(const uint8_t *from) {
    const vec wide = load_bytes(from);
    return wide > 127.0f ? wide - 256.0f : wide;
}

// Whole numbers from −128 to 127 as bytes
static inline void store_bytes(int8_t *to, vec whole) {
#if defined(__AVX512F__)
    const __m512i numbers = _mm512_cvtps_epi32((__m512)whole);
    _mm_storeu_si128(reinterpret_cast<__m128i *>(to), _mm512_cvtepi32_epi8(numbers));
#elif defined(__AVX2__)
    const __m256i numbers = _mm256_cvtps_epi32((__m256)whole);
    const __m128i low = _mm256_castsi256_si128(numbers), high = _mm256_extracti128_si256(numbers, 1);
    const __m128i words = _mm_packs_epi32(low, high);
    _mm_storel_epi64(reinterpret_cast<__m128i *>(to), _mm_packs_epi16(words, words));
#else
    for (int i = 0; i < LANES; i++) to[i] = int8_t(whole[i]);
#endif
}

static inline float most_of(vec value) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)value);
#else
    quad most = __builtin_shufflevector(value, value, 0, 1, 2, 3);
#if defined(__AVX2__)
    const quad other = __builtin_shufflevector(value, value, 4, 5, 6, 7);
    most = other > most ? other : most;
#endif
    const float one = most[0] > most[1] ? most[0] : most[1];
    const float two = most[2] > most[3] ? most[2] : most[3];
    return one > two ? one : two;
#endif
}

// cap · tanh(x / cap)
static inline vec capped(vec x, float cap) {
    return cap - 2.0f * cap / (1.0f + exponential(x * (2.0f / cap)));
}

enum Activation : int64_t { SILU, GELU };  // GELU by its approximation with tanh

static inline vec activated(vec x, int64_t kind) {
    const vec power = kind == SILU ? x : 1.5957691216f * (x + 0.044715f * x * x * x);
    return x / (1.0f + exponential(-power));
}
