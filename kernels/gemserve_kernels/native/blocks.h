// Matrices whose weights are in blocks of a few bits, as GGUF files have them.
//
// A weight is scale · (q − offset) − minimum, with `q` of 4, 5, 6 or 8 bits. A tile is 16 outputs. A
// block is 32 inputs of a tile, which are 8 quads of four inputs: byte 4·o + i of a quad belongs to
// output o and input i. Such a quad is what the processor's products of bytes take.
//
// `data`: [tiles][ins / 32][64 · bits] bytes. First four vectors of 64 bytes: vector j has quad j in
// its low half bytes and quad j + 4 in its high ones. Fifth bits follow in one vector, quad j in bit
// j. Fifth and sixth bits follow in two vectors, of quads 0 to 3 and 4 to 7, quad j in bits 2·j and
// 2·j + 1. With 8 bits the quads follow each other.
//
// `scales`: for each tile and superblock: 16 float16 factors of scales, the same of minima if the
// format has any, and if it has superblocks of 8 blocks, for each block 16 bytes for each of its
// scales and 16 for its minima. A block has one scale, or two, for its first and last four quads.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "vectors.h"

constexpr int TILE = 16;         // outputs
constexpr int BLOCK_INPUTS = 32;
constexpr int QUADS = BLOCK_INPUTS / 4;

enum Blocks : int64_t { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, BLOCK_FORMATS };

// `together`: blocks of a superblock. `scales`: of a block, in bytes; 0: the superblock's is its own.
struct Format {
    int bits, offset, together, scales;
    bool has_minima, is_signed;
    constexpr int64_t data_bytes() const { return 64 * bits; }  // of a tile's block
    constexpr int64_t head_bytes() const { return has_minima ? 64 : 32; }
    constexpr int64_t block_bytes() const {  // what a block has beside its superblock's factors
        return together == 1 ? 0 : TILE * (scales + has_minima);
    }
    constexpr int64_t scale_bytes() const { return head_bytes() + together * block_bytes(); }
};
constexpr Format FORMATS[BLOCK_FORMATS] = {
    {4, 8, 1, 0, false, false}, {4, 0, 1, 0, true, false},   // Q4_0, Q4_1
    {5, 16, 1, 0, false, false}, {5, 0, 1, 0, true, false},  // Q5_0, Q5_1
    {8, 128, 1, 0, false, false},                            // Q8_0
    {4, 0, 8, 1, true, false},  {5, 0, 8, 1, true, false},   // Q4_K, Q5_K
    {6, 32, 8, 2, false, true},                              // Q6_K
};

struct BlockMatrix {
    const uint8_t *data, *scales;
    int64_t outs, ins, format;
};

// Calls `act` with the format as a number known to the compiler.
template <int64_t F = 0, typename Act> static void with_format(int64_t format, const Act &act) {
    if constexpr (F < BLOCK_FORMATS) {
        if (format == F)
            act(std::integral_constant<int64_t, F>());
        else
            with_format<F + 1>(format, act);
    }
}

// Rows whose sums fit into the registers together.
constexpr int MOST_BLOCK_ROWS = LANES == 16 ? 12 : 4;
constexpr int PARTS_OF_TILE = TILE / LANES;  // vectors that a tile's outputs fill

// Bring the `j`-th quarter of a block that comes soon into the cache: several rows leave the processor
// too little room to look ahead by itself.
template <int64_t F> static inline void prefetch_vectors(const uint8_t *data, int j) {
    constexpr int64_t bytes = FORMATS[F].data_bytes(), ahead = (2048 + bytes - 1) / bytes * bytes;
    for (int64_t vector = j; vector < FORMATS[F].bits; vector += 4)
        __builtin_prefetch(data + ahead + 64 * vector, 0, 2);
}

