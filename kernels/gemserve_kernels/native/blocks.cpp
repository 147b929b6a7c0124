// Matrices in blocks of a few bits: made from the bytes of a GGUF file, and turned into numbers.
//
// The numbers are bit for bit those of the format's definition in float32, rounded to bfloat16 where
// bfloat16 is asked for. So products and sums must not be contracted.
#pragma GCC optimize("fp-contract=off")

#include <omp.h>

#include "blocks.h"
#include "failures.h"

// How numbers are laid out: [outs, ins], or as oneDNN packs bfloat16, [outs / 64][ins / 2][64][2].
enum Laid : int64_t { ROWS_FLOAT, ROWS_HALF, PACKED_HALF };

// One row's block of 32 inputs as the file has it.
struct FileBlock {
    uint8_t q[BLOCK_INPUTS];
    uint8_t factors[4];  // two float16
    uint8_t scales[3];   // of a block in a superblock: scales, then its minimum
};

static void negate_half(uint8_t *half) { half[1] ^= 0x80; }

static void take_nibbles(const uint8_t *from, uint8_t *q) {
    for (int i = 0; i < 16; i++) q[i] = from[i] & 15, q[i + 16] = from[i] >> 4;
}

static void take_fifth_bits(const uint8_t *from, uint8_t *q) {
    for (int i = 0; i < 32; i++) q[i] |= (from[i / 8] >> (i % 8) & 1) << 4;
}

// Scale and minimum of 6 bits each of block `b` of a superblock of Q4_K or Q5_K.
static void take_six_bits(const uint8_t *packed, int b, uint8_t *scales) {
    if (b < 4) {
        scales[0] = packed[b] & 63, scales[1] = packed[b + 4] & 63;
        return;
    }
    scales[0] = (packed[b + 4] & 15) | packed[b - 4] >> 6 << 4;
    scales[1] = packed[b + 4] >> 4 | packed[b] >> 6 << 4;
}

static int64_t file_bytes(int64_t format) {  // of a superblock of one output
    constexpr int64_t bytes[BLOCK_FORMATS] = {18, 20, 22, 24, 34, 144, 176, 210};
    return bytes[format];
}

// Block `b` of the superblock that begins at `from`.
template <int64_t F> static FileBlock take_block(const uint8_t *from, int b) {
    FileBlock block = {};
    const auto factors = [&](int64_t at, int64_t bytes) {
        std::memcpy(block.factors, from + at, bytes);
        if (FORMATS[F].together == 1 && bytes == 4) negate_half(block.factors + 2);  // they add it
    };
    if constexpr (F == Q4_0 || F == Q4_1) {
        const int head = F == Q4_0 ? 2 : 4;
        factors(0, head), take_nibbles(from + head, block.q);
    } else if constexpr (F == Q5_0 || F == Q5_1) {
        const int head = F == Q5_0 ? 2 : 4;
        factors(0, head), take_nibbles(from + head + 4, block.q);
        take_fifth_bits(from + head, block.q);
    } else if constexpr (F == Q8_0) {
        factors(0, 2);
        for (int i = 0; i < 32; i++) block.q[i] = from[2 + i] ^ 0x80;  // + 128
    } else if constexpr (F == Q4_K || F == Q5_K) {
        factors(0, 4), take_six_bits(from + 4, b, block.scales);
        const uint8_t *low = from + 16 + (F == Q5_K ? 32 : 0) + b / 2 * 32;
        for (int i = 0; i < 32; i++) {
            block.q[i] = b % 2 ? low[i] >> 4 : low[i] & 15;
            if (F == Q5_K) block.q[i] |= (from[16 + i] >> b & 1) << 4;
        }
    } else {  // Q6_K: halves of 128 inputs, each of four blocks
        const uint8_t *low = from + b / 4 * 64 + b % 2 * 32, *high = from + 128 + b / 4 * 32;
        for (int i = 0; i < 32; i++) {
            const int nibble = b % 4 < 2 ? low[i] & 15 : low[i] >> 4;
            block.q[i] = uint8_t(nibble | (high[i] >> 2 * (b % 4) & 3) << 4);
        }
        std::memcpy(block.scales, from + 192 + 2 * b, 2);
        std::memcpy(block.factors, from + 208, 2);
    }
    return block;
}

// Put output `o`'s block of a tile where it belongs.
template <int64_t F>
static void put_block(const FileBlock &block, int o, int b, uint8_t *data, uint8_t *scales) {
    constexpr Format f = FORMATS[F];
    for (int j = 0; j < QUADS; j++)
        for (int i = 0; i < 4; i++) {
            const uint8_t q = block.q[4 * j + i];
            const int at = 4 * o + i;
            if (f.bits == 8) {
                data[64 * j + at] = q;
                continue;
            }
            data[64 * (j % 4) + at] |= (q & 15) << (j < 4 ? 0 : 4);
            if (f.bits == 5) data[256 + at] |= (q >> 4) << j;
            if (f.bits == 6) data[256 + 64 * (j / 4) + at] |= (q >> 4) << 2 * (j % 4);
        }
    if (b == 0)
        for (int k = 0; k < f.head_bytes() / 32; k++)
            std::memcpy(scales + 32 * k + 2 * o, block.factors + 2 * k, 2);
    uint8_t *own = scales + f.head_bytes() + b * f.block_bytes() + o;
    for (int k = 0; k < f.block_bytes() / TILE; k++) own[TILE * k] = block.scales[k];
}

