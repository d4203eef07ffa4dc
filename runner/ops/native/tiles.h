// AMX tiles: eight registers of 16 rows of 64 bytes, multiplied as bfloat16 into float32.
//
// A product tile is C[16][16] += A[16][32] * B[32][16]; B lies as pairs of its rows:
// [16 row pairs][16 columns][2]. Source: Intel 64 and IA-32 manual, volume 1, chapter 18.
#pragma once

#include "common.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512BW__)
#define WL_AMX 1
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace tiles {

constexpr int64_t ROWS = 16, DEPTH = 32, SIZE = ROWS * DEPTH;

struct alignas(64) Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

// Registers 0 to 3 hold products, 4 and 5 hold A, 6 and 7 hold B. With `rows` below 16 the first
// A (4) and its products (0, 1) have that many: a decode step's few rows cost no more than they are.
static inline void configure(int64_t rows = ROWS) {
    Config config;
    for (int i = 0; i < 8; i++) {
        config.row_bytes[i] = 64;
        config.rows[i] = ROWS;
    }
    config.rows[0] = config.rows[1] = config.rows[4] = static_cast<uint8_t>(rows);
    _tile_loadconfig(&config);
}

// Linux gives a process the tile registers on request only.
static inline bool allowed() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

// C (32 x 32 float32, rows `c_stride` values apart) = A (32 rows, `a_stride` values apart) * B,
// `depth` tiles deep, plus what C holds if `adds`. B lies as pairs of tiles, `b_step` values from
// one depth to the next.
template <bool adds = false>
static inline void product(const bf16* a, int64_t a_stride, const bf16* b, int64_t b_step,
                           int64_t depth, float* c, int64_t c_stride) {
    float* lower = c + ROWS * c_stride;
    if (adds) {
        _tile_loadd(0, c, c_stride * 4);
        _tile_loadd(1, c + ROWS, c_stride * 4);
        _tile_loadd(2, lower, c_stride * 4);
        _tile_loadd(3, lower + ROWS, c_stride * 4);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t at = 0; at < depth; at++) {
        _tile_loadd(4, a + at * DEPTH, a_stride * 2);
        _tile_loadd(6, b + at * b_step, 64);
        _tile_loadd(7, b + at * b_step + SIZE, 64);
        _tile_loadd(5, a + ROWS * a_stride + at * DEPTH, a_stride * 2);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, c_stride * 4);
    _tile_stored(1, c + ROWS, c_stride * 4);
    _tile_stored(2, lower, c_stride * 4);
    _tile_stored(3, lower + ROWS, c_stride * 4);
}

// The same for at most 16 rows of A: as many as `configure` said.
template <bool adds = false>
static inline void product_few(const bf16* a, int64_t a_stride, const bf16* b, int64_t b_step,
                               int64_t depth, float* c, int64_t c_stride) {
    if (adds) {
        _tile_loadd(0, c, c_stride * 4);
        _tile_loadd(1, c + ROWS, c_stride * 4);
    } else {
        _tile_zero(0);
        _tile_zero(1);
    }
    for (int64_t at = 0; at < depth; at++) {
        _tile_loadd(4, a + at * DEPTH, a_stride * 2);
        _tile_loadd(6, b + at * b_step, 64);
        _tile_loadd(7, b + at * b_step + SIZE, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, c, c_stride * 4);
    _tile_stored(1, c + ROWS, c_stride * 4);
}

static inline __m512i narrow(__m512 low, __m512 high) {
    return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
}

}  // namespace tiles
#endif
