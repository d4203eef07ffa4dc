// What the kernels share: bfloat16, a vectorisable exponential, loops over threads.
#pragma once

#include <cstdint>
#include <cstring>

struct bf16 {
    uint16_t bits;
};

static inline float load(float value) { return value; }

static inline float load(bf16 value) {
    uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
    float out;
    std::memcpy(&out, &bits, sizeof out);
    return out;
}

static inline void store(float* at, float value) { *at = value; }

// Rounds to nearest even, as torch does; written without branches so that loops vectorise.
static inline void store(bf16* at, float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    at->bits = static_cast<uint16_t>(value == value ? rounded : 0x7fc0u);
}

static inline float clamp(float x, float low, float high) {
    return x < low ? low : (x > high ? high : x);
}

// e^x within two units in the last place, for -87 <= x <= 88. 2^n from the exponent bits, e^f for
// the rest by its Taylor series, whose seventh term is below 2^-24. Plain code that vectorises.
static inline float exp_fast(float x) {
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    float scaled = x * 1.44269504f;
    float whole = (scaled + magic) - magic;
    float f = (scaled - whole) * 0.69314718f;
    float p = 1.0f / 720.0f;
    p = p * f + 1.0f / 120.0f;
    p = p * f + 1.0f / 24.0f;
    p = p * f + 1.0f / 6.0f;
    p = p * f + 0.5f;
    p = p * f + 1.0f;
    p = p * f + 1.0f;
    int32_t bits = (static_cast<int32_t>(whole) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return p * power;
}

// e^x for x <= 0: what is below e^-87 is nothing beside the e^0 of the largest score.
static inline float exp_below(float x) { return exp_fast(x < -87.0f ? -87.0f : x); }

// One thread runs the loop in place, so that a runner with one thread never starts a team.
template <typename Body>
static inline void each(int64_t count, int threads, const Body& body) {
#ifdef _OPENMP
    if (threads > 1 && count > 1) {
#pragma omp parallel for num_threads(threads) schedule(static)
        for (int64_t at = 0; at < count; at++) body(at);
        return;
    }
#endif
    for (int64_t at = 0; at < count; at++) body(at);
}