// The numbers of a tile's block: `out` [32 inputs][TILE].
template <int64_t F>
static void take_numbers(const uint8_t *data, const Scales<F> &scales, int h, float *out) {
    constexpr Format f = FORMATS[F];
    for (int quad = 0; quad < QUADS; quad++) {
        const uvec bytes = unpack<F>(data, quad, h);
        const vec scale = quad < QUADS / 2 ? scales.first : scales.second;
        for (int i = 0; i < 4; i++) {
            const ivec q = (ivec)((bytes >> (8 * i)) & 0xffu) - f.offset;
            vec number = scale * __builtin_convertvector(q, vec);
            if (f.has_minima) number = number - scales.minima;
            store(out + (4 * quad + i) * TILE + LANES * h, number);
        }
    }
}

static uvec rounded(vec number) {  // to bfloat16, in the low half
    const uvec bits = (uvec)number;
    const uvec kept = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return number != number ? uvec{} + 0x7fc0u : kept;
}

// Put a tile's block where the layout wants it. `first`: the first output, of those asked for.
static void put_numbers(const float *numbers, int64_t laid, int64_t first, int64_t count,
                        int64_t ins, int64_t input, void *out) {
    if (laid == PACKED_HALF) {
        uint32_t *to = static_cast<uint32_t *>(out) + first / 64 * (ins / 2) * 64;
        to += input / 2 * 64 + first % 64;
        for (int i = 0; i < BLOCK_INPUTS; i += 2, to += 64)
            for (int h = 0; h < PARTS_OF_TILE; h++) {
                const uvec low = rounded(load(numbers + i * TILE + LANES * h));
                const uvec high = rounded(load(numbers + (i + 1) * TILE + LANES * h));
                *reinterpret_cast<uvec *>(to + LANES * h) = low | high << 16;
            }
        return;
    }
    for (int64_t o = 0; o < count; o++)
        for (int i = 0; i < BLOCK_INPUTS; i++) {
            const int64_t at = (first + o) * ins + input + i;
            const float number = numbers[i * TILE + o];
            if (laid == ROWS_FLOAT)
                static_cast<float *>(out)[at] = number;
            else
                store_kv(static_cast<uint16_t *>(out) + at, number);
        }
}

// `raw`: the tensor's bytes of the file, [outs, ins]. `data` and `scales` are zero before.
extern "C" const char *gemserve_make_blocks(const BlockMatrix *matrix, const uint8_t *raw,
                                            int64_t threads) try {
    const BlockMatrix m = *matrix;
    with_format(m.format, [&](auto format) {
        constexpr int64_t F = format;
        constexpr Format f = FORMATS[F];
        const int64_t supers = m.ins / BLOCK_INPUTS / f.together, size = file_bytes(F);
#pragma omp parallel for num_threads(threads) schedule(static)
        for (int64_t tile = 0; tile < (m.outs + TILE - 1) / TILE; tile++)
            for (int64_t o = 0; o < std::min<int64_t>(TILE, m.outs - tile * TILE); o++)
                for (int64_t s = 0; s < supers; s++) {
                    const int64_t at = tile * supers + s;
                    const uint8_t *from = raw + ((tile * TILE + o) * supers + s) * size;
                    uint8_t *data = const_cast<uint8_t *>(m.data) + at * f.together * f.data_bytes();
                    uint8_t *scales = const_cast<uint8_t *>(m.scales) + at * f.scale_bytes();
                    for (int b = 0; b < f.together; b++)
                        put_block<F>(take_block<F>(from, b), int(o), b, data + b * f.data_bytes(),
                                     scales);
                }
    });
    return nullptr;
} catch (...) {
    return reason();
}

// Outputs `first` … `first` + `count` − 1, of which the first is the first of a tile.
static void put_outputs(const BlockMatrix &m, int64_t first, int64_t count, int64_t laid, void *out,
                        int64_t threads) {
    with_format(m.format, [&](auto format) {
        constexpr int64_t F = format;
        constexpr Format f = FORMATS[F];
        const int64_t blocks = m.ins / BLOCK_INPUTS;
#pragma omp parallel for num_threads(threads) schedule(static)
        for (int64_t o = 0; o < count; o += TILE) {
            alignas(64) float numbers[BLOCK_INPUTS * TILE];
            const int64_t tile = (first + o) / TILE;
            const uint8_t *data = m.data + tile * blocks * f.data_bytes();
            const uint8_t *scales = m.scales + tile * (blocks / f.together) * f.scale_bytes();
            Scales<F> of_parts[PARTS_OF_TILE];
            for (int h = 0; h < PARTS_OF_TILE; h++) of_parts[h] = Scales<F>(scales, h);
            for (int64_t b = 0; b < blocks; b++, data += f.data_bytes()) {
                for (int h = 0; h < PARTS_OF_TILE; h++) {
                    of_parts[h].next();
                    take_numbers<F>(data, of_parts[h], h, numbers);
                }
                put_numbers(numbers, laid, o, std::min<int64_t>(TILE, count - o), m.ins,
                            b * BLOCK_INPUTS, out);
            }
        }
    });
}

