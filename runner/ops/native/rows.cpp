// Work on rows: norm, rope with the KV write, silu(gate) * up. Every row is computed alone, so its
// bits never depend on what shares the batch. Loops are plain: the compiler vectorises them.
#include <cmath>

#include "common.h"

template <typename T>
static float inverse_rms(const T* row, int64_t width, float epsilon) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < width; i++) {
        float value = load(row[i]);
        sum += value * value;
    }
    return 1.0f / std::sqrt(sum / static_cast<float>(width) + epsilon);
}

template <typename T>
static void scale_row(const T* row, const T* scale, float factor, T* out, int64_t width) {
    for (int64_t i = 0; i < width; i++) store(out + i, load(row[i]) * factor * load(scale[i]));
}

template <typename T>
static void rms_norm(const T* rows, const T* scale, float epsilon, T* out, int64_t count,
                     int64_t width, int threads) {
    each(count, threads, [=](int64_t at) {
        const T* row = rows + at * width;
        scale_row(row, scale, inverse_rms(row, width, epsilon), out + at * width, width);
    });
}

template <typename T>
static void silu_mul(const T* gate_up, T* out, int64_t count, int64_t width, int threads) {
    each(count, threads, [=](int64_t at) {
        const T* gate = gate_up + at * 2 * width;
        const T* up = gate + width;
        T* row = out + at * width;
        for (int64_t i = 0; i < width; i++) {
            // Beyond e^60 the quotient would be subnormal, which takes processors ten times as
            // long, and zero in any sum.
            float g = load(gate[i]);
            store(row + i, g / (1.0f + exp_fast(clamp(-g, -60.0f, 60.0f))) * load(up[i]));
        }
    });
}

// heads: query heads, then key heads, then value heads, of `dim` values each. Norms (where `norm`
// is given) and rotates queries and keys in place; keys and values go to the pool's rows too, which
// `token_rows` names in pairs.
template <typename T>
static void rope_write(T* qkv, const float* cosines, const float* sines, const T* norm,
                       float epsilon, T* pool, const int64_t* token_rows, int64_t count,
                       int64_t num_heads, int64_t num_kv, int64_t dim, int threads) {
    const int64_t half = dim / 2, kv_width = num_kv * dim;
    each(count, threads, [=](int64_t at) {
        T* row = qkv + at * (num_heads + 2 * num_kv) * dim;
        const float* cosine = cosines + at * half;
        const float* sine = sines + at * half;
        for (int64_t h = 0; h < num_heads + num_kv; h++) {
            T* head = row + h * dim;
            if (norm) scale_row(head, norm + h * dim, inverse_rms(head, dim, epsilon), head, dim);
            for (int64_t i = 0; i < half; i++) {
                float first = load(head[i]), second = load(head[i + half]);
                store(head + i, first * cosine[i] - second * sine[i]);
                store(head + i + half, second * cosine[i] + first * sine[i]);
            }
        }
        const T* source = row + num_heads * dim;
        for (int64_t part = 0; part < 2; part++)
            std::memcpy(pool + token_rows[2 * at + part] * kv_width, source + part * kv_width,
                        sizeof(T) * kv_width);
    });
}

#define EXPORT(T, NAME)                                                                         \
    extern "C" void wl_rms_norm_##NAME(const T* rows, const T* scale, float epsilon, T* out,    \
                                       int64_t count, int64_t width, int threads) {             \
        rms_norm(rows, scale, epsilon, out, count, width, threads);                             \
    }                                                                                           \
    extern "C" void wl_silu_mul_##NAME(const T* gate_up, T* out, int64_t count, int64_t width,  \
                                       int threads) {                                           \
        silu_mul(gate_up, out, count, width, threads);                                          \
    }                                                                                           \
    extern "C" void wl_rope_write_##NAME(                                                       \
        T* qkv, const float* cosines, const float* sines, const T* norm, float epsilon, T* pool, \
        const int64_t* token_rows, int64_t count, int64_t num_heads, int64_t num_kv,            \
        int64_t dim, int threads) {                                                             \
        rope_write(qkv, cosines, sines, norm, epsilon, pool, token_rows, count, num_heads,      \
                   num_kv, dim, threads);                                                       \
    }

EXPORT(float, f32)
EXPORT(bf16, bf16)
