// One decode step of a model on a CPU: all layers of all sequences in one call.
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

#include "adapters.h"
#include "attention.h"
#include "experts.h"
#include "failures.h"
#include "products.h"
#include "vectors.h"

// All fields have 8 bytes. What a model does not have is null or 0.
struct Layer {
    const float *input_norm;
    const float *query_norm, *key_norm;    // of each head
    const float *queries_norm, *keys_norm;  // of all heads together
    const float *attended_norm;            // of what attention adds
    const float *output_norm;              // of what the rest of the layer takes
    const float *fed_norm;                 // of what it adds
    const float *sinks;                    // [heads]
    int64_t window;                        // 0: none
    int64_t place;                         // in the table of layers with a window, or without
    int64_t rope;                          // which of the rotations; −1: none
    const Experts *experts;                // in place of gate, up and down
    Matrix of[SLOTS];
};
struct Model {
    int64_t layers, hidden, inner, heads, kv_heads, head_dim, rotated, is_half, activation;
    double eps, scale, softcap, residual;  // `residual`: times what a layer adds to the rows
    const Layer *layer;
    const float *norm;
    Matrix head;
};
// `table`: as in `KVTable`; `window_table`: that of the layers with a window. `hidden`: [rows,
// hidden], overwritten. `cos`, `sin`: [rotations, rows, rotated]. `terms`: of each row; null if it
// has no adapter.
struct Step {
    int64_t rows, threads;
    const int64_t *table, *window_table;
    void *memory;
    float *hidden;
    const float *cos, *sin;
    float *logits;
    const Terms *const *terms;
};
// A thread's memory, which is taken before the first layer. `outs`: [2, rows, BLOCK] of a unit.
// `bytes`: a product's rows. `query`: [group, head_dim]. `head`, `term`: [head_dim].
struct Room {
    std::vector<float> normed, outs, query, head, term;
    ByteRows bytes;
    NtkRoom ntk;
};
constexpr int64_t NOWHERE = -1;  // in place of a layer: a matrix to which no adapter adds anything
// Keys `low` … `high` − 1 of one row and key head, or of its adapter's prefix.
struct Task {
    int64_t row, kv_head, low, high;
    bool is_prefix;
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
          qkv(s.rows * (queries + 2 * keys)), mixed(s.rows * queries), inner(s.rows * m.inner),
          branch(s.rows * m.hidden) {
        for (int64_t index = 0; index < m.layers; index++) {
            list_tasks(m.layer[index].window);
            if (const Experts *experts = m.layer[index].experts) make_room(*experts);
            for (const Matrix &matrix : m.layer[index].of) look_at(matrix);
        }
        look_at(m.head);
        for (int64_t row = 0; row < s.rows; row++) look_at(s.terms[row]);
        reduced.resize(SLOTS * s.rows * most_rank);
    }

    void run() {
        Team team;
#pragma omp parallel num_threads(s.threads)
        {
            Room room;
            if (team.can([&] { make_room(room); })) compute(room);
        }
        team.rethrow();
    }

  private:
    const Model &m;
    const Step &s;
    const int64_t queries, keys;
    std::vector<float> qkv, mixed, inner, branch, parts;
    std::map<int64_t, Tasks> tasks_by_window;
    bool has_shifts = false;
    int64_t most_rank = 0, most_ins = 0, most_features = 0, most_ntk_rank = 0;
    std::vector<float> reduced;  // [slots, rows, most_rank], of one layer
    Routing routing;
    std::vector<float> routed, gathered, expert_inner, expert_out;

