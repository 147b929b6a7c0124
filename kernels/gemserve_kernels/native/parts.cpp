// Parts of a layer in bfloat16 whose operations torch runs one after the other: a norm, the product
// of an MLP's gate with its other half, the rotation of queries and keys. All is computed in float32
// and rounded once. A row's result does not depend on other rows.
//
// `parts.py` compiles this file and fills the arguments.

#include <cmath>
#include <cstdint>

#include "failures.h"
#include "vectors.h"

constexpr int64_t LEAST = 1 << 14;  // numbers for which a second thread pays

extern "C" int64_t gemserve_parts_lanes() { return LANES; }

static inline void store_half(uint16_t *to, vec value) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh((__m512)value));
#else
    const uvec bits = (uvec)value, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const ivec is_number = value == value;
    const uvec kept = (rounded & (uvec)is_number) | (0x7fc0 & ~(uvec)is_number);
    *reinterpret_cast<hvec *>(to) = __builtin_convertvector(kept, hvec);
#endif
}

// `out`[row] = `from`[row] / root mean square · `weight`. All are [rows, width], contiguous.
extern "C" const char *gemserve_norm(const uint16_t *from, const uint16_t *weight, uint16_t *out,
                                     int64_t rows, int64_t width, double eps,
                                     int64_t threads) try {
    if (rows * width < LEAST) threads = 1;
#pragma omp parallel for schedule(static) num_threads(int(threads))
    for (int64_t row = 0; row < rows; row++) {
        const uint16_t *given = from + row * width;
        uint16_t *to = out + row * width;
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
        const float by = 1.0f / std::sqrt(mean + float(eps));
        for (i = 0; i < width; i += LANES)
            store_half(to + i, load_float(given + i) * by * load_float(weight + i));
    }
    return nullptr;
} catch (...) {
    return reason();
}

// `gate` = activation(`gate`) · `up`. Both are [rows, width], contiguous.
extern "C" const char *gemserve_gated(uint16_t *gate, const uint16_t *up, int64_t rows,
                                      int64_t width, int64_t activation, int64_t threads) try {
    if (rows * width < LEAST) threads = 1;
#pragma omp parallel for schedule(static) num_threads(int(threads))
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = row * width; i < (row + 1) * width; i += LANES)
            store_half(gate + i, activated(load_float(gate + i), activation) * load_float(up + i));
    return nullptr;
} catch (...) {
    return reason();
}

// Heads [heads, tokens, width] in memory, with a stride for each of the first two.
struct Heads {
    uint16_t *data;
    int64_t head, token;
};

// `out` = `from`, rotated by halves. `cos` and `sin`: [tokens, width], contiguous.
extern "C" const char *gemserve_rotate(Heads from, Heads out, const uint16_t *cos,
                                       const uint16_t *sin, int64_t tokens, int64_t heads,
                                       int64_t width, int64_t threads) try {
    const int64_t half = width / 2;
    if (tokens * heads * width < LEAST) threads = 1;
#pragma omp parallel for schedule(static) num_threads(int(threads))
    for (int64_t token = 0; token < tokens; token++)
        for (int64_t i = 0; i < half; i += LANES) {
            const int64_t at = token * width + i;
            const vec cos_low = load_float(cos + at), cos_high = load_float(cos + at + half);
            const vec sin_low = load_float(sin + at), sin_high = load_float(sin + at + half);
            for (int64_t head = 0; head < heads; head++) {
                const uint16_t *one = from.data + head * from.head + token * from.token + i;
                uint16_t *to = out.data + head * out.head + token * out.token + i;
                const vec low = load_float(one), high = load_float(one + half);
                store_half(to, fused(low, cos_low, -high * sin_low));
                store_half(to + half, fused(high, cos_high, low * sin_high));
            }
        }
    return nullptr;
} catch (...) {
    return reason();
}
