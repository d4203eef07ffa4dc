// Paged attention of one query token per sequence, for any CPU and head size.
//
// A sequence's blocks are walked in order with a running maximum (online softmax), so its bits
// depend on its own context alone. The query heads of a KV head share each key and value read.
#include <cmath>
#include <vector>

#include "common.h"

template <typename T>
static float dot(const float* query, const T* key, int64_t dim) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < dim; i++) sum += query[i] * load(key[i]);
    return sum;
}

struct Shape {
    int64_t num_heads, num_kv, dim, block_size, layer, num_layers, window;
};

// Attention of one sequence's KV head: `group` query heads of `dim` values from `query` to `out`.
template <typename T>
static void attend(const T* query, T* out, const T* pool, const int64_t* table, int64_t context,
                   int64_t kv, const Shape& s) {
    const int64_t group = s.num_heads / s.num_kv, width = s.num_kv * s.dim;
    const int64_t half = s.block_size * width;
    const float scale = 1.0f / std::sqrt(static_cast<float>(s.dim));
    static thread_local std::vector<float> scratch;
    scratch.assign(group * (2 * s.dim + s.block_size + 2), 0.0f);
    float* queries = scratch.data();
    float* sums = queries + group * s.dim;
    float* scores = sums + group * s.dim;
    float* largest = scores + group * s.block_size;
    float* total = largest + group;
    for (int64_t i = 0; i < group * s.dim; i++) queries[i] = load(query[i]) * scale;
    for (int64_t g = 0; g < group; g++) largest[g] = -INFINITY;
    const int64_t first = s.window && context > s.window ? context - s.window : 0;
    for (int64_t block = first / s.block_size; block * s.block_size < context; block++) {
        const int64_t begin = block * s.block_size;
        const int64_t low = first > begin ? first - begin : 0;
        const int64_t high = context - begin < s.block_size ? context - begin : s.block_size;
        const T* keys = pool + (table[block] * s.num_layers + s.layer) * 2 * half + kv * s.dim;
        const T* values = keys + half;
        for (int64_t g = 0; g < group; g++) {
            float* row = scores + g * s.block_size;
            float top = largest[g];
            for (int64_t at = low; at < high; at++) {
                row[at] = dot(queries + g * s.dim, keys + at * width, s.dim);
                top = row[at] > top ? row[at] : top;
            }
            const float shrink = largest[g] == -INFINITY ? 0.0f : exp_below(largest[g] - top);
            largest[g] = top;
            total[g] *= shrink;
            float* sum = sums + g * s.dim;
            for (int64_t i = 0; i < s.dim; i++) sum[i] *= shrink;
            for (int64_t at = low; at < high; at++) {
                const float weight = exp_below(row[at] - top);
                total[g] += weight;
                const T* value = values + at * width;
                for (int64_t i = 0; i < s.dim; i++) sum[i] += weight * load(value[i]);
            }
        }
    }
    for (int64_t g = 0; g < group; g++)
        for (int64_t i = 0; i < s.dim; i++)
            store(out + g * s.dim + i, sums[g * s.dim + i] / total[g]);
}

// qkv: [sequences, heads + 2 * kv heads, dim]; tables: [sequences, table_width];
// out: [sequences, heads * dim].
template <typename T>
static void decode(const T* qkv, T* out, const T* pool, const int64_t* tables,
                   int64_t table_width, const int64_t* contexts, int64_t count, const Shape& s,
                   int threads) {
    const int64_t group = s.num_heads / s.num_kv;
    each(count * s.num_kv, threads, [&](int64_t at) {
        const int64_t row = at / s.num_kv, kv = at % s.num_kv, head = kv * group * s.dim;
        attend(qkv + row * (s.num_heads + 2 * s.num_kv) * s.dim + head,
               out + row * s.num_heads * s.dim + head, pool, tables + row * table_width,
               contexts[row], kv, s);
    });
}

#define EXPORT(T, NAME)                                                                         \
    extern "C" void wl_decode_##NAME(                                                           \
        const T* qkv, T* out, const T* pool, const int64_t* tables, int64_t table_width,        \
        const int64_t* contexts, int64_t count, int64_t num_heads, int64_t num_kv, int64_t dim, \
        int64_t block_size, int64_t layer, int64_t num_layers, int64_t window, int threads) {   \
        decode(qkv, out, pool, tables, table_width, contexts, count,                            \
               Shape{num_heads, num_kv, dim, block_size, layer, num_layers, window}, threads);  \
    }

EXPORT(float, f32)
EXPORT(bf16, bf16)
