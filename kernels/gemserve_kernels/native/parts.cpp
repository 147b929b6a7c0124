// Parts of a layer whose operations torch runs one after the other: a norm, the product of an MLP's
// gate with its other half, the rotation of queries and keys. Numbers are float32 or bfloat16; all is
// computed in float32 and rounded once. A row's result does not depend on other rows.
//
// `parts.py` compiles this file and fills the arguments.

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "failures.h"
#include "vectors.h"

constexpr int64_t LEAST = 1 << 14;  // numbers for which a second thread pays

extern "C" int64_t gemserve_parts_lanes() { return LANES; }

static inline void store_number(float *to, vec value) { store(to, value); }
static inline void store_number(uint16_t *to, vec value) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh((__m512)value));
#else
    const uvec bits = (uvec)value, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const ivec is_number = value == value;
    const uvec kept = (rounded & (uvec)is_number) | (0x7fc0 & ~(uvec)is_number);
    *reinterpret_cast<hvec *>(to) = __builtin_convertvector(kept, hvec);
#endif
}

// Calls `act` with a pointer of the numbers' type.
template <typename Act> static void with_type(int64_t is_half, const Act &act) {
    if (is_half)
        act(static_cast<uint16_t *>(nullptr));
    else
        act(static_cast<float *>(nullptr));
}

template <typename T>
static void norm(const T *from, const T *weight, T *out, int64_t rows, int64_t width, float eps,
                 int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(int(threads))
    for (int64_t row = 0; row < rows; row++) {
        const T *given = from + row * width;
        T *to = out + row * width;
        vec squares[2] = {};
        int64_t i = 0;
        for (; i + 2 * LANES <= width; i += 2 * LANES)
            for (int b = 0; b < 2; b++) {
                const vec x = load_float(given + i + b * LANES);
                squares[b] = fused(x, x, squares[b]);
            }
        for (; i < width; i += LANES) {
            const vec x = load_float(given + i);
            squares[0] = fused(x, x, squares[0]);
        }
        const float mean = sum(squares[0] + squares[1]) / float(width);
        const float by = 1.0f / std::sqrt(mean + eps);
        for (i = 0; i < width; i += LANES)
            store_number(to + i, load_float(given + i) * by * load_float(weight + i));
    }
}

// `out`[row] = `from`[row] / root mean square · `weight`. All are [rows, width], contiguous.
extern "C" const char *gemserve_norm(const void *from, const void *weight, void *out, int64_t rows,
                                     int64_t width, double eps, int64_t is_half,
                                     int64_t threads) try {
    if (rows * width < LEAST) threads = 1;
    with_type(is_half, [&](auto *as) {
        using T = std::remove_pointer_t<decltype(as)>;
        norm(static_cast<const T *>(from), static_cast<const T *>(weight), static_cast<T *>(out), rows,
             width, float(eps), threads);
    });
    return nullptr;
} catch (...) {
    return reason();
}

template <typename T>
static void gated(T *gate, const T *up, int64_t rows, int64_t width, int64_t activation,
                  int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(int(threads))
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = row * width; i < (row + 1) * width; i += LANES)
            store_number(gate + i, activated(load_float(gate + i), activation) * load_float(up + i));
}

// `gate` = activation(`gate`) · `up`. Both are [rows, width], contiguous.
extern "C" const char *gemserve_gated(void *gate, const void *up, int64_t rows, int64_t width,
                                      int64_t activation, int64_t is_half, int64_t threads) try {
    if (rows * width < LEAST) threads = 1;
    with_type(is_half, [&](auto *as) {
        using T = std::remove_pointer_t<decltype(as)>;
        gated(static_cast<T *>(gate), static_cast<const T *>(up), rows, width, activation, threads);
    });
    return nullptr;
} catch (...) {
    return reason();
}

// Heads [heads, tokens, width] in memory, with a stride for each of the first two.
struct Heads {
    void *data;
    int64_t head, token;

    template <typename T> T *at(int64_t h, int64_t t) const {
        return static_cast<T *>(data) + h * head + t * token;
    }
};

template <typename T>
static void rotate(Heads from, Heads out, const T *cos, const T *sin, int64_t tokens, int64_t heads,
                   int64_t width, int64_t threads) {
    const int64_t half = width / 2;
#pragma omp parallel for schedule(static) num_threads(int(threads))
    for (int64_t token = 0; token < tokens; token++)
        for (int64_t i = 0; i < half; i += LANES) {
            const int64_t at = token * width + i;
            const vec cos_low = load_float(cos + at), cos_high = load_float(cos + at + half);
            const vec sin_low = load_float(sin + at), sin_high = load_float(sin + at + half);
            for (int64_t head = 0; head < heads; head++) {
                const T *one = from.at<T>(head, token) + i;
                T *to = out.at<T>(head, token) + i;
                const vec low = load_float(one), high = load_float(one + half);
                store_number(to, fused(low, cos_low, -high * sin_low));
                store_number(to + half, fused(high, cos_high, low * sin_high));
            }
        }
}

// `out` = `from`, rotated by halves. `cos` and `sin`: [tokens, width], contiguous.
extern "C" const char *gemserve_rotate(Heads from, Heads out, const void *cos, const void *sin,
                                       int64_t tokens, int64_t heads, int64_t width,
                                       int64_t is_half, int64_t threads) try {
    if (tokens * heads * width < LEAST) threads = 1;
    with_type(is_half, [&](auto *as) {
        using T = std::remove_pointer_t<decltype(as)>;
        rotate(from, out, static_cast<const T *>(cos), static_cast<const T *>(sin), tokens, heads,
               width, threads);
    });
    return nullptr;
} catch (...) {
    return reason();
}
