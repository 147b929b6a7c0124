// What a row's adapter adds to a step. Nothing here depends on another row.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "vectors.h"

// Matrices of a layer to which an adapter may add a product of low rank.
enum Slot { QUERY, KEY, VALUE, OUT, GATE, UP, DOWN, SLOTS };

// `a`: [rank, ins], `b`: [rank, outs], in the model's dtype. `rank` 0: nothing is added.
struct LowRank {
    const void *a, *b;
    int64_t rank;
    double scale;
};
// `shift`: [hidden], added to the layer's input, or null.
struct LayerTerms {
    const float *shift;
    LowRank added[SLOTS];
};
// `layer`: null if it has neither shifts nor products of low rank. `keys`, `values`: of a prefix,
// [layers, kv_heads, prefix, head_dim] in the model's dtype. `z_a` [layers, heads, features, rank],
// `z_b` [layers, heads, rank, head_dim], `k` [layers, heads, features]: of NTK-Attention's term.
struct Terms {
    const LayerTerms *layer;
    LowRank head;
    const void *keys, *values;
    int64_t prefix;
    const float *z_a, *z_b, *k;
    int64_t features, rank;
};

// What a product of low rank makes of one row, before its second matrix: `out` [rank].
template <typename T>
static void reduce(const LowRank &term, int64_t ins, const float *x, float *out) {
    const T *a = static_cast<const T *>(term.a);
    for (int64_t j = 0; j < term.rank; j++, a += ins) {
        vec sums = {};
        for (int64_t i = 0; i < ins; i += LANES) sums = fused(load(x + i), load_float(a + i), sums);
        out[j] = sum(sums) * float(term.scale);
    }
}

// The second half: adds outputs `first` … `first` + `count` − 1 of `outs` to `out`.
template <typename T>
static void widen(const LowRank &term, int64_t outs, int64_t first, int64_t count,
                  const float *reduced, float *out) {
    const T *b = static_cast<const T *>(term.b) + first;
    for (int64_t j = 0; j < term.rank; j++, b += outs) {
        int64_t o = 0;
        for (; o + LANES <= count; o += LANES)
            store(out + o, fused(all(reduced[j]), load_float(b + o), load(out + o)));
        for (; o < count; o++) out[o] += reduced[j] * number(b[o]);
    }
}

// φ of one query: [features], `dim` or twice that; see `ntk.py`.
static void features_of(const float *query, int64_t features, int64_t dim, float *out) {
    const float factor = 1.0f / std::sqrt(std::sqrt(float(dim)));
    for (int64_t i = 0; i < features; i += LANES) {
        const vec z = i < dim ? load(query + i) : -load(query + i - dim);
        const vec chosen = z >= 0.0f ? z : exponential(z);
        store(out + i, chosen * factor + 1.0f);
    }
}

// At least [features] and [rank] of the terms for which it is used.
struct NtkRoom {
    std::vector<float> phi, low;
};

// NTK-Attention's term of one query head: `out` [dim] gets φ(q)·Z. Returns the bounded φ(q)·k, whose
// sum is in float64, because it may be a thousandth of its terms.
static float ntk_term(const Terms &terms, int64_t head, const float *query, int64_t dim,
                      NtkRoom &room, float *out) {
    constexpr int PARTS = 4;
    float *phi = room.phi.data(), *low = room.low.data();
    std::fill(low, low + terms.rank, 0.0f);
    features_of(query, terms.features, dim, phi);
    const float *z_a = terms.z_a + head * terms.features * terms.rank;
    const float *z_b = terms.z_b + head * terms.rank * dim;
    const float *k = terms.k + head * terms.features;
    double sums[PARTS] = {}, sizes[PARTS] = {};
    for (int64_t i = 0; i < terms.features; i += PARTS)
        for (int p = 0; p < PARTS; p++) {
            const double product = double(phi[i + p]) * double(k[i + p]);
            sums[p] += product;
            sizes[p] += std::fabs(product);
        }
    for (int64_t i = 0; i < terms.features; i++)
        for (int64_t j = 0; j < terms.rank; j++) low[j] += phi[i] * z_a[i * terms.rank + j];
    std::fill(out, out + dim, 0.0f);
    for (int64_t j = 0; j < terms.rank; j++)
        for (int64_t d = 0; d < dim; d++) out[d] += low[j] * z_b[j * dim + d];
    const double mass = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    const double size = (sizes[0] + sizes[1]) + (sizes[2] + sizes[3]);
    return float(std::max(mass, 1e-3 * size));
}
