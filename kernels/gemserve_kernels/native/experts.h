// Layers in which a router chooses a few of many experts for each row.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "products.h"

// `chosen`: experts of a row. `is_normed`: the weights of a row's experts sum to 1. `gate_up`,
// `down`: those of the first expert; the others follow. `limit`: of what the experts of gpt-oss
// take, whose gate and up projections are the even and odd outputs; 0: none, and `gate_up` has all
// gates before all others.
struct Experts {
    Matrix router, gate_up, down;
    int64_t count, chosen, inner, is_normed;
    double limit, alpha;
};

// Pairs of a row and one of its experts, sorted by expert, so that an expert's rows are together.
struct Routing {
    std::vector<int64_t> row, expert;
    std::vector<float> weight;
    std::vector<int64_t> first;  // of each expert that has rows; at the end, the number of pairs
    std::vector<int64_t> of_row;  // [rows, chosen]: a row's pairs, by expert
    std::vector<int64_t> order, chosen, where;  // of `route` alone

    void make_room(const Experts &e, int64_t rows) {
        for (auto *pairs : {&row, &expert, &of_row, &chosen}) pairs->reserve(rows * e.chosen);
        for (auto *experts : {&first, &order, &where}) experts->reserve(e.count + 1);
        weight.reserve(rows * e.chosen);
    }
};

// Chooses each row's experts. `scores`: [rows, count], overwritten with probabilities. It takes no
// memory, because `out` has room.
static void route(const Experts &e, int64_t rows, float *scores, Routing &out) {
    std::vector<int64_t> &order = out.order, &chosen = out.chosen, &where = out.where;
    order.resize(e.count), chosen.resize(rows * e.chosen), where.assign(e.count + 1, 0);
    for (int64_t r = 0; r < rows; r++) {
        float *row = scores + r * e.count, total = 0;
        const float most = *std::max_element(row, row + e.count);
        for (int64_t i = 0; i < e.count; i++) total += row[i] = std::exp(row[i] - most);
        for (int64_t i = 0; i < e.count; i++) row[i] /= total;
        std::iota(order.begin(), order.end(), 0);
        // NaN is in no order, so that only numbers that are not NaN are compared
        std::partial_sort(order.begin(), order.begin() + e.chosen, order.end(),
                          [&](int64_t a, int64_t b) {
                              const float x = row[a] == row[a] ? row[a] : -1.0f;
                              const float y = row[b] == row[b] ? row[b] : -1.0f;
                              return x != y ? x > y : a < b;
                          });
        std::sort(order.begin(), order.begin() + e.chosen);
        std::copy(order.begin(), order.begin() + e.chosen, chosen.begin() + r * e.chosen);
        for (int64_t i = 0; i < e.chosen; i++) where[order[i] + 1]++;
    }
    const int64_t pairs = rows * e.chosen;
    out.first.clear();
    for (int64_t i = 0; i < e.count; i++) {
        if (where[i + 1]) out.first.push_back(where[i]);
        where[i + 1] += where[i];
    }
    out.first.push_back(pairs);
    out.row.resize(pairs), out.expert.resize(pairs), out.weight.resize(pairs);
    out.of_row.resize(pairs);
    for (int64_t i = 0; i < pairs; i++) {
        const int64_t row = i / e.chosen, expert = chosen[i], at = where[expert]++;
        float total = 0;
        for (int64_t j = 0; j < e.chosen; j++)
            total += scores[row * e.count + chosen[row * e.chosen + j]];
        out.row[at] = row, out.expert[at] = expert, out.of_row[i] = at;
        out.weight[at] = scores[row * e.count + expert] / (e.is_normed ? total : 1.0f);
    }
}
