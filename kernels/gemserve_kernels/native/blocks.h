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
#include <memory>
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

// Bring the `j`-th quarter of a block that comes soon into the cache: the processor does not look far
// enough ahead by itself, and with several rows not at all.
template <int64_t F> static inline void prefetch_vectors(const uint8_t *data, int j) {
    constexpr int64_t bytes = FORMATS[F].data_bytes(), ahead = (4096 + bytes - 1) / bytes * bytes;
    for (int64_t vector = j; vector < FORMATS[F].bits; vector += 4)
        __builtin_prefetch(data + ahead + 64 * vector, 0, 2);
}

// A quad of a block: of the outputs of part `h` of a tile.
template <int64_t F>
[[gnu::always_inline]] static inline uvec unpack(const uint8_t *data, int quad, int h) {
    constexpr Format f = FORMATS[F];
    const auto at = [&](int64_t vector) {
        uvec found;
        std::memcpy(&found, data + 64 * vector + 4 * LANES * h, sizeof found);
        return found;
    };
    if constexpr (f.bits == 8) return at(quad);
    uvec q = (quad < 4 ? at(quad) : at(quad - 4) >> 4) & 0x0f0f0f0fu;
    if constexpr (f.bits == 5) q |= ((at(4) >> quad) & 0x01010101u) << 4;
    if constexpr (f.bits == 6) q |= ((at(4 + quad / 4) >> (2 * (quad % 4))) & 0x03030303u) << 4;
    return q;
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

// Sums of each output's bytes, which are below 2^BITS, times a row's. `start` with what is added to
// them, `add` quads, of which `n` were added before, and take `total`. GROUP: quads that are best
// added for one row before the next row.
struct WholeSums {
    static constexpr int OFFSET = 0, GROUP = 1;
    ivec sums;

    void start(int32_t given) { sums = ivec{} + given; }
    ivec total(int32_t) const { return sums; }
};
#if defined(__AVX512VNNI__)
template <int BITS> struct QuadSums : WholeSums {
    void add(int, uvec q, int32_t four) {
        sums = (ivec)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)q, _mm512_set1_epi32(four));
    }
};
#elif defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))
typedef int8_t bvec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint8_t wrapping __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int16_t pvec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

// The processor adds two products in 16 bits, of a byte without and one with a sign. Of such sums as
// many are added as cannot be too large (2 · 127 · 15 · 8 is below 2^15), and then widened. From 8
// bits OFFSET is taken, and their signs are given to the row's bytes.
template <int BITS> struct QuadSums {
    static constexpr int OFFSET = BITS == 8 ? 128 : 0, GROUP = BITS == 6 ? 2 : 1;
    static constexpr int TOGETHER = BITS == 4 ? 8 : BITS == 5 ? 4 : BITS == 6 ? 2 : 1;
    ivec sums;
    pvec pairs;

    void start(int32_t) {}
    void add(int n, uvec q, int32_t four) {
        bvec given = (bvec)(uvec{} + uint32_t(four));
        if constexpr (BITS == 8) {
            const bvec number = (bvec)(q ^ 0x80808080u);
            const bvec turned = (bvec)-(wrapping)number;  // −128 becomes 128
            given = with_sign(given, number), q = (uvec)(number < 0 ? turned : number);
        }
        const pvec two = products((bvec)q, given);
        pairs = n % TOGETHER == 0 ? two : pairs + two;
        asm("" : "+v"(pairs));  // else GCC forms all products first, and has no registers for them
        if (n % TOGETHER < TOGETHER - 1) return;
        sums = n < TOGETHER ? widened(pairs) : sums + widened(pairs);
    }
    ivec total(int32_t given) const { return sums + given; }

  private:
#if defined(__AVX512BW__)
    static pvec products(bvec a, bvec b) {
        return (pvec)_mm512_maddubs_epi16((__m512i)a, (__m512i)b);
    }
    static ivec widened(pvec a) {
        return (ivec)_mm512_madd_epi16((__m512i)a, _mm512_set1_epi16(1));
    }
    static bvec with_sign(bvec a, bvec sign) { return sign < 0 ? -a : a; }
#else
    static pvec products(bvec a, bvec b) {
        return (pvec)_mm256_maddubs_epi16((__m256i)a, (__m256i)b);
    }
    static ivec widened(pvec a) {
        return (ivec)_mm256_madd_epi16((__m256i)a, _mm256_set1_epi16(1));
    }
    static bvec with_sign(bvec a, bvec sign) {
        return (bvec)_mm256_sign_epi8((__m256i)a, (__m256i)sign);
    }
#endif
};
#else
template <int BITS> struct QuadSums : WholeSums {
    void add(int, uvec q, int32_t four) {
        for (int i = 0; i < 4; i++)
            sums += (ivec)((q >> (8 * i)) & 0xffu) * int32_t(int8_t(uint32_t(four) >> (8 * i)));
    }
};
#endif