    // All steps of one thread, which take no memory.
    void compute(Room &room) {
        std::vector<float> &normed = room.normed;
        for (int64_t index = 0; index < m.layers; index++) {
            const Layer &layer = m.layer[index];
            if (has_shifts) shift_rows(index);
            norm_rows(layer.input_norm, normed);
            project(layer, index, normed.data(), room);
            attention(layer, index, room);
            if (most_rank) reduce_rows(index, OUT, OUT, mixed.data(), queries);
            add(index, OUT, queries, mixed.data(), room, layer.attended_norm);
            norm_rows(layer.output_norm, normed);
            if (layer.experts)
                feed_experts(layer, normed.data(), room);
            else
                feed(layer, index, normed.data(), room);
        }
        norm_rows(m.norm, normed);
        if (most_rank) reduce_rows(m.layers, QUERY, QUERY, normed.data(), m.hidden);
        put_all(m.head, m.layers, QUERY, m.hidden, normed.data(), room, s.logits, false);
    }

    void make_room(Room &room) const {
        room.normed.resize(s.rows * m.hidden);
        room.outs.resize(2 * s.rows * BLOCK);
        room.query.resize(m.heads / m.kv_heads * m.head_dim);
        room.head.resize(m.head_dim), room.term.resize(m.head_dim);
        room.bytes.make_room(s.rows, most_ins);
        room.ntk.phi.resize(most_features), room.ntk.low.resize(most_ntk_rank);
    }

    void make_room(const Experts &e) {
        routing.make_room(e, s.rows);
        const size_t pairs = s.rows * e.chosen;
        routed.resize(std::max(routed.size(), size_t(s.rows * e.count)));
        gathered.resize(std::max(gathered.size(), pairs * m.hidden));
        expert_out.resize(gathered.size());
        expert_inner.resize(std::max(expert_inner.size(), pairs * e.inner));
        look_at(e.gate_up), look_at(e.down);
    }

    void look_at(const Matrix &matrix) {
        if (matrix.layout == IN_BLOCKS)
            most_ins = std::max(most_ins, static_cast<const BlockMatrix *>(matrix.data)->ins);
    }

    void look_at(const Terms *terms) {
        if (!terms) return;
        most_features = std::max(most_features, terms->features);
        most_ntk_rank = std::max(most_ntk_rank, terms->rank);
        most_rank = std::max(most_rank, terms->head.rank);
        for (int64_t index = 0; terms->layer && index < m.layers; index++) {
            has_shifts |= terms->layer[index].shift != nullptr;
            for (const LowRank &added : terms->layer[index].added)
                most_rank = std::max(most_rank, added.rank);
        }
    }

    // Every thread does this for itself, which takes less time than to wait for the others.
    void norm_rows(const float *weight, std::vector<float> &normed) {
        if (!weight) {
            std::copy(s.hidden, s.hidden + s.rows * m.hidden, normed.begin());
            return;
        }
        for (int64_t r = 0; r < s.rows; r++)
            norm(s.hidden + r * m.hidden, weight, &normed[r * m.hidden], m.hidden, m.eps);
    }

    void shift_rows(int64_t index) {
#pragma omp for schedule(static)
        for (int64_t r = 0; r < s.rows; r++) {
            const LayerTerms *layer = s.terms[r] ? s.terms[r]->layer : nullptr;
            if (!layer || !layer[index].shift) continue;
            float *row = s.hidden + r * m.hidden;
            for (int64_t i = 0; i < m.hidden; i++) row[i] += layer[index].shift[i];
        }
    }

    // What a row's adapter adds to a matrix, or null. The head is the first slot behind all layers.
    const LowRank *added(int64_t row, int64_t index, int64_t slot) const {
        const Terms *terms = s.terms[row];
        if (!terms || index == NOWHERE) return nullptr;
        if (index < m.layers && !terms->layer) return nullptr;
        const LowRank &term = index == m.layers ? terms->head : terms->layer[index].added[slot];
        return term.rank ? &term : nullptr;
    }

    // The first half of all products of low rank for the slots `low` … `high`.
    void reduce_rows(int64_t index, int64_t low, int64_t high, const float *x, int64_t ins) {
#pragma omp for schedule(static)
        for (int64_t i = low * s.rows; i < (high + 1) * s.rows; i++) {
            const int64_t row = i % s.rows;
            if (const LowRank *term = added(row, index, i / s.rows))
                reduce<T>(*term, ins, x + row * ins, &reduced[i * most_rank]);
        }
    }

