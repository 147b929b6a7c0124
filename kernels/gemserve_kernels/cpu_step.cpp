// One decode step of a Llama-like model on a CPU: all layers of all sequences in one call.
//
// A step of a small model spends much of its time between torch's operations, and torch's products
// of few rows reach half of what the processor can do. Here one parallel region runs the whole
// step, and every product reads each weight once. A row's sums are formed in the same order
// whatever the number of rows, so a sequence's logits do not depend on its batch.
//
// `cpu_step.py` compiles this file, fills the structures below and checks their sizes.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include <omp.h>

#if defined(__AVX512F__)
constexpr int LANES = 16, MOST_ROWS = 6;
#elif defined(__AVX2__)
constexpr int LANES = 8, MOST_ROWS = 2;
#else
constexpr int LANES = 4, MOST_ROWS = 4;
#endif
constexpr int OUTS = 4;           // outputs of a plain matrix that are computed together
constexpr int PACKED_OUTS = 64;   // outputs of a block of a packed matrix
constexpr int64_t SPLIT = 512;    // keys that one task attends to
constexpr int MOST_HEADS = 16;    // query heads of a key head

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t hvec __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

// All fields have 8 bytes. `is_packed`: bfloat16 in blocks [outs / 64][ins / 2][64][2]; otherwise
// float32 [outs, ins].
struct Matrix {
    const void *data;
    const float *bias;
    int64_t outs, is_packed;
};
struct Layer {
    const float *input_norm, *query_norm, *key_norm, *output_norm;
    int64_t window;  // 0: none
    Matrix query, key, value, out, gate, up, down;
};
struct Model {
    int64_t layers, hidden, inner, heads, kv_heads, head_dim, is_half;
    double eps, scale;
    const Layer *layer;
    const float *norm;
    Matrix head;
};
// `table`: as in `KVTable`. `hidden`: [rows, hidden], overwritten. `cos`, `sin`: [rows, head_dim].
struct Step {
    int64_t rows, threads;
    const int64_t *table;
    void *memory;
    float *hidden;
    const float *cos, *sin;
    float *logits;
};
struct Task {
    int64_t row, kv_head, low, high;
    bool is_last;
};

static inline vec load(const float *from) { return *reinterpret_cast<const vec *>(from); }
static inline uvec load(const uint32_t *from) { return *reinterpret_cast<const uvec *>(from); }
static inline hvec load(const uint16_t *from) { return *reinterpret_cast<const hvec *>(from); }
static inline void store(float *to, vec value) { *reinterpret_cast<vec *>(to) = value; }
static inline vec all(float value) { return value - vec{}; }

typedef float quad __attribute__((vector_size(16), aligned(4), may_alias));

// Four numbers with the same total as all lanes.
static inline quad fold(vec value) {
#if defined(__AVX512F__)
    const auto half = __builtin_shufflevector(value, value, 0, 1, 2, 3, 4, 5, 6, 7) +
                      __builtin_shufflevector(value, value, 8, 9, 10, 11, 12, 13, 14, 15);
    return __builtin_shufflevector(half, half, 0, 1, 2, 3) +
           __builtin_shufflevector(half, half, 4, 5, 6, 7);
#elif defined(__AVX2__)
    return __builtin_shufflevector(value, value, 0, 1, 2, 3) +
           __builtin_shufflevector(value, value, 4, 5, 6, 7);
#else
    return value;
#endif
}

static inline float sum(vec value) {
    const quad four = fold(value);
    return (four[0] + four[2]) + (four[1] + four[3]);
}

// The sums of four vectors.
static inline quad sums_of(vec a, vec b, vec c, vec d) {
    const quad p = fold(a), q = fold(b), r = fold(c), s = fold(d);
    const quad pq = __builtin_shufflevector(p, q, 0, 4, 1, 5) +
                    __builtin_shufflevector(p, q, 2, 6, 3, 7);
    const quad rs = __builtin_shufflevector(r, s, 0, 4, 1, 5) +
                    __builtin_shufflevector(r, s, 2, 6, 3, 7);
    return __builtin_shufflevector(pq, rs, 0, 1, 4, 5) + __builtin_shufflevector(pq, rs, 2, 3, 6, 7);
}

