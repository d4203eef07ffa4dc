// Linears on AMX: bfloat16 activations, weights in bfloat16, int8 or int4.
//
// Weights lie in blocks of 32 outputs; a block is pairs of B tiles, 32 inputs deep each. int8 and
// int4 blocks are turned into bfloat16 tiles in a scratch buffer that stays in the cache, once for
// all rows. Every row takes the same products in the same order whatever the batch, so its bits
// are its own: one row, a batch of rows and a prefill chunk agree.
#include <algorithm>
#include <vector>

#include "tiles.h"

#ifdef WL_AMX
using namespace tiles;

enum Kind { BF16 = 0, INT8 = 1, INT4 = 2 };

// Outputs of a block.
constexpr int64_t BLOCK = 32;

// Rows whose inputs stay in the second-level cache (2 MiB on every CPU with AMX) beside a block.
constexpr int64_t CACHE_BYTES = 1 << 20;

struct Weights {
    int64_t kind, outputs, inputs;
    const uint8_t* tiles;
    const float* scales;      // int8: [outputs, rounded up to 32]
    const uint16_t* groups;   // int4, float16: per tile 16 scales, then 16 minima
    const float* bias;        // or null: [outputs, rounded up to 32]
};

static int64_t tile_bytes(int64_t kind) {
    return kind == BF16 ? SIZE * 2 : kind == INT8 ? SIZE : SIZE / 2;
}

static void widen_int8(const uint8_t* from, bf16* to) {
    for (int64_t at = 0; at < SIZE; at += 32) {
        const __m128i* source = reinterpret_cast<const __m128i*>(from + at);
        __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(source)));
        __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(source + 1)));
        _mm512_store_si512(to + at, narrow(low, high));
    }
}

// A tile is one group deep: each output has one scale and one minimum. Nibble j of each 32-bit
// lane belongs to the j-th half row of a run of eight.
static void widen_int4(const uint8_t* from, const uint16_t* group, bf16* to) {
    const __m512 values = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i pairs = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    const __m512i later = _mm512_add_epi32(pairs, _mm512_set1_epi32(8));
    const __m256i* stored = reinterpret_cast<const __m256i*>(group);
    __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256(stored));
    __m512 minimum = _mm512_cvtph_ps(_mm256_loadu_si256(stored + 1));
    __m512 scale_low = _mm512_permutexvar_ps(pairs, scale);
    __m512 scale_high = _mm512_permutexvar_ps(later, scale);
    __m512 minimum_low = _mm512_permutexvar_ps(pairs, minimum);
    __m512 minimum_high = _mm512_permutexvar_ps(later, minimum);
    for (int64_t run = 0; run < 4; run++) {
        __m512i packed = _mm512_loadu_si512(from + run * 64);
        for (int64_t row = 0; row < 4; row++) {
            __m512 low = _mm512_permutexvar_ps(packed, values);
            packed = _mm512_srli_epi32(packed, 4);
            __m512 high = _mm512_permutexvar_ps(packed, values);
            packed = _mm512_srli_epi32(packed, 4);
            low = _mm512_fmadd_ps(low, scale_low, minimum_low);
            high = _mm512_fmadd_ps(high, scale_high, minimum_high);
            _mm512_store_si512(to + (run * 4 + row) * 32, narrow(low, high));
        }
    }
}

static const bf16* block_tiles(const Weights& w, int64_t block, bf16* scratch) {
    const int64_t count = w.inputs / DEPTH * 2, size = tile_bytes(w.kind);
    const uint8_t* from = w.tiles + block * count * size;
    if (w.kind == BF16) return reinterpret_cast<const bf16*>(from);
    for (int64_t at = 0; at < count; at++) {
        // A page ahead: the next tiles are on their way while these are unpacked.
        for (int64_t line = 0; line < size; line += 64)
            _mm_prefetch(reinterpret_cast<const char*>(from + at * size + 4096 + line), _MM_HINT_T0);
        if (w.kind == INT8)
            widen_int8(from + at * size, scratch + at * SIZE);
        else
            widen_int4(from + at * size, w.groups + (block * count + at) * 32, scratch + at * SIZE);
    }
    return scratch;
}

// Scales, bias and residual in float32, one rounding.
static void finish(const Weights& w, const float* c, int64_t rows, int64_t block,
                   const bf16* residual, bf16* out) {
    const int64_t first = block * BLOCK;
    const int64_t width = std::min(BLOCK, w.outputs - first);
    const __mmask32 mask = width == 32 ? ~0u : (1u << width) - 1;
    for (int64_t row = 0; row < rows; row++) {
        __m512 low = _mm512_loadu_ps(c + row * 32), high = _mm512_loadu_ps(c + row * 32 + 16);
        if (w.scales) {
            low = _mm512_mul_ps(low, _mm512_loadu_ps(w.scales + first));
            high = _mm512_mul_ps(high, _mm512_loadu_ps(w.scales + first + 16));
        }
        if (w.bias) {
            low = _mm512_add_ps(low, _mm512_loadu_ps(w.bias + first));
            high = _mm512_add_ps(high, _mm512_loadu_ps(w.bias + first + 16));
        }
        if (residual) {
            __m512i before = _mm512_maskz_loadu_epi16(mask, residual + row * w.outputs + first);
            __m256i first_half = _mm512_castsi512_si256(before);
            __m256i second_half = _mm512_extracti64x4_epi64(before, 1);
            low = _mm512_add_ps(low, _mm512_castsi512_ps(_mm512_slli_epi32(
                                         _mm512_cvtepu16_epi32(first_half), 16)));
            high = _mm512_add_ps(high, _mm512_castsi512_ps(_mm512_slli_epi32(
                                           _mm512_cvtepu16_epi32(second_half), 16)));
        }
        _mm512_mask_storeu_epi16(out + row * w.outputs + first, mask, narrow(low, high));
    }
}

