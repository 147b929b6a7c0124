// Attention of many queries at once in bfloat16, for reading prompts on CPUs with AVX-512's bfloat16
// instructions. Products are of pairs of bfloat16 and summed up in float32, as are the softmax's
// terms; its weights are rounded to bfloat16 before they are multiplied with the values.
//
// Keys and values are first packed, for each key head once. Then each task has some queries of one
// head, and goes over blocks of keys: scores, softmax relative to the largest score so far, sums.
// A query's sums are formed in the same order whatever other queries there are.
//
// `reading.py` compiles this file, fills the structure below and checks its size.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>

#include "failures.h"
#include "vectors.h"

// All fields have 8 bytes; strides are in numbers. Queries [heads, queries, dim], keys and values
// [kv_heads, keys, dim], each with a last stride of 1. `out`: [heads, queries, dim], contiguous.
// `lse`: [heads, queries]. `scratch`: `gemserve_reading_scratch` bytes.
struct Reading {
    int64_t heads, kv_heads, queries, keys, dim, is_causal, threads;
    double scale;
    const uint16_t *query, *key, *value;
    int64_t query_head, query_row, key_head, key_row, value_head, value_row;
    uint16_t *out;
    float *lse;
    uint32_t *scratch;
};

constexpr int64_t ROWS = 48;      // queries of a task
constexpr int64_t KEYS = 512;     // keys of a block
constexpr int64_t PANEL = 64;     // keys of a packed panel: four vectors
constexpr int64_t MOST_DIM = 256;
constexpr double LOG2_E = 1.4426950408889634;

extern "C" int64_t gemserve_reading_size() { return sizeof(Reading); }

// Bytes for packed keys and values.
extern "C" int64_t gemserve_reading_scratch(int64_t kv_heads, int64_t keys, int64_t dim) {
    const int64_t padded = (keys + PANEL - 1) / PANEL * PANEL;
    return 2 * kv_heads * padded * dim * 2 + 64;
}

#if defined(__AVX512BF16__) && defined(__AVX512F__) && defined(__AVX512BW__)

typedef uint32_t word __attribute__((aligned(2), may_alias));  // a pair of bfloat16

static inline __m512 pairs(__m512 sums, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(sums, (__m512bh)a, (__m512bh)b);
}

// 16 keys: `to` [dim / 2][16]. Keys from `count` on are 0.
static void pack_keys(const uint16_t *from, int64_t row, int64_t count, int64_t half, uint32_t *to) {
    for (int64_t d = 0; d < half; d++)
        for (int64_t j = 0; j < 16; j++)
            to[d * 16 + j] = j < count ? reinterpret_cast<const word *>(from + j * row)[d] : 0;
}

// Two values, the second of which may be missing: `to` [dim].
static void pack_values(const uint16_t *one, const uint16_t *two, int64_t dim, uint32_t *to) {
    for (int64_t i = 0; i < dim; i += 16) {
        const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(one + i)));
        __m512i both = low;
        if (two) {
            const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(two + i)));
            both = _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
        }
        _mm512_storeu_si512(to + i, both);
    }
}

// Scores of R queries with a panel of keys: `scores` [R, KEYS].
template <int R>
static void score(const uint16_t *query, int64_t row, const uint32_t *panel, int64_t half,
                  float *scores) {
    __m512 sums[R][4];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int b = 0; b < 4; b++) sums[r][b] = _mm512_setzero_ps();
    for (int64_t d = 0; d < half; d++) {
        __m512i keys[4];
#pragma GCC unroll 4
        for (int b = 0; b < 4; b++) keys[b] = _mm512_loadu_si512(panel + (b * half + d) * 16);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const __m512i given = _mm512_set1_epi32(reinterpret_cast<const word *>(query + r * row)[d]);
#pragma GCC unroll 4
            for (int b = 0; b < 4; b++) sums[r][b] = pairs(sums[r][b], given, keys[b]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int b = 0; b < 4; b++) _mm512_storeu_ps(scores + r * KEYS + b * 16, sums[r][b]);
}

// Adds to `sums` [R, dim], times `factors`, the values of `count` keys (even), weighted: V vectors of
// each. `weights`: [R, KEYS] in bfloat16. `values`: [count / 2][dim].
template <int R, int V>
static void weigh(const uint16_t *weights, const uint32_t *values, int64_t count, int64_t dim,
                  const float *factors, float *out) {
    __m512 sums[R][V];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++)
            sums[r][v] = _mm512_mul_ps(_mm512_loadu_ps(out + r * dim + v * 16), _mm512_set1_ps(factors[r]));
    for (int64_t t = 0; t < count / 2; t++) {
        __m512i some[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) some[v] = _mm512_loadu_si512(values + t * dim + v * 16);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const __m512i given = _mm512_set1_epi32(reinterpret_cast<const word *>(weights + r * KEYS)[t]);
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) sums[r][v] = pairs(sums[r][v], given, some[v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) _mm512_storeu_ps(out + r * dim + v * 16, sums[r][v]);
}

