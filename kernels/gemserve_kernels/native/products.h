// Products of a few rows with a matrix. Each weight is read from memory once, and each row's sums are
// formed in the same order whatever the number of rows.

#pragma once

#include <algorithm>
#include <type_traits>

#include "blocks.h"
#include "vectors.h"

// Rows whose sums fit into the registers together.
#if defined(__AVX512F__)
constexpr int MOST_ROWS = 6;
#elif defined(__AVX2__)
constexpr int MOST_ROWS = 2;
#else
constexpr int MOST_ROWS = 4;
#endif
constexpr int OUTS = 4;    // outputs of a plain matrix that are computed together
constexpr int AHEAD = 2 * OUTS;  // outputs from those computed to those brought into the cache
constexpr int BLOCK = 64;  // outputs of a block of a packed matrix, and most that a unit computes
constexpr int LEAST_UNIT = 16;

// PLAIN: float32 [outs, ins]; PLAIN_HALF: the same in bfloat16. PACKED: bfloat16
// [outs / BLOCK][ins / 2][BLOCK][2]. TURNED, TURNED_HALF: [ins, outs]. IN_BLOCKS: a `BlockMatrix`.
enum Layout : int64_t { PLAIN, PLAIN_HALF, PACKED, TURNED, TURNED_HALF, IN_BLOCKS };
struct Matrix {
    const void *data;
    const float *bias;
    int64_t outs, layout;
};

// A pass over weights: it brings the `pass`-th of `passes` parts of the next ones into the cache.
struct Pass {
    int64_t pass, passes;
};

// The rows [rows, ins] that a product takes. A thread has its own, and its own `room` for their bytes.
class Given {
  public:
    const float *const x;
    const int64_t rows, ins;
    Given(const float *x, int64_t rows, int64_t ins, ByteRows *room)
        : x(x), rows(rows), ins(ins), room(room) {}

    const ByteRows &as_bytes() const {
        if (!is_ready) {
            room->make_room(rows, ins);
            for (int64_t r = 0; r < rows; r++) room->take(r, x + r * ins);
            is_ready = true;
        }
        return *room;
    }

  private:
    ByteRows *room;
    mutable bool is_ready = false;
};

