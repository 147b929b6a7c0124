// Attention of one row's query heads to the keys of their sequence, in parts of up to SPLIT keys.

#pragma once

#include <algorithm>

#include "vectors.h"

constexpr int64_t SPLIT = 512;
constexpr int64_t SCORES = SPLIT + LANES;

// Scaled scores of G query heads with `count` keys: `scores` [G, SCORES].
template <int G, typename T>
static void score(const float *query, const T *keys, int64_t count, int64_t dim, float scale,
                  float *scores) {
    int64_t t = 0;
    for (; t + 4 <= count; t += 4) {
        vec sums[G][4] = {};
        for (int64_t i = 0; i < dim; i += LANES) {
            vec some[4];
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) some[j] = load_float(keys + (t + j) * dim + i);
#pragma GCC unroll 4
            for (int g = 0; g < G; g++) {
                const vec given = load(query + g * dim + i);
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++) sums[g][j] = fused(given, some[j], sums[g][j]);
            }
        }
#pragma GCC unroll 4
        for (int g = 0; g < G; g++)
            *reinterpret_cast<quad *>(scores + g * SCORES + t) =
                sums_of(sums[g][0], sums[g][1], sums[g][2], sums[g][3]) * scale;
    }
    for (; t < count; t++)
        for (int g = 0; g < G; g++) {
            vec sums = {};
            for (int64_t i = 0; i < dim; i += LANES)
                sums = fused(load(query + g * dim + i), load_float(keys + t * dim + i), sums);
            scores[g * SCORES + t] = sum(sums) * scale;
        }
}

// Sums of V vectors of each value, weighted by each of G heads: `out` [G, dim + 2].
template <int G, int V, typename T>
static void weigh(const float *weights, const T *values, int64_t count, int64_t dim, float *out) {
    vec sums[G][V] = {};
    for (int64_t t = 0; t < count; t++) {
        vec some[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) some[v] = load_float(values + t * dim + v * LANES);
#pragma GCC unroll 4
        for (int g = 0; g < G; g++) {
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) sums[g][v] = fused(some[v], all(weights[g * SCORES + t]), sums[g][v]);
        }
    }
#pragma GCC unroll 4
    for (int g = 0; g < G; g++) {
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) store(out + g * (dim + 2) + v * LANES, sums[g][v]);
    }
}

// Attention of G query heads of one row, which share a key head, to `count` keys.
// `cap`: bounds the scores; 0: nothing does. `out`: [G, dim + 2], where the last two are the largest
// score and the sum of weights.
template <int G, typename T>
static void attend(const float *query, const T *keys, const T *values, int64_t count, int64_t dim,
                   float scale, float cap, float *out) {
    alignas(64) float scores[G * SCORES];
    score<G>(query, keys, count, dim, scale, scores);
    for (int g = 0; g < G; g++) {
        float *row = scores + g * SCORES, most = -INFINITY;
        if (cap > 0)
            for (int64_t t = 0; t < count; t += LANES) store(row + t, capped(load(row + t), cap));
        std::fill(row + count, row + count + LANES, -INFINITY);
        vec mosts = all(-INFINITY), sums = {};
        for (int64_t t = 0; t < count; t += LANES) {
            const vec some = load(row + t);
            mosts = some > mosts ? some : mosts;
        }
        for (int i = 0; i < LANES; i++) most = std::max(most, mosts[i]);
        for (int64_t t = 0; t < count; t += LANES) {
            const vec weight = exponential(load(row + t) - most);
            store(row + t, weight);
            sums += weight;
        }
        out[g * (dim + 2) + dim] = most;
        out[g * (dim + 2) + dim + 1] = sum(sums);
    }
    int64_t i = 0;
    for (; i + 4 * LANES <= dim; i += 4 * LANES)
        weigh<G, 4>(scores, values + i, count, dim, out + i);
    for (; i < dim; i += LANES) weigh<G, 1>(scores, values + i, count, dim, out + i);
}

// The same for any number of heads.
template <typename T>
static void attend_all(int64_t heads, const float *query, const T *keys, const T *values,
                       int64_t count, int64_t dim, float scale, float cap, float *out) {
    int64_t left = heads;
    for (int64_t some; left; left -= some, query += some * dim, out += some * (dim + 2)) {
        some = std::min<int64_t>(left, 4);
        auto *const act = some == 4   ? attend<4, T>
                          : some == 3 ? attend<3, T>
                          : some == 2 ? attend<2, T>
                                      : attend<1, T>;
        act(query, keys, values, count, dim, scale, cap, out);
    }
}