// The quad `j`, from 0 to 3, and the quad `j` + 4 of a block: of the outputs of part `h` of a tile.
template <int64_t F>
static inline void unpack(const uint8_t *data, int j, int h, uvec &low, uvec &high) {
    constexpr Format f = FORMATS[F];
    const auto at = [&](int64_t vector) {
        uvec found;
        std::memcpy(&found, data + 64 * vector + 4 * LANES * h, sizeof found);
        return found;
    };
    if constexpr (f.bits == 8) {
        low = at(j), high = at(j + 4);
        return;
    }
    const uvec both = at(j);
    low = both & 0x0f0f0f0fu, high = (both >> 4) & 0x0f0f0f0fu;
    if constexpr (f.bits == 5) {
        const uvec fifth = at(4);
        low |= ((fifth >> j) & 0x01010101u) << 4;
        high |= ((fifth >> (j + 4)) & 0x01010101u) << 4;
    }
    if constexpr (f.bits == 6) {
        low |= ((at(4) >> (2 * j)) & 0x03030303u) << 4;
        high |= ((at(5) >> (2 * j)) & 0x03030303u) << 4;
    }
}

// The scales and minima of one tile's blocks, in the order of the inputs.
template <int64_t F> struct Scales {
    vec first, second, minima;  // of the block at hand; `second`: of its last four quads

    Scales() = default;
    Scales(const uint8_t *scales, int h) : at(scales), h(h) {}

    void next() {
        constexpr Format f = FORMATS[F];
        if (left == 0) {
            factors = load_half(at + 2 * LANES * h);
            if constexpr (f.has_minima) least = load_half(at + 32 + 2 * LANES * h);
            at += f.head_bytes();
            left = f.together;
        }
        left--;
        if constexpr (f.together == 1) {
            first = second = factors;
            minima = least;
        } else {
            first = second = factors * (f.is_signed ? load_signed(at + LANES * h)
                                                    : load_bytes(at + LANES * h));
            if constexpr (f.scales == 2) second = factors * load_signed(at + TILE + LANES * h);
            if constexpr (f.has_minima) minima = least * load_bytes(at + TILE * f.scales + LANES * h);
            at += f.block_bytes();
        }
    }

  private:
    const uint8_t *at = nullptr;
    int h = 0, left = 0;
    vec factors{}, least{};
};

// Rows of numbers as bytes, with a scale for each block of inputs: x = scale · q, q from −127 to 127.
struct ByteRows {
    int64_t blocks = 0;
    std::vector<int8_t> numbers;       // [rows, ins]
    std::vector<float> scales, shares;  // [rows, blocks]; `shares`: scale times the sum of the block
    std::vector<int32_t> sums;          // [rows, blocks, 2]: of the first and last four quads

    void make_room(int64_t rows, int64_t ins) {
        blocks = ins / BLOCK_INPUTS;
        numbers.resize(rows * ins);
        scales.resize(rows * blocks), shares.resize(rows * blocks), sums.resize(2 * rows * blocks);
    }

    void take(int64_t row, const float *x) {
        for (int64_t b = 0; b < blocks; b++) take_block(row * blocks + b, x + b * BLOCK_INPUTS);
    }

  private:
    static constexpr float LEAST = 1e-30f;  // smaller numbers are 0: 127 / number may be infinite

    void take_block(int64_t b, const float *x) {
        vec most = {}, rest = {};
        for (int i = 0; i < BLOCK_INPUTS; i += LANES) {
            const vec given = load(x + i), size = given < 0.0f ? -given : given;
            most = size > most ? size : most;
            rest += given - given;
        }
        const bool is_finite = sum(rest) == 0.0f;
        const float largest = is_finite ? most_of(most) : 0.0f;
        const float factor = largest > LEAST ? 127.0f / largest : 0.0f;
        const vec magic = all(12582912.0f);  // 1.5 · 2^23: adding it rounds to an integer
        float halves[2] = {};
        for (int i = 0; i < BLOCK_INPUTS; i += LANES) {
            const vec whole = is_finite ? (load(x + i) * factor + magic) - magic : vec{};
            store_bytes(&numbers[b * BLOCK_INPUTS + i], whole);
            halves[2 * i / BLOCK_INPUTS] += sum(whole);
        }
        // what is not finite is not hidden
        scales[b] = !is_finite ? NAN : largest > LEAST ? largest / 127.0f : 0.0f;
        sums[2 * b] = int32_t(halves[0]), sums[2 * b + 1] = int32_t(halves[1]);
        shares[b] = scales[b] * (halves[0] + halves[1]);
    }
};

// Adds to each output the products of its four bytes of `q` with four signed bytes of a row.
template <int BITS> static inline ivec add_products(ivec sums, uvec q, int32_t four) {
#if defined(__AVX512VNNI__)
    return (ivec)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)q, _mm512_set1_epi32(four));