// What a task has of its queries.
struct Rows {
    alignas(64) float scores[ROWS * KEYS];
    alignas(64) uint16_t weights[ROWS * KEYS];
    alignas(64) float sums[ROWS * MOST_DIM];
    float most[ROWS], total[ROWS], factor[ROWS];
};

// 2^x to 3e-7 of its value; 0 for −infinity, as a power of −infinity is 0 whatever is multiplied.
static inline __m512 power_of_two(__m512 x) {
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 part = _mm512_sub_ps(x, whole);  // from −1/2 to 1/2
    __m512 sum = _mm512_set1_ps(1.32669704e-03f);
    sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(9.67545975e-03f));
    sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(5.55074262e-02f));
    sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(2.40221218e-01f));
    sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(6.93146949e-01f));
    sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(sum, whole);
}

// One row's weights of a block, of which it sees `count` keys: `padded` of them are written, `scale`
// is that of scores as powers of two.
static void soften(Rows &of, int64_t r, int64_t count, int64_t padded, float scale) {
    float *scores = of.scores + r * KEYS;
    uint16_t *weights = of.weights + r * KEYS;
    of.factor[r] = 1.0f;
    if (count <= 0) {
        std::fill(weights, weights + padded, uint16_t(0));
        return;
    }
    const int64_t groups = (padded + 63) / 64 * 64;
    std::fill(scores + count, scores + groups, -INFINITY);
    __m512 mosts[4], totals[4];
    for (int b = 0; b < 4; b++) mosts[b] = _mm512_load_ps(scores + b * 16);
    for (int64_t t = 64; t < groups; t += 64)
        for (int b = 0; b < 4; b++)
            mosts[b] = _mm512_max_ps(mosts[b], _mm512_load_ps(scores + t + b * 16));
    const __m512 largest = _mm512_max_ps(_mm512_max_ps(mosts[0], mosts[1]), _mm512_max_ps(mosts[2], mosts[3]));
    const float most = std::max(of.most[r], _mm512_reduce_max_ps(largest) * scale);
    const __m512 by = _mm512_set1_ps(scale), less = _mm512_set1_ps(most);
    for (int b = 0; b < 4; b++) totals[b] = _mm512_setzero_ps();
    for (int64_t t = 0; t < groups; t += 64)
        for (int b = 0; b < 4; b++) {
            const __m512 weight =
                power_of_two(_mm512_fmsub_ps(_mm512_load_ps(scores + t + b * 16), by, less));
            totals[b] = _mm512_add_ps(totals[b], weight);
            _mm256_store_si256((__m256i *)(weights + t + b * 16), (__m256i)_mm512_cvtneps_pbh(weight));
        }
    const __m512 total = _mm512_add_ps(_mm512_add_ps(totals[0], totals[1]), _mm512_add_ps(totals[2], totals[3]));
    of.factor[r] = std::exp2(of.most[r] - most);
    of.total[r] = of.total[r] * of.factor[r] + _mm512_reduce_add_ps(total);
    of.most[r] = most;
}

template <int R>
static void weigh_rows(Rows &of, int64_t r, const uint32_t *values, int64_t count, int64_t dim) {
    const uint16_t *weights = of.weights + r * KEYS;
    const float *factors = of.factor + r;
    float *out = of.sums + r * dim;
    int64_t i = 0;
    for (; i + 64 <= dim; i += 64) weigh<R, 4>(weights, values + i, count, dim, factors, out + i);
    for (; i < dim; i += 16) weigh<R, 1>(weights, values + i, count, dim, factors, out + i);
}

#define FOR_ROWS(rows, CALL)                        \
    switch (rows) {                                 \
        case 6: CALL(6); break;                     \
        case 5: CALL(5); break;                     \
        case 4: CALL(4); break;                     \
        case 3: CALL(3); break;                     \
        case 2: CALL(2); break;                     \
        default: CALL(1);                           \
    }