extern "C" const char *gemserve_block_numbers(const BlockMatrix *matrix, int64_t first,
                                              int64_t count, int64_t laid, void *out,
                                              int64_t threads) try {
    put_outputs(*matrix, first, count, laid, out, threads);
    return nullptr;
} catch (...) {
    return reason();
}

// The outputs `ids` [count] as rows of float32 or bfloat16: what an embedding looks up.
extern "C" const char *gemserve_block_rows(const BlockMatrix *matrix, const int64_t *ids,
                                           int64_t count, int64_t laid, void *out) try {
    const BlockMatrix m = *matrix;
    std::vector<float> numbers(TILE * m.ins);
    for (int64_t i = 0; i < count; i++) {
        put_outputs(m, ids[i] / TILE * TILE, TILE, ROWS_FLOAT, numbers.data(), 1);
        const float *row = &numbers[ids[i] % TILE * m.ins];
        for (int64_t k = 0; k < m.ins; k++)
            if (laid == ROWS_FLOAT)
                static_cast<float *>(out)[i * m.ins + k] = row[k];
            else
                store_kv(static_cast<uint16_t *>(out) + i * m.ins + k, row[k]);
    }
    return nullptr;
} catch (...) {
    return reason();
}

// Sums of some tiles' outputs and their biases: `out` [count], float32 or bfloat16.
template <typename T>
static void put_sums(const float *sums, const float *bias, int64_t count, T *out) {
    int64_t o = 0;
    for (; o + TILE <= count; o += TILE)
#pragma GCC ivdep
        for (int i = 0; i < TILE; i++) store_kv(out + o + i, sums[o + i] + bias[o + i]);
    for (; o < count; o++) store_kv(out + o, sums[o] + bias[o]);
}

// Products of rows with all outputs: `out` [rows, outs], float32 or bfloat16. It is a struct because
// clang cannot have a loop of OpenMP in a lambda that refers to a function's arguments.
struct Products {
    static constexpr int64_t TOGETHER = TILE * TILES_TOGETHER;  // outputs
    static constexpr float NO_BIAS[TOGETHER] = {};
    const BlockMatrix &m;
    const ByteRows &given;
    int64_t rows;
    const float *bias;
    bool is_half;
    void *out;

    // All threads of a team call it.
    template <int64_t FORMAT> void put_all(OpenTiles &open) const {
        const int64_t tiles = (m.outs + TILE - 1) / TILE;
#pragma omp for schedule(static)
        for (int64_t tile = 0; tile < tiles; tile += TILES_TOGETHER) {
            const int64_t some_tiles = std::min<int64_t>(TILES_TOGETHER, tiles - tile);
            const auto put = [this, tile](int64_t row, int64_t count, const float *sums) {
                put_rows(tile * TILE, row, count, sums);
            };
            tiles_products<FORMAT>(m, tile, some_tiles, given, rows, open, put);
        }
    }

    // Sums [count, TOGETHER] of outputs from `first` on.
    void put_rows(int64_t first, int64_t row, int64_t count, const float *sums) const {
        const int64_t outs = std::min<int64_t>(TOGETHER, m.outs - first);
        const float *some = bias ? bias + first : NO_BIAS;
        for (int64_t r = row; r < row + count; r++, sums += TOGETHER) {
            const int64_t at = r * m.outs + first;
            if (is_half)
                put_sums(sums, some, outs, static_cast<uint16_t *>(out) + at);
            else
                put_sums(sums, some, outs, static_cast<float *>(out) + at);
        }
    }
};

// Products of rows [rows, ins] with all outputs: `out` [rows, outs], float32 or bfloat16.
extern "C" const char *gemserve_block_products(const BlockMatrix *matrix, const void *x,
                                               int64_t rows, const float *bias, int64_t is_half,
                                               void *out, int64_t threads) try {
    const BlockMatrix m = *matrix;
    ByteRows given;
    given.make_room(rows, m.ins);
    Team team;
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> wide;
        OpenTiles open;
        if (team.can([&] {
                wide.resize(m.ins);
                if (TILES_TOGETHER > 1 && rows >= LEAST_ROWS_TOGETHER) open.make_room(m.ins);
            })) {
#pragma omp for schedule(static)
            for (int64_t r = 0; r < rows; r++) {
                const float *row = static_cast<const float *>(x) + r * m.ins;
                if (is_half) {
                    const uint16_t *half = static_cast<const uint16_t *>(x) + r * m.ins;
                    for (int64_t i = 0; i < m.ins; i++) wide[i] = number(half[i]);
                    row = wide.data();
                }
                given.take(r, row);
            }
            const Products products{m, given, rows, bias, is_half != 0, out};
            with_format(m.format, [&](auto format) { products.template put_all<format>(open); });
        }
    }
    team.rethrow();
    return nullptr;
} catch (...) {
    return reason();
}
