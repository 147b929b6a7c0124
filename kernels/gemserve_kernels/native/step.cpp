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
#include <map>
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
// Keys `low` … `high` − 1 of one row and key head. The last task of these also stores the newest key.
struct Task {
    int64_t row, kv_head, low, high;
    bool is_last;
};
// `first`: for each row and key head, where its tasks begin; at the end, how many there are.
struct Tasks {
    std::vector<Task> all;
    std::vector<int64_t> first;
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
        for (int64_t index = 0; index < m.layers; index++) list_tasks(m.layer[index].window);
#pragma omp parallel num_threads(s.threads)
        {
            std::vector<float> normed(s.rows * m.hidden), room(2 * s.rows * BLOCK);
            for (int64_t index = 0; index < m.layers; index++) {
                const Layer &layer = m.layer[index];
                norm_rows(layer.input_norm, normed);
                project(layer, normed.data(), room.data());
                attention(layer, index);
                put_all(layer.out, queries, mixed.data(), room.data(), s.hidden, m.hidden, true);
                norm_rows(layer.output_norm, normed);
                feed(layer, normed.data(), room.data());
            }
            norm_rows(m.norm, normed);
            put_all(m.head, m.hidden, normed.data(), room.data(), s.logits, m.head.outs, false);
        }
    }

  private:
    const Model &m;
    const Step &s;
    const int64_t queries, keys;
    std::vector<float> qkv, mixed, inner, parts;
    std::map<int64_t, Tasks> tasks_by_window;

    // Every thread does this for itself, which takes less time than to wait for the others.
    void norm_rows(const float *weight, std::vector<float> &normed) {
        for (int64_t r = 0; r < s.rows; r++)
            norm(s.hidden + r * m.hidden, weight, &normed[r * m.hidden], m.hidden, m.eps);
    }

    // The threads share the units of a matrix.
    void put_all(const Matrix &matrix, int64_t ins, const float *x, float *room, float *to,
                 int64_t step, bool is_added) {
        const int64_t size = unit_size(matrix.outs, s.threads), count = units(matrix.outs, size);
#pragma omp for schedule(static)
        for (int64_t u = 0; u < count; u++)
            put(s.rows, matrix, ins, u, size, x, room, to, step, is_added);
    }

    void project(const Layer &layer, const float *x, float *room) {
        const Matrix *matrices[] = {&layer.query, &layer.key, &layer.value};
        const int64_t step = queries + 2 * keys, size = unit_size(step, s.threads);
        const int64_t q = units(queries, size), k = units(keys, size), total = q + 2 * k;
#pragma omp for schedule(static)
        for (int64_t u = 0; u < total; u++) {
            const int which = u < q ? 0 : u < q + k ? 1 : 2;
            const int64_t unit = u - (which > 0 ? q : 0) - (which > 1 ? k : 0);
            const int64_t start = (which > 0 ? queries : 0) + (which > 1 ? keys : 0);
            put(s.rows, *matrices[which], m.hidden, unit, size, x, room, &qkv[start], step, false);
        }
    }

    void feed(const Layer &layer, const float *x, float *room) {
        const int64_t size = unit_size(m.inner, s.threads), count = units(m.inner, size);
        float *other = room + s.rows * BLOCK;
#pragma omp for schedule(static)
        for (int64_t u = 0; u < count; u++) {
            const int64_t first = u * size, some = std::min(size, m.inner - first);
            product(s.rows, layer.gate, m.hidden, first, size, x, room);
            product(s.rows, layer.up, m.hidden, first, size, x, other);
            for (int64_t r = 0; r < s.rows; r++)
                for (int64_t o = 0; o < some; o += LANES) {
                    const int64_t at = r * BLOCK + o;
                    const vec gate = load(room + at), up = load(other + at);
                    store(&inner[r * m.inner + first + o], gate / (1.0f + exponential(-gate)) * up);
                }
        }
        put_all(layer.down, m.inner, inner.data(), room, s.hidden, m.hidden, true);
    }

    void list_tasks(int64_t window) {
        if (tasks_by_window.count(window)) return;
        Tasks &listed = tasks_by_window[window];
        for (int64_t row = 0; row < s.rows; row++)
            for (int64_t h = 0; h < m.kv_heads; h++) {
                const int64_t length = s.table[5 * row + 4];
                int64_t low = window ? std::max<int64_t>(0, length - window) : 0;
                listed.first.push_back(int64_t(listed.all.size()));
                for (; low < length; low += SPLIT) {
                    const int64_t high = std::min(length, low + SPLIT);
                    listed.all.push_back({row, h, low, high, high == length});
                }
            }
        listed.first.push_back(int64_t(listed.all.size()));
        const size_t room = listed.all.size() * (m.heads / m.kv_heads) * (m.head_dim + 2);
        parts.resize(std::max(parts.size(), room));
    }

    void attention(const Layer &layer, int64_t index) {
        const int64_t group = m.heads / m.kv_heads, size = group * (m.head_dim + 2);
        const Tasks &tasks = tasks_by_window.find(layer.window)->second;
        const int64_t count = int64_t(tasks.all.size());
#pragma omp for schedule(dynamic)
        for (int64_t t = 0; t < count; t++)
            attend_task(layer, index, tasks.all[t], &parts[t * size]);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < s.rows * m.kv_heads; i++)
            for (int64_t g = 0; g < group; g++)
                merge(i, g, size, tasks.first[i], tasks.first[i + 1]);
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
    void merge(int64_t i, int64_t g, int64_t size, int64_t low, int64_t high) {
        const int64_t dim = m.head_dim, group = m.heads / m.kv_heads;
        const int64_t row = i / m.kv_heads, h = i % m.kv_heads;
        float *out = &mixed[row * queries + (h * group + g) * dim];
        float most = -INFINITY, total = 0;
        for (int64_t t = low; t < high; t++)
            most = std::max(most, parts[t * size + g * (dim + 2) + dim]);
        std::fill(out, out + dim, 0.0f);
        for (int64_t t = low; t < high; t++) {
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