    // Products of all rows with outputs `first` … of a matrix: `out` [rows, BLOCK].
    void multiply(const Matrix &matrix, int64_t index, int64_t slot, int64_t first, int64_t size,
                  const Given &x, float *out) {
        product(x, matrix, first, size, out);
        if (!most_rank) return;
        const int64_t count = std::min(size, matrix.outs - first);
        for (int64_t row = 0; row < s.rows; row++)
            if (const LowRank *term = added(row, index, slot))
                widen<T>(*term, matrix.outs, first, count,
                         &reduced[(slot * s.rows + row) * most_rank], out + row * BLOCK);
    }

    // The same for the outputs of a unit, put at `to` [rows, step] or added to it.
    void put(const Matrix &matrix, int64_t index, int64_t slot, int64_t unit, int64_t size,
             const Given &x, Room &room, float *to, int64_t step, bool is_added) {
        const int64_t first = unit * size, count = std::min(size, matrix.outs - first);
        multiply(matrix, index, slot, first, size, x, room.outs.data());
        for (int64_t r = 0; r < s.rows; r++) {
            float *target = to + r * step + first;
            const float *from = &room.outs[r * BLOCK];
            for (int64_t o = 0; o < count; o++)
                target[o] = is_added ? target[o] + float(m.residual) * from[o] : from[o];
        }
    }

    // The threads share the units of a matrix, whose outputs are all that a row of `to` has.
    void put_all(const Matrix &matrix, int64_t index, int64_t slot, int64_t ins, const float *x,
                 Room &room, float *to, bool is_added) {
        const int64_t size = unit_size(matrix.outs, s.threads), count = units(matrix.outs, size);
        const Given given(x, s.rows, ins, &room.bytes);
#pragma omp for schedule(static)
        for (int64_t u = 0; u < count; u++)
            put(matrix, index, slot, u, size, given, room, to, matrix.outs, is_added);
    }

    // Adds what a matrix of a layer makes of `x` to the rows.
    void add(int64_t index, Slot slot, int64_t ins, const float *x, Room &room,
             const float *weight) {
        const Matrix &matrix = m.layer[index].of[slot];
        put_all(matrix, index, slot, ins, x, room, weight ? branch.data() : s.hidden, !weight);
        if (weight) add_branch(weight);
    }

    void add_branch(const float *weight) {
#pragma omp for schedule(static)
        for (int64_t r = 0; r < s.rows; r++) {
            float *from = &branch[r * m.hidden], *to = s.hidden + r * m.hidden;
            if (weight) norm(from, weight, from, m.hidden, m.eps);
            for (int64_t i = 0; i < m.hidden; i++) to[i] += float(m.residual) * from[i];
        }
    }

    void project(const Layer &layer, int64_t index, const float *x, Room &room) {
        if (most_rank) reduce_rows(index, QUERY, VALUE, x, m.hidden);
        const int64_t step = queries + 2 * keys, size = unit_size(step, s.threads);
        const int64_t q = units(queries, size), k = units(keys, size), total = q + 2 * k;
        const Given given(x, s.rows, m.hidden, &room.bytes);
#pragma omp for schedule(static)
        for (int64_t u = 0; u < total; u++) {
            const int which = u < q ? QUERY : u < q + k ? KEY : VALUE;
            const int64_t unit = u - (which > QUERY ? q : 0) - (which > KEY ? k : 0);
            const int64_t start = (which > QUERY ? queries : 0) + (which > KEY ? keys : 0);
            put(layer.of[which], index, which, unit, size, given, room, &qkv[start], step, false);
        }
        if (!layer.queries_norm) return;
#pragma omp for schedule(static)
        for (int64_t r = 0; r < s.rows; r++) {
            float *row = &qkv[r * step];
            norm(row, layer.queries_norm, row, queries, m.eps);
            norm(row + queries, layer.keys_norm, row + queries, keys, m.eps);
        }
    }