// R rows times O outputs of a plain matrix: `out` [R, BLOCK].
template <int R, int O, typename W>
static void plain(const W *w, int64_t ins, const float *x, float *out, Pass p) {
    vec sums[R][O] = {};
    int64_t turn = 2 * p.pass + 1;  // processors fetch lines in pairs
    for (int64_t k = 0; k < ins; k += LANES, turn--) {
        if (turn < 2) {
#pragma GCC unroll 4
            for (int o = 0; o < O; o++) __builtin_prefetch(w + (AHEAD + o) * ins + k, 0, 2);
            if (turn == 0) turn = 2 * p.passes;
        }
        vec weights[O];
#pragma GCC unroll 4
        for (int o = 0; o < O; o++) weights[o] = load_float(w + o * ins + k);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const vec given = load(x + r * ins + k);
#pragma GCC unroll 4
            for (int o = 0; o < O; o++) sums[r][o] = fused(given, weights[o], sums[r][o]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        float *to = out + r * BLOCK;
        if constexpr (O == 4)
            *reinterpret_cast<quad *>(to) =
                sums_of(sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
        else
            *to = sum(sums[r][0]);
    }
}

// R rows times the outputs of a packed block that fill VECS vectors: `out` [R, BLOCK].
template <int R, int VECS>
static void packed(const uint32_t *w, const uint32_t *next, int64_t ins, const float *x, float *out,
                   Pass p) {
    vec sums[R][VECS] = {};
    int64_t turn = p.pass;
    for (int64_t k = 0; k < ins; k += 2, w += BLOCK, next += BLOCK) {
        if (turn-- == 0) {
#pragma GCC unroll 8
            for (int v = 0; v < VECS; v++) __builtin_prefetch(next + v * LANES, 0, 2);
            turn = p.passes - 1;
        }
#pragma GCC unroll 8
        for (int v = 0; v < VECS; v++) {
            const uvec pair = load(w + v * LANES);
            const vec low = (vec)(pair << 16), high = (vec)(pair & 0xffff0000u);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                sums[r][v] = fused(low, all(x[r * ins + k]), sums[r][v]);
                sums[r][v] = fused(high, all(x[r * ins + k + 1]), sums[r][v]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int v = 0; v < VECS; v++) store(out + r * BLOCK + v * LANES, sums[r][v]);
}

// Calls `act` with a number known to the compiler, `rows`, which is from 1 to R.
template <int R, typename Act> static void with_rows(int64_t rows, const Act &act) {
    if (rows == R)
        act(std::integral_constant<int, R>());
    else if constexpr (R > 1)
        with_rows<R - 1>(rows, act);
}

// Calls `act` for each pass with the first row and the number of rows, as even as possible.
template <typename Act> static void in_passes(int64_t rows, const Act &act) {
    const int64_t passes = (rows + MOST_ROWS - 1) / MOST_ROWS;
    for (int64_t pass = 0, row = 0; pass < passes; pass++) {
        const int64_t some = (rows - row + passes - pass - 1) / (passes - pass);
        with_rows<MOST_ROWS>(some, [&](auto count) { act(count, row, Pass{pass, passes}); });
        row += some;
    }
}

template <int SIZE>
static void packed_unit(int64_t rows, const Matrix &m, int64_t ins, int64_t first, const float *x,
                        float *out) {
    const int64_t column = first % BLOCK, block = (first - column) * ins / 2;
    const uint32_t *w = static_cast<const uint32_t *>(m.data) + block + column;
    const uint32_t *next = column + SIZE < BLOCK ? w + SIZE : w - column + BLOCK * ins / 2;
    in_passes(rows, [&](auto some, int64_t row, Pass pass) {
        packed<some, SIZE / LANES>(w, next, ins, x + row * ins, out + row * BLOCK, pass);
    });
}

template <typename W>
static void plain_unit(int64_t rows, const Matrix &m, int64_t ins, int64_t first, int64_t count,
                       const float *x, float *out) {
    const W *w = static_cast<const W *>(m.data) + first * ins;
    int64_t o = 0;
    for (; o + OUTS <= count; o += OUTS)
        in_passes(rows, [&](auto some, int64_t row, Pass pass) {
            plain<some, OUTS>(w + o * ins, ins, x + row * ins, out + row * BLOCK + o, pass);
        });
    for (; o < count; o++)
        in_passes(rows, [&](auto some, int64_t row, Pass pass) {
            plain<some, 1>(w + o * ins, ins, x + row * ins, out + row * BLOCK + o, pass);
        });
}

// R rows times outputs of a turned matrix that fill VECS vectors: `out` [R, BLOCK].
template <int R, int VECS, typename W>
static void turned(const W *w, int64_t ins, int64_t outs, const float *x, float *out) {
    vec sums[R][VECS] = {};
    for (int64_t k = 0; k < ins; k++, w += outs) {
#pragma GCC unroll 8
        for (int v = 0; v < VECS; v++) __builtin_prefetch(w + 8 * outs + v * LANES, 0, 2);
#pragma GCC unroll 8
        for (int v = 0; v < VECS; v++) {
            const vec weights = load_float(w + v * LANES);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++)
                sums[r][v] = fused(weights, all(x[r * ins + k]), sums[r][v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int v = 0; v < VECS; v++) store(out + r * BLOCK + v * LANES, sums[r][v]);
}

template <typename W>
static void turned_unit(int64_t rows, const Matrix &m, int64_t ins, int64_t first, int64_t count,
                        const float *x, float *out) {
    const W *w = static_cast<const W *>(m.data) + first;
    for (int64_t o = 0; o < count;) {  // the number of outputs is a multiple of the least unit
        const bool is_block = count - o >= BLOCK;
        in_passes(rows, [&](auto some, int64_t row, Pass) {
            auto *const act = is_block ? turned<some, BLOCK / LANES, W>
                                       : turned<some, LEAST_UNIT / LANES, W>;
            act(w + o, ins, m.outs, x + row * ins, out + row * BLOCK + o);
        });
        o += is_block ? BLOCK : LEAST_UNIT;
    }
}

static void blocks_unit(const Given &given, const Matrix &m, int64_t first, int64_t count, float *out) {
    const BlockMatrix &blocks = *static_cast<const BlockMatrix *>(m.data);
    with_format(blocks.format, [&](auto format) {
        for (int64_t o = 0; o < count; o += TILE)
            tile_products<format>(blocks, (first + o) / TILE, given.as_bytes(), given.rows, out + o,
                                  BLOCK);
    });
}

// Products of all rows with `size` outputs of a matrix from `first` on: `out` [rows, BLOCK].
static void product(const Given &given, const Matrix &m, int64_t first, int64_t size, float *out) {
    const int64_t count = std::min(size, m.outs - first), rows = given.rows, ins = given.ins;
    const float *x = given.x;
    if (m.layout == IN_BLOCKS) {
        blocks_unit(given, m, first, count, out);
    } else if (m.layout == PACKED) {
        auto *const act = size == BLOCK       ? packed_unit<BLOCK>
                          : size == BLOCK / 2 ? packed_unit<BLOCK / 2>
                                              : packed_unit<LEAST_UNIT>;
        act(rows, m, ins, first, x, out);
    } else {
        auto *const act = m.layout == PLAIN        ? plain_unit<float>
                          : m.layout == PLAIN_HALF ? plain_unit<uint16_t>
                          : m.layout == TURNED     ? turned_unit<float>
                                                   : turned_unit<uint16_t>;
        act(rows, m, ins, first, count, x, out);
    }
    if (m.bias)
        for (int64_t r = 0; r < rows; r++)
            for (int64_t o = 0; o < count; o++) out[r * BLOCK + o] += m.bias[first + o];
}

static int64_t units(int64_t outs, int64_t size) { return (outs + size - 1) / size; }

// How many outputs a unit computes: as many as leave no thread idle for more than a sixteenth.
static int64_t unit_size(int64_t outs, int64_t threads) {
    for (int64_t size = BLOCK;; size /= 2) {
        const int64_t count = units(outs, size), rounds = (count + threads - 1) / threads;
        if (size == LEAST_UNIT || 16 * rounds * threads <= 17 * count) return size;
    }
}

// The matrix of one of several experts, whose matrices follow each other.
static Matrix of_expert(const Matrix &first, int64_t expert, int64_t ins) {
    Matrix m = first;
    if (first.layout == IN_BLOCKS) {
        m.data = static_cast<const BlockMatrix *>(first.data) + expert;
    } else {
        const int64_t bytes = first.layout == PLAIN || first.layout == TURNED ? 4 : 2;
        m.data = static_cast<const char *>(first.data) + expert * m.outs * ins * bytes;
    }
    if (m.bias) m.bias += expert * m.outs;
    return m;
}