// Queries `first` … `first` + `rows` − 1 of a head.
static void attend(const Reading &all, int64_t head, int64_t first, int64_t rows,
                   const uint32_t *keys, const uint32_t *values, Rows &of) {
    const int64_t dim = all.dim, half = dim / 2;
    const uint16_t *query = all.query + head * all.query_head + first * all.query_row;
    std::fill(of.sums, of.sums + rows * dim, 0.0f);
    std::fill(of.most, of.most + rows, -INFINITY);
    std::fill(of.total, of.total + rows, 0.0f);
    const int64_t last = all.is_causal ? first + rows : all.keys;  // keys that any of them sees
    for (int64_t start = 0; start < last; start += KEYS) {
        const int64_t seen = std::min(last - start, KEYS);
        for (int64_t t = 0; t < seen; t += PANEL) {
            const uint32_t *panel = keys + (start + t) * half;
            for (int64_t r = 0, some; r < rows; r += some) {
                some = std::min<int64_t>(rows - r, 6);
                float *scores = of.scores + r * KEYS + t;
#define SCORE(R) score<R>(query + r * all.query_row, all.query_row, panel, half, scores)
                FOR_ROWS(some, SCORE)
            }
        }
        const int64_t padded = (seen + 15) / 16 * 16;
        for (int64_t r = 0; r < rows; r++) {
            const int64_t count = all.is_causal ? std::min(first + r + 1 - start, seen) : seen;
            soften(of, r, count, padded, float(all.scale * LOG2_E));
        }
        for (int64_t r = 0, some; r < rows; r += some) {
            some = std::min<int64_t>(rows - r, 6);
#define WEIGH(R) weigh_rows<R>(of, r, values + start / 2 * dim, padded, dim)
            FOR_ROWS(some, WEIGH)
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        const int64_t at = head * all.queries + first + r;
        const float part = 1.0f / of.total[r];
        for (int64_t i = 0; i < dim; i += 16) {
            const __m512 out = _mm512_mul_ps(_mm512_load_ps(of.sums + r * dim + i), _mm512_set1_ps(part));
            _mm256_storeu_si256((__m256i *)(all.out + at * dim + i), (__m256i)_mm512_cvtneps_pbh(out));
        }
        all.lse[at] = of.most[r] * float(1 / LOG2_E) + std::log(of.total[r]);
    }
}

extern "C" int64_t gemserve_reading_works() { return 1; }

// One key head's sixteen keys and values from `start` on.
static void pack(const Reading &all, int64_t head, int64_t start, uint32_t *keys, uint32_t *values) {
    const uint16_t *key = all.key + head * all.key_head + start * all.key_row;
    const uint16_t *value = all.value + head * all.value_head + start * all.value_row;
    const int64_t count = std::min<int64_t>(all.keys - start, 16);
    pack_keys(key, all.key_row, count, all.dim / 2, keys + start * (all.dim / 2));
    for (int64_t t = 0; t < 16; t += 2) {
        uint32_t *to = values + (start + t) / 2 * all.dim;
        if (t < count)
            pack_values(value + t * all.value_row,
                        t + 1 < count ? value + (t + 1) * all.value_row : nullptr, all.dim, to);
        else
            std::fill(to, to + all.dim, 0u);
    }
}

extern "C" const char *gemserve_reading(const Reading *call) try {
    const Reading &all = *call;
    const int64_t half = all.dim / 2, padded = (all.keys + PANEL - 1) / PANEL * PANEL;
    const int64_t words = padded * half;  // of the keys of a head, and of its values
    uint32_t *keys = (uint32_t *)(((uintptr_t)all.scratch + 63) / 64 * 64);
    uint32_t *values = keys + all.kv_heads * words;
    const int64_t sixteens = padded / 16, blocks = (all.queries + ROWS - 1) / ROWS;
    Team team;
#pragma omp parallel num_threads(int(all.threads))
    {
        std::unique_ptr<Rows> of;
        if (team.can([&] { of.reset(new Rows); })) {
#pragma omp for schedule(static)
            for (int64_t index = 0; index < all.kv_heads * sixteens; index++) {
                const int64_t head = index / sixteens, at = head * words;
                pack(all, head, index % sixteens * 16, keys + at, values + at);
            }
            // late queries of a causal call see more keys, so they go first
#pragma omp for schedule(dynamic)
            for (int64_t index = all.heads * blocks - 1; index >= 0; index--) {
                const int64_t head = index % all.heads, first = index / all.heads * ROWS;
                const int64_t kv_head = head / (all.heads / all.kv_heads);
                attend(all, head, first, std::min(all.queries - first, ROWS),
                       keys + kv_head * words, values + kv_head * words, *of);
            }
        }
    }
    team.rethrow();
    return nullptr;
} catch (...) {
    return reason();
}

#else
extern "C" int64_t gemserve_reading_works() { return 0; }
extern "C" const char *gemserve_reading(const Reading *) { return "not compiled"; }
#endif