// A block's product with a row: its whole sums times the scales that differ within the block. `before`:
// of the chains of quads before this one.
template <int64_t F>
[[gnu::always_inline]] static inline vec scaled(const ivec &total, int chain, const vec &first,
                                                const vec &second, const vec &before) {
    const vec whole = __builtin_convertvector(total, vec);
    if constexpr (FORMATS[F].scales != 2) return whole;
    return chain == 0 ? whole * first : fused(whole, second, before);
}

// Add a block's product to a row's sum. `factor` and `share` are the row's, the others the block's.
template <int64_t F>
[[gnu::always_inline]] static inline void add_block(vec &sum, const vec &product, const vec &first,
                                                    const vec &lowered, const vec &factor,
                                                    const vec &share) {
    sum = fused(product, FORMATS[F].scales == 2 ? factor : first * factor, sum);
    if constexpr (FORMATS[F].has_minima) sum = fused(lowered, share, sum);
}

// R rows from `row` on times a tile: `out` [R, step].
template <int64_t F, int R>
static void block_products(const BlockMatrix &m, int64_t tile, const ByteRows &x, int64_t row,
                           float *out, int64_t step) {
    using Sums = QuadSums<FORMATS[F].bits>;
    constexpr Format f = FORMATS[F];
    constexpr int P = PARTS_OF_TILE, GROUP = Sums::GROUP;
    constexpr int CHAIN = f.scales == 2 ? QUADS / 2 : QUADS;  // quads that have the same scale
    const int64_t blocks = m.ins / BLOCK_INPUTS;
    const uint8_t *data = m.data + tile * blocks * f.data_bytes();
    const uint8_t *at = m.scales + tile * (blocks / f.together) * f.scale_bytes();
    Scales<F> scales[P];
    for (int h = 0; h < P; h++) scales[h] = Scales<F>(at, h);
    const int8_t *numbers = &x.numbers[row * m.ins];
    const float *factors = &x.scales[row * blocks], *shares = &x.shares[row * blocks];
    const int32_t *halves = &x.sums[2 * row * blocks];
    const auto of_offset = [&](int64_t r, int64_t b, int chain) {  // what the offset adds
        const int32_t *both = halves + 2 * (r * blocks + b);
        return (Sums::OFFSET - f.offset) * (f.scales == 2 ? both[chain] : both[0] + both[1]);
    };
    vec sums[R][P] = {};
    for (int64_t b = 0; b < blocks; b++, data += f.data_bytes(), numbers += BLOCK_INPUTS) {
        vec products[R][P];
#pragma GCC unroll 2
        for (int chain = 0; chain < QUADS / CHAIN; chain++) {
            Sums wholes[R][P];
#pragma GCC unroll 16
            for (int r = 0; r < R; r++)
#pragma GCC unroll 4
                for (int h = 0; h < P; h++) wholes[r][h].start(of_offset(r, b, chain));
#pragma GCC unroll 8
            for (int n = 0; n < CHAIN; n += GROUP) {
                uvec q[GROUP][P];
#pragma GCC unroll 4
                for (int g = 0; g < GROUP; g++) {
                    const int quad = chain * CHAIN + n + g;
                    if (quad < 4) prefetch_vectors<F>(data, quad);
#pragma GCC unroll 4
                    for (int h = 0; h < P; h++) q[g][h] = unpack<F>(data, quad, h);
                }
#pragma GCC unroll 16
                for (int r = 0; r < R; r++)
#pragma GCC unroll 4
                    for (int h = 0; h < P; h++)
#pragma GCC unroll 4
                        for (int g = 0; g < GROUP; g++) {
                            int32_t four;
                            const int quad = chain * CHAIN + n + g;
                            std::memcpy(&four, numbers + r * m.ins + 4 * quad, 4);
                            wholes[r][h].add(n + g, q[g][h], four);
                        }
            }
            if (chain == 0)
#pragma GCC unroll 4
                for (int h = 0; h < P; h++) scales[h].next();
#pragma GCC unroll 16
            for (int r = 0; r < R; r++)
#pragma GCC unroll 4
                for (int h = 0; h < P; h++) {
                    const ivec total = wholes[r][h].total(of_offset(r, b, chain));
                    products[r][h] = scaled<F>(total, chain, scales[h].first, scales[h].second,
                                               products[r][h]);
                }
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const vec factor = all(factors[r * blocks + b]), share = all(shares[r * blocks + b]);
#pragma GCC unroll 4
            for (int h = 0; h < P; h++) {
                add_block<F>(sums[r][h], products[r][h], scales[h].first, -scales[h].minima, factor,
                             share);
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int h = 0; h < P; h++) store(out + r * step + LANES * h, sums[r][h]);
}

// All rows times a tile: `out` [rows, step].
template <int64_t F, int R = MOST_BLOCK_ROWS>
static void tile_products(const BlockMatrix &m, int64_t tile, const ByteRows &x, int64_t rows,
                          float *out, int64_t step, int64_t row = 0) {
    // twice 8 rows take less time than 12 and 4
    for (; rows - row >= R && (R != 12 || rows - row != 16); row += R)
        block_products<F, R>(m, tile, x, row, out + row * step, step);
    if constexpr (R > 1)
        if (row < rows)
            tile_products<F, R == 12 ? 8 : R == 8 ? 6 : R == 6 ? 4 : R - 1>(m, tile, x, rows, out,
                                                                          step, row);
}

// Of how many tiles the numbers are unpacked together for many rows; their sums and those of as many
// rows fill the registers. It pays where a product of bytes is one instruction.
#if defined(__AVX512VNNI__)
constexpr int TILES_TOGETHER = 3, ROWS_TOGETHER = 4, LEAST_ROWS_TOGETHER = 24;
#else
constexpr int TILES_TOGETHER = 1, ROWS_TOGETHER = 1, LEAST_ROWS_TOGETHER = 0;
#endif

// TILES_TOGETHER tiles as quads of bytes, and their scales as numbers. A thread has its own.
class OpenTiles {
  public:
    void make_room(int64_t ins) {
        const size_t vectors = ins / BLOCK_INPUTS * TILES_TOGETHER;
        size_t bytes = vectors * (QUADS + 3) * sizeof(vec) + LINE;
        memory.resize(bytes);
        void *begin = memory.data();
        quads = static_cast<uvec *>(std::align(LINE, bytes - LINE, begin, bytes));
        scales = reinterpret_cast<vec *>(quads + vectors * QUADS);
    }

    template <int64_t F> void take(const BlockMatrix &m, int64_t tile) {
        constexpr Format f = FORMATS[F];
        const int64_t blocks = m.ins / BLOCK_INPUTS;
        for (int t = 0; t < TILES_TOGETHER; t++) {
            const uint8_t *data = m.data + (tile + t) * blocks * f.data_bytes();
            Scales<F> of_tile(m.scales + (tile + t) * (blocks / f.together) * f.scale_bytes(), 0);
            for (int64_t b = 0; b < blocks; b++, data += f.data_bytes()) {
                of_tile.next();
                uvec *to = &quads[b * QUADS * TILES_TOGETHER + t];
#pragma GCC unroll 8
                for (int n = 0; n < QUADS; n++) to[n * TILES_TOGETHER] = unpack<F>(data, n, 0);
                vec *own = &scales[(b * TILES_TOGETHER + t) * 3];
                own[0] = of_tile.first;
                if constexpr (f.scales == 2) own[1] = of_tile.second;
                if constexpr (f.has_minima) own[2] = -of_tile.minima;
            }
        }
    }

    // ROWS_TOGETHER rows from `row` on times the tiles: `out` [ROWS_TOGETHER, step]. Every sum is
    // formed as `block_products` forms it.
    template <int64_t F>
    void products(int64_t ins, const ByteRows &x, int64_t row, float *out, int64_t step) const {
        using Sums = QuadSums<FORMATS[F].bits>;
        constexpr Format f = FORMATS[F];
        constexpr int R = ROWS_TOGETHER, T = TILES_TOGETHER;
        constexpr int CHAIN = f.scales == 2 ? QUADS / 2 : QUADS;
        const int64_t blocks = ins / BLOCK_INPUTS;
        const int8_t *numbers = &x.numbers[row * ins];
        const float *factors = &x.scales[row * blocks], *shares = &x.shares[row * blocks];
        const int32_t *halves = &x.sums[2 * row * blocks];
        const uvec *q = quads;
        const vec *own = scales;
        vec sums[R][T] = {};
        for (int64_t b = 0; b < blocks; b++, numbers += BLOCK_INPUTS, own += 3 * T) {
            vec products[R][T];
#pragma GCC unroll 2
            for (int chain = 0; chain < QUADS / CHAIN; chain++) {
                Sums wholes[R][T];
#pragma GCC unroll 4
                for (int r = 0; r < R; r++) {
                    const int32_t *both = halves + 2 * (r * blocks + b);
                    const int32_t sum = f.scales == 2 ? both[chain] : both[0] + both[1];
#pragma GCC unroll 4
                    for (int t = 0; t < T; t++) wholes[r][t].start(-f.offset * sum);
                }
#pragma GCC unroll 8
                for (int n = 0; n < CHAIN; n++, q += T)
#pragma GCC unroll 4
                    for (int r = 0; r < R; r++) {
                        int32_t four;
                        std::memcpy(&four, numbers + r * ins + 4 * (chain * CHAIN + n), 4);
#pragma GCC unroll 4
                        for (int t = 0; t < T; t++) wholes[r][t].add(n, q[t], four);
                    }
#pragma GCC unroll 4
                for (int r = 0; r < R; r++)
#pragma GCC unroll 4
                    for (int t = 0; t < T; t++) {
                        products[r][t] = scaled<F>(wholes[r][t].total(0), chain, own[3 * t],
                                                   own[3 * t + 1], products[r][t]);
                    }
            }
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                const vec factor = all(factors[r * blocks + b]), share = all(shares[r * blocks + b]);
#pragma GCC unroll 4
                for (int t = 0; t < T; t++) {
                    add_block<F>(sums[r][t], products[r][t], own[3 * t], own[3 * t + 2], factor,
                                 share);
                }
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int t = 0; t < T; t++) store(out + r * step + TILE * t, sums[r][t]);
    }

  private:
    static constexpr size_t LINE = 64;  // of the cache
    std::vector<uint8_t> memory;
    uvec *quads = nullptr;  // [blocks, QUADS, TILES_TOGETHER]
    vec *scales = nullptr;  // [blocks, TILES_TOGETHER, 3]: the first, the second, minus the minimum
};

// All rows times `tiles` tiles from `tile` on. With many rows TILES_TOGETHER tiles are unpacked first.
// `put(row, count, sums)` takes `count` rows' sums as soon as they are there: `sums` [count, STEP].
template <int64_t F, typename Put>
static void tiles_products(const BlockMatrix &m, int64_t tile, int64_t tiles, const ByteRows &x,
                           int64_t rows, OpenTiles &open, const Put &put) {
    constexpr int64_t STEP = TILE * TILES_TOGETHER, MOST = 4 * MOST_BLOCK_ROWS;
    alignas(64) float sums[MOST * STEP];
    int64_t row = 0;
    if constexpr (TILES_TOGETHER > 1)
        if (rows >= LEAST_ROWS_TOGETHER && tiles == TILES_TOGETHER) {
            open.take<F>(m, tile);
            for (; row + ROWS_TOGETHER <= rows; row += ROWS_TOGETHER) {
                open.products<F>(m.ins, x, row, sums, STEP);
                put(row, ROWS_TOGETHER, sums);
            }
        }
    for (int64_t end; row < rows; row = end) {
        end = std::min(rows, row + MOST);
        for (int64_t t = 0; t < tiles; t++)
            tile_products<F>(m, tile + t, x, end, sums + TILE * t - row * STEP, STEP, row);
        put(row, end - row, sums);
    }
}