#elif defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))
    const auto some = [&](uvec few) {  // few: below 128, so that no sum of two is too large
#if defined(__AVX512BW__)
        const __m512i pairs = _mm512_maddubs_epi16((__m512i)few, _mm512_set1_epi32(four));
        return (ivec)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#else
        const __m256i pairs = _mm256_maddubs_epi16((__m256i)few, _mm256_set1_epi32(four));
        return (ivec)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#endif
    };
    if constexpr (BITS < 8) return sums + some(q);
    return sums + some(q & 0x0f0f0f0fu) + (some((q >> 4) & 0x0f0f0f0fu) << 4);
#else
    for (int i = 0; i < 4; i++)
        sums += (ivec)((q >> (8 * i)) & 0xffu) * int32_t(int8_t(uint32_t(four) >> (8 * i)));
    return sums;
#endif
}

// R rows from `row` on times one part of a tile: `out` [R, step].
template <int64_t F, int R>
static void block_products(const BlockMatrix &m, int64_t tile, int h, const ByteRows &x,
                           int64_t row, float *out, int64_t step) {
    constexpr Format f = FORMATS[F];
    const int64_t blocks = m.ins / BLOCK_INPUTS;
    const uint8_t *data = m.data + tile * blocks * f.data_bytes();
    Scales<F> scales(m.scales + tile * (blocks / f.together) * f.scale_bytes(), h);
    const int8_t *numbers = &x.numbers[row * m.ins];
    const float *factors = &x.scales[row * blocks], *shares = &x.shares[row * blocks];
    const int32_t *halves = &x.sums[2 * row * blocks];
    vec sums[R] = {};
    // one chain of sums is enough for several rows, and leaves registers to them
    constexpr bool HAS_TWO = R <= 2 || f.scales == 2;
    for (int64_t b = 0; b < blocks; b++, data += f.data_bytes(), numbers += BLOCK_INPUTS) {
        ivec low[R], high[HAS_TWO ? R : 1];
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const int32_t *both = halves + 2 * (r * blocks + b);
            low[r] = ivec{} - f.offset * (HAS_TWO ? both[0] : both[0] + both[1]);
            if constexpr (HAS_TWO) high[r] = ivec{} - f.offset * both[1];
        }
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            if (R > 1 && h == 0) prefetch_vectors<F>(data, j);
            uvec q_low, q_high;
            unpack<F>(data, j, h, q_low, q_high);
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) {
                int32_t four[2];
                std::memcpy(&four[0], numbers + r * m.ins + 4 * j, 4);
                std::memcpy(&four[1], numbers + r * m.ins + 16 + 4 * j, 4);
                low[r] = add_products<f.bits>(low[r], q_low, four[0]);
                ivec &second = HAS_TWO ? high[r] : low[r];
                second = add_products<f.bits>(second, q_high, four[1]);
            }
        }
        scales.next();
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const vec factor = all(factors[r * blocks + b]);
            if constexpr (f.scales == 2) {
                const vec one = __builtin_convertvector(low[r], vec) * scales.first;
                const vec both = fused(__builtin_convertvector(high[r], vec), scales.second, one);
                sums[r] = fused(both, factor, sums[r]);
            } else {
                if constexpr (HAS_TWO) low[r] += high[r];
                const vec both = __builtin_convertvector(low[r], vec);
                sums[r] = fused(both, scales.first * factor, sums[r]);
            }
            if constexpr (f.has_minima)
                sums[r] = fused(-scales.minima, all(shares[r * blocks + b]), sums[r]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) store(out + r * step + LANES * h, sums[r]);
}

// All rows times a tile: `out` [rows, step].
template <int64_t F, int R = MOST_BLOCK_ROWS>
static void tile_products(const BlockMatrix &m, int64_t tile, const ByteRows &x, int64_t rows,
                          float *out, int64_t step, int64_t row = 0) {
    // twice 8 rows take less time than 12 and 4
    for (; rows - row >= R && (R != 12 || rows - row != 16); row += R)
        for (int h = 0; h < PARTS_OF_TILE; h++)
            block_products<F, R>(m, tile, h, x, row, out + row * step, step);
    if constexpr (R > 1)
        if (row < rows)
            tile_products<F, R == 12 ? 8 : R == 8 ? 6 : R == 6 ? 4 : R - 1>(m, tile, x, rows, out,
                                                                          step, row);
}