    void feed(const Layer &layer, int64_t index, const float *x, Room &room) {
        const int64_t size = unit_size(m.inner, s.threads), count = units(m.inner, size);
        float *own = room.outs.data(), *other = own + s.rows * BLOCK;
        const Given given(x, s.rows, m.hidden, &room.bytes);
        if (most_rank) reduce_rows(index, GATE, UP, x, m.hidden);
#pragma omp for schedule(static)
        for (int64_t u = 0; u < count; u++) {
            const int64_t first = u * size, some = std::min(size, m.inner - first);
            multiply(layer.of[GATE], index, GATE, first, size, given, own);
            multiply(layer.of[UP], index, UP, first, size, given, other);
            gate(s.rows, own, other, some, &inner[first], m.inner);
        }
        if (most_rank) reduce_rows(index, DOWN, DOWN, inner.data(), m.inner);
        add(index, DOWN, m.inner, inner.data(), room, layer.fed_norm);
    }

    void gate(int64_t rows, const float *gates, const float *ups, int64_t count, float *to,
              int64_t step) {
        for (int64_t r = 0; r < rows; r++)
            for (int64_t o = 0; o < count; o += LANES) {
                const int64_t at = r * BLOCK + o;
                store(to + r * step + o, activated(load(gates + at), m.activation) * load(ups + at));
            }
    }

    void feed_experts(const Layer &layer, const float *x, Room &room) {
        const Experts &e = *layer.experts;
        put_all(e.router, NOWHERE, QUERY, m.hidden, x, room, routed.data(), false);
#pragma omp single
        {
            route(e, s.rows, routed.data(), routing);
            for (size_t p = 0; p < routing.row.size(); p++)
                std::copy_n(x + routing.row[p] * m.hidden, m.hidden, &gathered[p * m.hidden]);
        }
        const int64_t hit = int64_t(routing.first.size()) - 1;
        const int64_t size = BLOCK / 2, some = units(e.inner, size), all = units(m.hidden, BLOCK);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < hit * some; i++)
            feed_expert(e, i / some, i % some * size, std::min(size, e.inner - i % some * size), room);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < hit * all; i++) {
            const int64_t p = routing.first[i / all], rows = routing.first[i / all + 1] - p;
            const int64_t first = i % all * BLOCK, count = std::min<int64_t>(BLOCK, m.hidden - first);
            const Given given(&expert_inner[p * e.inner], rows, e.inner, &room.bytes);
            product(given, of_expert(e.down, routing.expert[p], e.inner), first, BLOCK,
                    room.outs.data());
            for (int64_t r = 0; r < rows; r++)
                std::copy_n(&room.outs[r * BLOCK], count, &expert_out[(p + r) * m.hidden + first]);
        }