// e^x to 1e-7 of its value; 0 below −87.
static inline vec exponential(vec x) {
    const vec least = all(-87.0f), most = all(88.0f);
    const ivec is_tiny = x < least;
    x = x > most ? most : (x < least ? least : x);
    const vec magic = all(12582912.0f);  // 1.5 · 2^23: adding it rounds to an integer
    const vec shifted = x * 1.44269504f + magic;
    const vec count = shifted - magic;
    vec rest = x - count * 0.693359375f;
    rest = rest + count * 2.12194440e-4f;
    vec sum = all(1.98756915e-4f);
    sum = sum * rest + 1.39819995e-3f;
    sum = sum * rest + 8.33345205e-3f;
    sum = sum * rest + 4.16657962e-2f;
    sum = sum * rest + 1.66666657e-1f;
    sum = sum * rest + 0.5f;
    sum = sum * rest * rest + rest + 1.0f;
    const ivec power = ((ivec)shifted - (ivec)magic + 127) << 23;
    const vec result = sum * (vec)power;
    return is_tiny ? vec{} : result;
}

static inline vec load_kv(const float *from) { return load(from); }
static inline vec load_kv(const uint16_t *from) {
    return (vec)(__builtin_convertvector(load(from), uvec) << 16);
}
static inline void store_kv(float *to, float value) { *to = value; }
static inline void store_kv(uint16_t *to, float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    *to = value != value ? 0x7fc0 : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static void norm(const float *x, const float *weight, float *out, int64_t size, double eps) {
    vec squares = {};
    for (int64_t i = 0; i < size; i += LANES) squares += load(x + i) * load(x + i);
    const float factor = 1.0f / std::sqrt(sum(squares) / float(size) + float(eps));
    for (int64_t i = 0; i < size; i += LANES)
        store(out + i, load(weight + i) * (load(x + i) * factor));
}

// A pass over a block: it fetches the `pass`-th of `passes` parts of the next block into the cache.
struct Pass {
    int64_t pass, passes;
};

// R rows times a block of a plain matrix: `out` [R, PACKED_OUTS] has `count` columns of results.
template <int R, int O>
static void plain_block(const float *w, int64_t ins, const float *x, float *out, bool fetches) {
    vec sums[R][O] = {};
    for (int64_t k = 0; k < ins; k += LANES) {
        if (fetches) {
#pragma GCC unroll 8
            for (int o = 0; o < O; o++) __builtin_prefetch(w + (PACKED_OUTS + o) * ins + k, 0, 2);
        }
        vec weights[O];
#pragma GCC unroll 8
        for (int o = 0; o < O; o++) weights[o] = load(w + o * ins + k);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const vec given = load(x + r * ins + k);
#pragma GCC unroll 8
            for (int o = 0; o < O; o++) sums[r][o] += given * weights[o];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        float *to = out + r * PACKED_OUTS;
        if constexpr (O == 4)
            *reinterpret_cast<quad *>(to) =
                sums_of(sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
        else
            *to = sum(sums[r][0]);
    }
}

template <int R> static void plain(const Matrix &m, int64_t ins, int64_t first, int64_t count,
                                   const float *x, float *out, Pass p) {
    const float *w = static_cast<const float *>(m.data) + first * ins;
    int64_t o = 0;
    for (; o + OUTS <= count; o += OUTS) plain_block<R, OUTS>(w + o * ins, ins, x, out + o, o / OUTS % p.passes == p.pass);
    for (; o < count; o++) plain_block<R, 1>(w + o * ins, ins, x, out + o, false);
}

template <int R> static void packed(const Matrix &m, int64_t ins, int64_t first, const float *x,
                                    float *out, Pass p) {
    constexpr int VECS = PACKED_OUTS / LANES;
    const uint32_t *w = static_cast<const uint32_t *>(m.data) + first * ins / 2;
    vec sums[R][VECS] = {};
    int64_t turn = p.pass;
    for (int64_t k = 0; k < ins; k += 2, w += PACKED_OUTS) {
        if (turn-- == 0) {
#pragma GCC unroll 8
            for (int v = 0; v < VECS; v++)
                __builtin_prefetch(w + PACKED_OUTS * ins / 2 + v * LANES, 0, 2);
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
        for (int v = 0; v < VECS; v++) store(out + r * PACKED_OUTS + v * LANES, sums[r][v]);
}

template <int R> static void some_rows(int64_t rows, const Matrix &m, int64_t ins, int64_t first,
                                       int64_t count, const float *x, float *out, Pass p) {
    if (rows == R) {
        m.is_packed ? packed<R>(m, ins, first, x, out, p)
                    : plain<R>(m, ins, first, count, x, out, p);
    } else if constexpr (R > 1) {
        some_rows<R - 1>(rows, m, ins, first, count, x, out, p);
    }
}

// Products of all rows with outputs `first`… of a matrix: `out` [rows, PACKED_OUTS].
static void product(int64_t rows, const Matrix &m, int64_t ins, int64_t first, const float *x,
                    float *out) {
    const int64_t count = std::min<int64_t>(PACKED_OUTS, m.outs - first);
    const int64_t passes = (rows + MOST_ROWS - 1) / MOST_ROWS;
    for (int64_t pass = 0, row = 0; pass < passes; pass++) {
        const int64_t some = (rows - row + passes - pass - 1) / (passes - pass);
        some_rows<MOST_ROWS>(some, m, ins, first, count, x + row * ins, out + row * PACKED_OUTS,
                             {pass, passes});
        row += some;
    }
    if (m.bias)
        for (int64_t r = 0; r < rows; r++)
            for (int64_t o = 0; o < count; o++) out[r * PACKED_OUTS + o] += m.bias[first + o];
}

static int64_t blocks(const Matrix &m) { return (m.outs + PACKED_OUTS - 1) / PACKED_OUTS; }

// The outputs of `m` in block `block` for all rows, put at `to` [rows, step] or added to it.
static void put(int64_t rows, const Matrix &m, int64_t ins, int64_t block, const float *x,
                float *room, float *to, int64_t step, bool is_added) {
    const int64_t first = block * PACKED_OUTS;
    const int64_t count = std::min<int64_t>(PACKED_OUTS, m.outs - first);
    product(rows, m, ins, first, x, room);
    for (int64_t r = 0; r < rows; r++) {
        float *target = to + r * step + first;
        const float *from = room + r * PACKED_OUTS;
        for (int64_t o = 0; o < count; o++) target[o] = is_added ? target[o] + from[o] : from[o];
    }
}

static void rotate(const float *x, const float *cos, const float *sin, float *out, int64_t dim) {
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i++) {
        const float a = x[i], b = x[half + i];
        out[i] = a * cos[i] - b * sin[i];
        out[half + i] = b * cos[half + i] + a * sin[half + i];
    }
}

// Attention of one row's query heads that share a key head, to keys `low` … `high` − 1.
// `out`: [heads, head_dim + 2], where the last two are the largest score and the sum.
template <typename T>
static void attend(const Model &m, const float *query, const T *keys, const T *values,
                   int64_t count, float *out) {
    const int64_t dim = m.head_dim, group = m.heads / m.kv_heads;
    alignas(64) float scores[MOST_HEADS][SPLIT + LANES];
    int64_t t = 0;
    for (; t + 4 <= count; t += 4)
        for (int64_t g = 0; g < group; g++) {
            vec sums[4] = {};
            for (int64_t i = 0; i < dim; i += LANES) {
                const vec given = load(query + g * dim + i);
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++) sums[j] += given * load_kv(keys + (t + j) * dim + i);
            }
            *reinterpret_cast<quad *>(&scores[g][t]) =
                sums_of(sums[0], sums[1], sums[2], sums[3]) * float(m.scale);
        }
    for (; t < count; t++)
        for (int64_t g = 0; g < group; g++) {
            vec sums = {};
            for (int64_t i = 0; i < dim; i += LANES)
                sums += load(query + g * dim + i) * load_kv(keys + t * dim + i);
            scores[g][t] = sum(sums) * float(m.scale);
        }
    for (int64_t g = 0; g < group; g++) {
        float most = -INFINITY, total = 0;
        for (int64_t t = 0; t < count; t++) most = scores[g][t] > most ? scores[g][t] : most;
        for (int64_t t = count; t < count + LANES; t++) scores[g][t] = -INFINITY;
        vec sums = {};
        for (int64_t t = 0; t < count; t += LANES) {
            const vec weight = exponential(load(&scores[g][t]) - most);
            store(&scores[g][t], weight);
            sums += weight;
        }
        total = sum(sums);
        out[g * (dim + 2) + dim] = most;
        out[g * (dim + 2) + dim + 1] = total;
    }
    for (int64_t i = 0; i < dim; i += LANES) {
        vec sums[MOST_HEADS] = {};
        for (int64_t t = 0; t < count; t++) {
            const vec value = load_kv(values + t * dim + i);
            for (int64_t g = 0; g < group; g++) sums[g] += value * scores[g][t];
        }
        for (int64_t g = 0; g < group; g++) store(out + g * (dim + 2) + i, sums[g]);
    }
}

template <typename T> class Runner {
  public:
    Runner(const Model &m, const Step &s)
        : m(m), s(s), queries(m.heads * m.head_dim), keys(m.kv_heads * m.head_dim),
          qkv(s.rows * (queries + 2 * keys)), mixed(s.rows * queries), inner(s.rows * m.inner) {}

    void run() {
#pragma omp parallel num_threads(s.threads)
        {
            std::vector<float> normed(s.rows * m.hidden), room(2 * s.rows * PACKED_OUTS);
            for (int64_t index = 0; index < m.layers; index++) {
                const Layer &layer = m.layer[index];
                norm_rows(layer.input_norm, normed);
                project(layer, normed.data(), room.data());
                attention(layer, index);
                const int64_t outs = blocks(layer.out);
#pragma omp for schedule(static)
                for (int64_t b = 0; b < outs; b++)
                    put(s.rows, layer.out, queries, b, mixed.data(), room.data(), s.hidden,
                        m.hidden, true);
                norm_rows(layer.output_norm, normed);
                feed(layer, normed.data(), room.data());
            }
            norm_rows(m.norm, normed);
            const int64_t outs = blocks(m.head);
#pragma omp for schedule(static)
            for (int64_t b = 0; b < outs; b++)
                put(s.rows, m.head, m.hidden, b, normed.data(), room.data(), s.logits,
                    m.head.outs, false);
        }
    }

  private:
    const Model &m;
    const Step &s;
    const int64_t queries, keys;
    std::vector<float> qkv, mixed, inner, parts;
    std::vector<Task> tasks;
    std::vector<int64_t> first_task;

    // Every thread does this for itself, which takes less time than to wait for the others.
    void norm_rows(const float *weight, std::vector<float> &normed) {
        for (int64_t r = 0; r < s.rows; r++)
            norm(s.hidden + r * m.hidden, weight, &normed[r * m.hidden], m.hidden, m.eps);
    }

    void project(const Layer &layer, const float *x, float *room) {
        const Matrix *matrices[] = {&layer.query, &layer.key, &layer.value};
        const int64_t q = blocks(layer.query), k = blocks(layer.key);
        const int64_t step = queries + 2 * keys, total = q + k + blocks(layer.value);
#pragma omp for schedule(static)
        for (int64_t b = 0; b < total; b++) {
            const int which = b < q ? 0 : b < q + k ? 1 : 2;
            const int64_t block = b - (which > 0 ? q : 0) - (which > 1 ? k : 0);
            const int64_t start = (which > 0 ? queries : 0) + (which > 1 ? keys : 0);
            put(s.rows, *matrices[which], m.hidden, block, x, room, &qkv[start], step, false);
        }
    }

    void feed(const Layer &layer, const float *x, float *room) {
        const int64_t count = blocks(layer.gate), outs = blocks(layer.down);
        float *other = room + s.rows * PACKED_OUTS;
#pragma omp for schedule(static)
        for (int64_t b = 0; b < count; b++) {
            const int64_t first = b * PACKED_OUTS;
            const int64_t some = std::min<int64_t>(PACKED_OUTS, m.inner - first);
            product(s.rows, layer.gate, m.hidden, first, x, room);
            product(s.rows, layer.up, m.hidden, first, x, other);
            for (int64_t r = 0; r < s.rows; r++)
                for (int64_t o = 0; o < some; o += LANES) {
                    const int64_t at = r * PACKED_OUTS + o;
                    const vec gate = load(room + at), up = load(other + at);
                    store(&inner[r * m.inner + first + o], gate / (1.0f + exponential(-gate)) * up);
                }
        }
#pragma omp for schedule(static)
        for (int64_t b = 0; b < outs; b++)
            put(s.rows, layer.down, m.inner, b, inner.data(), room, s.hidden, m.hidden, true);
    }

    void list_tasks(const Layer &layer) {
        tasks.clear();
        first_task.clear();
        for (int64_t row = 0; row < s.rows; row++)
            for (int64_t h = 0; h < m.kv_heads; h++) {
                const int64_t length = s.table[5 * row + 4];
                int64_t low = layer.window ? std::max<int64_t>(0, length - layer.window) : 0;
                first_task.push_back(int64_t(tasks.size()));
                for (; low < length; low += SPLIT) {
                    const int64_t high = std::min(length, low + SPLIT);
                    tasks.push_back({row, h, low, high, high == length});
                }
            }
        first_task.push_back(int64_t(tasks.size()));
        parts.resize(tasks.size() * (m.heads / m.kv_heads) * (m.head_dim + 2));
    }

    void attention(const Layer &layer, int64_t index) {
        const int64_t group = m.heads / m.kv_heads, size = group * (m.head_dim + 2);
#pragma omp single
        list_tasks(layer);
#pragma omp for schedule(dynamic)
        for (int64_t t = 0; t < int64_t(tasks.size()); t++)
            attend_task(layer, index, tasks[t], &parts[t * size]);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < s.rows * m.kv_heads; i++)
            for (int64_t g = 0; g < group; g++) merge(i, g, size);
    }

    void attend_task(const Layer &layer, int64_t index, const Task &task, float *out) {
        const int64_t dim = m.head_dim, group = m.heads / m.kv_heads, h = task.kv_head;
        const int64_t *place = s.table + 5 * task.row;
        const float *cos = s.cos + task.row * dim, *sin = s.sin + task.row * dim;
        const float *given = &qkv[task.row * (queries + 2 * keys)];
        T *key = static_cast<T *>(s.memory) + (place[0] + index * place[3] + h * place[1]) * dim;
        T *value = key + place[2] * dim;
        std::vector<float> query(group * dim), turned(dim);
        for (int64_t g = 0; g < group; g++)
            turn(given + (h * group + g) * dim, layer.query_norm, cos, sin, &query[g * dim]);
        if (task.is_last) {
            turn(given + queries + h * dim, layer.key_norm, cos, sin, turned.data());
            const float *newest = given + queries + keys + h * dim;
            const int64_t at = (task.high - 1) * dim;
            for (int64_t i = 0; i < dim; i++) store_kv(key + at + i, turned[i]);
            for (int64_t i = 0; i < dim; i++) store_kv(value + at + i, newest[i]);
        }
        attend<T>(m, query.data(), key + task.low * dim, value + task.low * dim,
                  task.high - task.low, out);
    }

    void turn(const float *x, const float *weight, const float *cos, const float *sin, float *out) {
        if (!weight) return rotate(x, cos, sin, out, m.head_dim);
        std::vector<float> normed(m.head_dim);
        norm(x, weight, normed.data(), m.head_dim, m.eps);
        rotate(normed.data(), cos, sin, out, m.head_dim);
    }

    // Join what the tasks of row and key head `i` have found for query head `g` of its group.
    void merge(int64_t i, int64_t g, int64_t size) {
        const int64_t dim = m.head_dim, group = m.heads / m.kv_heads;
        const int64_t row = i / m.kv_heads, h = i % m.kv_heads;
        float *out = &mixed[row * queries + (h * group + g) * dim];
        float most = -INFINITY, total = 0;
        for (int64_t t = first_task[i]; t < first_task[i + 1]; t++)
            most = std::max(most, parts[t * size + g * (dim + 2) + dim]);
        std::fill(out, out + dim, 0.0f);
        for (int64_t t = first_task[i]; t < first_task[i + 1]; t++) {
            const float *part = &parts[t * size + g * (dim + 2)];
            const float factor = std::exp(part[dim] - most);
            total += factor * part[dim + 1];
            for (int64_t d = 0; d < dim; d++) out[d] += factor * part[d];
        }
        for (int64_t d = 0; d < dim; d++) out[d] /= total;
    }
};

extern "C" int64_t gemserve_sizes(int64_t *lanes) {
    *lanes = LANES;
    return sizeof(Model) + sizeof(Layer) + sizeof(Step);
}

extern "C" void gemserve_step(const Model *model, const Step *step) {
    if (model->is_half)
        Runner<uint16_t>(*model, *step).run();
    else
        Runner<float>(*model, *step).run();
}