static bf16* aligned(std::vector<bf16>& buffer, int64_t size) {
    if (static_cast<int64_t>(buffer.size()) < size + 32) buffer.resize(size + 32);
    uintptr_t at = reinterpret_cast<uintptr_t>(buffer.data());
    return reinterpret_cast<bf16*>((at + 63) / 64 * 64);
}

// One block of outputs for `count` rows; `tail` holds the rows past the last whole 32, padded.
static void run_block(const Weights& w, const bf16* rows, int64_t count, const bf16* tail,
                      int64_t block, const bf16* residual, bf16* out) {
    static thread_local std::vector<bf16> buffer;
    alignas(64) float c[32 * 32];
    const int64_t depth = w.inputs / DEPTH;
    const bf16* b = block_tiles(w, block, aligned(buffer, 2 * depth * SIZE));
    for (int64_t at = 0; at < count; at += 32) {
        const int64_t some = std::min<int64_t>(32, count - at);
        const bf16* a = some == 32 ? rows + at * w.inputs : tail;
        if (count <= ROWS)
            product_few(rows, w.inputs, b, 2 * SIZE, depth, c, 32);
        else
            product(a, w.inputs, b, 2 * SIZE, depth, c, 32);
        finish(w, c, some, block, residual ? residual + at * w.outputs : nullptr,
               out + at * w.outputs);
    }
}

static void run(const Weights& w, const bf16* rows, int64_t count, const bf16* residual, bf16* out,
                int threads) {
    static thread_local std::vector<bf16> buffer;
    bf16* tail = nullptr;
    if (count > ROWS && count % 32) {
        tail = aligned(buffer, 32 * w.inputs);
        std::memset(static_cast<void*>(tail), 0, 64 * w.inputs);
        std::memcpy(tail, rows + count / 32 * 32 * w.inputs, count % 32 * w.inputs * 2);
    }
    const int64_t blocks = (w.outputs + BLOCK - 1) / BLOCK;
    const int64_t shares = std::min<int64_t>(threads, blocks);
    each(shares, threads, [&](int64_t share) {
        configure(count <= ROWS ? count : ROWS);
        for (int64_t block = blocks * share / shares; block < blocks * (share + 1) / shares; block++)
            run_block(w, rows, count, tail, block, residual, out);
        _tile_release();
    });
}

extern "C" void wl_linear(const Weights* w, const bf16* rows, int64_t count, const bf16* residual,
                          bf16* out, int threads) {
    const int64_t most = std::max<int64_t>(32, CACHE_BYTES / (w->inputs * 2) / 32 * 32);
    for (int64_t at = 0; at < count; at += most)
        run(*w, rows + at * w->inputs, std::min(most, count - at),
            residual ? residual + at * w->outputs : nullptr, out + at * w->outputs, threads);
}

// values: [outputs, inputs], bfloat16, int8 or unsigned 0 to 15 by `kind`; scales and minima
// (int4): float16 [outputs, inputs / 32]. Outputs past the last stay zero.
extern "C" void wl_pack(int64_t kind, const void* values, const uint16_t* scales,
                        const uint16_t* minima, int64_t outputs, int64_t inputs, uint8_t* tiles,
                        uint16_t* groups) {
    const int64_t depth = inputs / DEPTH, size = tile_bytes(kind);
    for (int64_t row = 0; row < outputs; row++) {
        const int64_t block = row / BLOCK, side = row % BLOCK / ROWS, column = row % ROWS;
        for (int64_t k = 0; k < inputs; k++) {
            const int64_t tile = (block * depth + k / DEPTH) * 2 + side;
            const int64_t pair = k % DEPTH / 2, place = pair * 32 + column * 2 + k % 2;
            uint8_t* at = tiles + tile * size;
            if (kind == BF16) {
                reinterpret_cast<bf16*>(at)[place] =
                    static_cast<const bf16*>(values)[row * inputs + k];
            } else if (kind == INT8) {
                at[place] = static_cast<const uint8_t*>(values)[row * inputs + k];
            } else {
                const int64_t half_row = place / 16, lane = place % 16;
                const uint32_t value = static_cast<const uint8_t*>(values)[row * inputs + k];
                reinterpret_cast<uint32_t*>(at)[half_row / 8 * 16 + lane] |= value
                                                                            << (half_row % 8 * 4);
                groups[tile * 32 + column] = scales[row * depth + k / DEPTH];
                groups[tile * 32 + 16 + column] = minima[row * depth + k / DEPTH];
            }
        }
    }
}

extern "C" int wl_amx() { return allowed(); }
#else
extern "C" int wl_amx() { return 0; }
#endif