#pragma omp for schedule(static)
        for (int64_t r = 0; r < s.rows; r++) {
            float *to = &branch[r * m.hidden];
            std::fill(to, to + m.hidden, 0.0f);
            for (int64_t j = 0; j < e.chosen; j++) {
                const int64_t p = routing.of_row[r * e.chosen + j];
                const float *from = &expert_out[p * m.hidden];
                for (int64_t i = 0; i < m.hidden; i++) to[i] += routing.weight[p] * from[i];
            }
        }
        add_branch(layer.fed_norm);
    }

    // Inner numbers `first` … `first` + `count` − 1 of one expert, of those that have rows.
    void feed_expert(const Experts &e, int64_t which, int64_t first, int64_t count, Room &room) {
        const int64_t p = routing.first[which], rows = routing.first[which + 1] - p;
        const Matrix both = of_expert(e.gate_up, routing.expert[p], m.hidden);
        const Given given(&gathered[p * m.hidden], rows, m.hidden, &room.bytes);
        float *to = &expert_inner[p * e.inner + first];
        float *own = room.outs.data(), *other = own + s.rows * BLOCK;
        if (e.limit == 0) {
            product(given, both, first, BLOCK / 2, own);
            product(given, both, e.inner + first, BLOCK / 2, other);
            return gate(rows, own, other, count, to, e.inner);
        }
        product(given, both, 2 * first, BLOCK, own);
        const float most = float(e.limit), alpha = float(e.alpha);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t o = 0; o < count; o++) {
                const float taken = own[r * BLOCK + 2 * o], up = own[r * BLOCK + 2 * o + 1];
                const float gate = std::min(taken, most), factor = std::max(-most, std::min(up, most));
                to[r * e.inner + o] = (factor + 1.0f) * (gate / (1.0f + std::exp(-alpha * gate)));
            }
    }

    void list_tasks(int64_t window) {
        if (tasks_by_window.count(window)) return;
        Tasks &listed = tasks_by_window[window];
        for (int64_t row = 0; row < s.rows; row++)
            for (int64_t h = 0; h < m.kv_heads; h++) {
                const int64_t length = (window ? s.window_table : s.table)[5 * row + 4];
                const int64_t start = window ? std::max<int64_t>(0, length - window) : 0;
                const int64_t prefix = s.terms[row] ? s.terms[row]->prefix : 0;
                listed.first.push_back(int64_t(listed.all.size()));
                for (int64_t low = 0; low < prefix; low += SPLIT)
                    listed.all.push_back({row, h, low, std::min(prefix, low + SPLIT), true});
                for (int64_t low = start; low < length; low += SPLIT)
                    listed.all.push_back({row, h, low, std::min(length, low + SPLIT), false});
            }
        listed.first.push_back(int64_t(listed.all.size()));
        const size_t room = listed.all.size() * (m.heads / m.kv_heads) * (m.head_dim + 2);
        parts.resize(std::max(parts.size(), room));
    }

    void attention(const Layer &layer, int64_t index, Room &room) {
        const int64_t group = m.heads / m.kv_heads, size = group * (m.head_dim + 2);
        const Tasks &tasks = tasks_by_window.find(layer.window)->second;
        const int64_t count = int64_t(tasks.all.size());
// before anything is read, because rows of one sequence see those before them
#pragma omp for schedule(static)
        for (int64_t i = 0; i < s.rows * m.kv_heads; i++)
            store_newest(layer, i / m.kv_heads, i % m.kv_heads, room);
#pragma omp for schedule(dynamic)
        for (int64_t t = 0; t < count; t++)
            attend_task(layer, index, tasks.all[t], &parts[t * size], room);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < s.rows * m.kv_heads; i++)
            for (int64_t g = 0; g < group; g++)
                merge(layer, index, i, g, size, tasks.first[i], tasks.first[i + 1], room);
    }

    // A row's place in the table of layers like this one.
    const int64_t *place_of(const Layer &layer, int64_t row) const {
        return (layer.window ? s.window_table : s.table) + 5 * row;
    }

    // The first key of a row's sequence in a layer and key head.
    T *first_key(const Layer &layer, int64_t row, int64_t h) const {
        const int64_t *place = place_of(layer, row);
        const int64_t first = place[0] + layer.place * place[3] + h * place[1];
        return static_cast<T *>(s.memory) + first * m.head_dim;
    }

    void store_newest(const Layer &layer, int64_t row, int64_t h, Room &room) {
        const int64_t dim = m.head_dim, *place = place_of(layer, row);
        const float *given = &qkv[row * (queries + 2 * keys)];
        T *key = first_key(layer, row, h) + (place[4] - 1) * dim, *value = key + place[2] * dim;
        float *turned = room.query.data();
        turn(layer, row, given + queries + h * dim, layer.key_norm, turned, room);
        const float *newest = given + queries + keys + h * dim;
        for (int64_t i = 0; i < dim; i++) store_kv(key + i, turned[i]);
        for (int64_t i = 0; i < dim; i++) store_kv(value + i, newest[i]);
    }

    void attend_task(const Layer &layer, int64_t index, const Task &task, float *out, Room &room) {
        const int64_t dim = m.head_dim, group = m.heads / m.kv_heads, h = task.kv_head;
        const float *given = &qkv[task.row * (queries + 2 * keys)];
        float *query = room.query.data();
        for (int64_t g = 0; g < group; g++)
            turn(layer, task.row, given + (h * group + g) * dim, layer.query_norm, query + g * dim,
                 room);
        const T *some_keys = first_key(layer, task.row, h);
        const T *some_values = some_keys + place_of(layer, task.row)[2] * dim;
        if (task.is_prefix) {
            const Terms &terms = *s.terms[task.row];
            const int64_t at = (index * m.kv_heads + h) * terms.prefix * dim;
            some_keys = static_cast<const T *>(terms.keys) + at;
            some_values = static_cast<const T *>(terms.values) + at;
        }
        attend_all(group, query, some_keys + task.low * dim, some_values + task.low * dim,
                   task.high - task.low, dim, float(m.scale), float(m.softcap), out);
    }

    // A head's query or key, normed and rotated. Numbers behind the rotated ones stay as they are.
    void turn(const Layer &layer, int64_t row, const float *x, const float *weight, float *out,
              Room &room) {
        if (weight) {
            norm(x, weight, room.head.data(), m.head_dim, m.eps);
            x = room.head.data();
        }
        const int64_t count = layer.rope < 0 ? 0 : m.rotated;
        const int64_t at = (layer.rope * s.rows + row) * m.rotated;
        if (count) rotate(x, s.cos + at, s.sin + at, out, count);
        std::copy(x + count, x + m.head_dim, out + count);
    }

    // Join what the tasks of row and key head `i` have found for query head `g` of its group, with
    // the head's attention sink and what an adapter adds.
    void merge(const Layer &layer, int64_t index, int64_t i, int64_t g, int64_t size, int64_t low,
               int64_t high, Room &room) {
        const int64_t dim = m.head_dim, group = m.heads / m.kv_heads;
        const int64_t row = i / m.kv_heads, h = i % m.kv_heads, head = h * group + g;
        float *out = &mixed[row * queries + head * dim];
        float most = -INFINITY, total = 0, mass = 0;
        for (int64_t t = low; t < high; t++)
            most = std::max(most, parts[t * size + g * (dim + 2) + dim]);
        const float *term = room.term.data();
        if (s.terms[row] && s.terms[row]->k) {
            mass = find_term(layer, index, row, head, room);
            if (mass != 0) most = std::max(most, 0.0f);  // NaN stays in the sums
        }
        if (layer.sinks) most = std::max(most, layer.sinks[head]);
        std::fill(out, out + dim, 0.0f);
        for (int64_t t = low; t < high; t++) {
            const float *part = &parts[t * size + g * (dim + 2)];
            const float factor = std::exp(part[dim] - most);
            total += factor * part[dim + 1];
            for (int64_t d = 0; d < dim; d++) out[d] += factor * part[d];
        }
        if (mass != 0) {
            const float factor = std::exp(-most);
            total += factor * mass;
            for (int64_t d = 0; d < dim; d++) out[d] += factor * term[d];
        }
        if (layer.sinks) total += std::exp(layer.sinks[head] - most);
        for (int64_t d = 0; d < dim; d++) out[d] /= total;
    }

    // NTK-Attention's term of one row and query head, in `room.term`. Returns its mass.
    float find_term(const Layer &layer, int64_t index, int64_t row, int64_t head, Room &room) {
        const int64_t dim = m.head_dim;
        const float *given = &qkv[row * (queries + 2 * keys) + head * dim];
        float *query = room.query.data();
        turn(layer, row, given, layer.query_norm, query, room);
        return ntk_term(*s.terms[row], index * m.heads + head, query, dim, room.ntk,
                        room.term.data());
    }
};

extern "C" int64_t gemserve_sizes(int64_t *lanes) {
    *lanes = LANES;
    return sizeof(Model) + sizeof(Layer) + sizeof(Step) + sizeof(Experts) + sizeof(Terms) +
           sizeof(LayerTerms);
}

extern "C" const char *gemserve_step(const Model *model, const Step *step) try {
    if (model->is_half)
        Runner<uint16_t>(*model, *step).run();
    else
        Runner<float>(*model, *step).run();
    return nullptr;
} catch (...) {
    return reason();
}
