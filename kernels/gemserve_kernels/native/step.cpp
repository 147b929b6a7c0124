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
#include <vector>

#include <omp.h>

#include "attention.h"
#include "products.h"
#include "vectors.h"

// All fields have 8 bytes.
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

static void norm(const float *x, const float *weight, float *out, int64_t size, double eps) {
    vec squares = {};
    for (int64_t i = 0; i < size; i += LANES) squares += load(x + i) * load(x + i);
    const float factor = 1.0f / std::sqrt(sum(squares) / float(size) + float(eps));
    for (int64_t i = 0; i < size; i += LANES)
        store(out + i, load(weight + i) * (load(x + i) * factor));
}

static void rotate(const float *x, const float *cos, const float *sin, float *out, int64_t dim) {
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i++) {
        const float a = x[i], b = x[half + i];
        out[i] = a * cos[i] - b * sin[i];
        out[half + i] = b * cos[half + i] + a * sin[half + i];
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
            std::vector<float> normed(s.rows * m.hidden), room(2 * s.rows * BLOCK);
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
        float *other = room + s.rows * BLOCK;
#pragma omp for schedule(static)
        for (int64_t b = 0; b < count; b++) {
            const int64_t first = b * BLOCK;
            const int64_t some = std::min<int64_t>(BLOCK, m.inner - first);
            product(s.rows, layer.gate, m.hidden, first, x, room);
            product(s.rows, layer.up, m.hidden, first, x, other);
            for (int64_t r = 0; r < s.rows; r++)
                for (int64_t o = 0; o < some; o += LANES) {
                    const int64_t at = r * BLOCK + o;
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
        attend_all(group, query.data(), key + task.low * dim, value + task.low * dim,
                   task.high - task.low, dim, float(m.scale), out);
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
