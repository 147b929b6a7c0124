// Products of a few rows with a matrix. Each weight is read from memory once, and each row's sums are
// formed in the same order whatever the number of rows.

#pragma once

#include <algorithm>
#include <type_traits>

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

// `is_packed`: bfloat16 [outs / BLOCK][ins / 2][BLOCK][2]; otherwise float32 [outs, ins].
struct Matrix {
    const void *data;
    const float *bias;
    int64_t outs, is_packed;
};

// A pass over weights: it brings the `pass`-th of `passes` parts of the next ones into the cache.
struct Pass {
    int64_t pass, passes;
};

// R rows times O outputs of a plain matrix: `out` [R, BLOCK].
template <int R, int O>
static void plain(const float *w, int64_t ins, const float *x, float *out, Pass p) {
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
        for (int o = 0; o < O; o++) weights[o] = load(w + o * ins + k);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const vec given = load(x + r * ins + k);
#pragma GCC unroll 4
            for (int o = 0; o < O; o++) sums[r][o] += given * weights[o];
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
                sums[r][v] += low * x[r * ins + k];
                sums[r][v] += high * x[r * ins + k + 1];
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

// Products of all rows with `size` outputs of a matrix from `first` on: `out` [rows, BLOCK].
static void product(int64_t rows, const Matrix &m, int64_t ins, int64_t first, int64_t size,
                    const float *x, float *out) {
    const int64_t count = std::min(size, m.outs - first);
    if (m.is_packed) {
        auto *const act = size == BLOCK       ? packed_unit<BLOCK>
                          : size == BLOCK / 2 ? packed_unit<BLOCK / 2>
                                              : packed_unit<LEAST_UNIT>;
        act(rows, m, ins, first, x, out);
    } else {
        const float *w = static_cast<const float *>(m.data) + first * ins;
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

// The outputs of a unit of `m` for all rows, put at `to` [rows, step] or added to it.
static void put(int64_t rows, const Matrix &m, int64_t ins, int64_t unit, int64_t size,
                const float *x, float *room, float *to, int64_t step, bool is_added) {
    const int64_t first = unit * size;
    const int64_t count = std::min(size, m.outs - first);
    product(rows, m, ins, first, size, x, room);
    for (int64_t r = 0; r < rows; r++) {
        float *target = to + r * step + first;
        const float *from = room + r * BLOCK;
        for (int64_t o = 0; o < count; o++) target[o] = is_added ? target[o] + from[o] : from[o];
    }
}
