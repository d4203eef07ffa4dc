// Paged attention of whole chunks and of single tokens on AMX, bfloat16, head sizes of whole 32s.
//
// A KV head's keys and values are packed into tiles once; rows are (token, query head) pairs, so
// that the heads that share a KV head share its tiles. Keys are taken in spans at fixed absolute
// positions with a running maximum: a row's bits depend on its own context alone, not on the batch
// nor on where chunks begin. Source: FlashAttention-2 (arXiv 2307.08691), forward pass.
#include <algorithm>
#include <cmath>
#include <vector>

#include "tiles.h"

#ifdef WL_AMX
using namespace tiles;

// Keys per step of the running maximum: a multiple of 32; scores of 32 rows take 32 KiB.
constexpr int64_t SPAN = 256;

struct Sizes {
    int64_t num_heads, num_kv, dim, block_size, layer, num_layers, window, threads;
};

struct Item {
    int64_t row, count, start;  // first row of qkv, tokens, position of the first
    const int64_t* table;
};

static const bf16* key_at(const Sizes& s, const bf16* pool, const int64_t* table, int64_t at,
                          int64_t kv) {
    const int64_t block = (table[at / s.block_size] * s.num_layers + s.layer) * 2;
    return pool + (block * s.block_size + at % s.block_size) * s.num_kv * s.dim + kv * s.dim;
}

// Transposes 16 keys of 16 32-bit values (two dimensions each) into one B tile.
static void transpose(__m512i* r, bf16* out) {
    __m512i t[16];
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 8; i++) {
        _mm512_store_si512(out + i * 32, _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88));
        _mm512_store_si512(out + (i + 8) * 32, _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd));
    }
}

// Packs 32 neighbouring positions. keys: [depth][2 sides] tiles; values: [dim / 16] tiles.
// Positions past the context are zero: what lies there may be anything.
static void pack(const Sizes& s, const bf16* pool, const int64_t* table, int64_t first,
                 int64_t context, int64_t kv, bf16* keys, bf16* values) {
    const bf16* at[32];
    const int64_t value_offset = s.block_size * s.num_kv * s.dim;
    for (int64_t i = 0; i < 32; i++)
        at[i] = first + i < context ? key_at(s, pool, table, first + i, kv) : nullptr;
    for (int64_t depth = 0; depth < s.dim / DEPTH; depth++)
        for (int64_t side = 0; side < 2; side++) {
            __m512i rows[16];
            for (int64_t i = 0; i < 16; i++) {
                const bf16* key = at[side * 16 + i];
                rows[i] = key ? _mm512_loadu_si512(key + depth * DEPTH) : _mm512_setzero_si512();
            }
            transpose(rows, keys + (depth * 2 + side) * SIZE);
        }
    for (int64_t part = 0; part < s.dim / 16; part++)
        for (int64_t pair = 0; pair < 16; pair++) {
            __m512i both[2];
            for (int64_t i = 0; i < 2; i++) {
                const bf16* key = at[pair * 2 + i];
                both[i] = key ? _mm512_cvtepu16_epi32(_mm256_loadu_si256(
                                    reinterpret_cast<const __m256i*>(key + value_offset + part * 16)))
                              : _mm512_setzero_si512();
            }
            _mm512_store_si512(values + part * SIZE + pair * 32,
                               _mm512_or_si512(both[0], _mm512_slli_epi32(both[1], 16)));
        }
}

// 2^x for x <= 0. Taylor to the fourth term: 2^-14, below the eight bits weights are rounded to.
static inline __m512 exp2_below(__m512 x) {
    __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 f = _mm512_sub_ps(x, whole);
    __m512 p = _mm512_set1_ps(0.0096181291f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.055504109f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.24022651f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.69314718f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, whole);
}

// Which of the 16 keys from `at` on lie in low to high.
static inline __mmask16 seen(int64_t at, int64_t low, int64_t high) {
    const int64_t from = std::clamp<int64_t>(low - at, 0, 16);
    const int64_t to = std::clamp<int64_t>(high - at, 0, 16);
    return static_cast<__mmask16>(((1u << to) - 1) & ~((1u << from) - 1));
}

// A row's state between spans: in units of log2, which spares a product per score.
struct Running {
    float largest, total;
};

// Turns a row's scores (keys low to high of the span count) into weights, and its sums so far to
// the new maximum. `width` is whole 32s.
static void soften(const float* scores, bf16* weights, int64_t low, int64_t high, int64_t width,
                   float scale, Running& state, float* sums, int64_t dim) {
    __m512 most = _mm512_set1_ps(-INFINITY);
    for (int64_t at = low / 16 * 16; at < high; at += 16)
        most = _mm512_mask_max_ps(most, seen(at, low, high), most, _mm512_loadu_ps(scores + at));
    const float top = std::max(state.largest, _mm512_reduce_max_ps(most) * scale);
    const __m512 negative = _mm512_set1_ps(-top), factor = _mm512_set1_ps(scale);
    __m512 total = _mm512_setzero_ps();
    for (int64_t at = 0; at < width; at += 32) {
        __m512 first = exp2_below(_mm512_fmadd_ps(_mm512_loadu_ps(scores + at), factor, negative));
        __m512 second =
            exp2_below(_mm512_fmadd_ps(_mm512_loadu_ps(scores + at + 16), factor, negative));
        if (at < low || at + 32 > high) {
            first = _mm512_maskz_mov_ps(seen(at, low, high), first);
            second = _mm512_maskz_mov_ps(seen(at + 16, low, high), second);
        }
        total = _mm512_add_ps(_mm512_add_ps(total, first), second);
        _mm512_storeu_si512(weights + at, narrow(first, second));
    }
    if (state.largest != top) {
        const float shrink = std::exp2(state.largest - top);
        state.total *= shrink;
        for (int64_t i = 0; i < dim; i++) sums[i] *= shrink;
        state.largest = top;
    }
    state.total += _mm512_reduce_add_ps(total);
}

struct Packed {
    const bf16 *keys, *values;  // 32 positions after each other, `dim * 32` values each
    int64_t first;              // position of the first
};

// Attention of 32 rows (or, `few`, at most 16) from `queries` [32][dim]; row r is token
// (first_row + r) / group of the item.
static void attend(const Sizes& s, const Item& item, const bf16* queries, int64_t first_row,
                   int64_t rows, bool few, const Packed& packed, float* sums) {
    alignas(64) static thread_local float scores[32 * SPAN];
    alignas(64) static thread_local bf16 weights[32 * SPAN];
    Running state[32];
    const int64_t group = s.num_heads / s.num_kv, step = s.dim * 32;
    const float scale = 1.44269504f / std::sqrt(static_cast<float>(s.dim));
    for (int64_t r = 0; r < 32; r++) state[r] = {-INFINITY, 0.0f};
    std::fill_n(sums, 32 * s.dim, 0.0f);
    const int64_t oldest = item.start + first_row / group;
    const int64_t end = item.start + (first_row + rows - 1) / group + 1;
    const int64_t begin = s.window && oldest + 1 > s.window ? oldest + 1 - s.window : 0;
    for (int64_t span = begin / SPAN * SPAN; span < end; span += SPAN) {
        const int64_t width = (std::min(SPAN, end - span) + 31) / 32 * 32;
        const int64_t tile = (span - packed.first) / 32;
        // Spans begin at whole 256s; the packed range may begin later, with a window.
        const int64_t skipped = std::max<int64_t>(0, packed.first - span);
        for (int64_t at = skipped; at < width; at += 32) {
            const bf16* keys = packed.keys + (tile + at / 32) * step;
            if (few)
                product_few(queries, s.dim, keys, 2 * SIZE, s.dim / DEPTH, scores + at, SPAN);
            else
                product(queries, s.dim, keys, 2 * SIZE, s.dim / DEPTH, scores + at, SPAN);
        }
        for (int64_t r = 0; r < rows; r++) {
            const int64_t position = item.start + (first_row + r) / group;
            const int64_t high = std::min(width, position + 1 - span);
            const int64_t low =
                s.window ? std::max<int64_t>(0, position + 1 - s.window - span) : 0;
            if (low < high) {
                soften(scores + r * SPAN, weights + r * SPAN, low, high, width, scale, state[r],
                       sums + r * s.dim, s.dim);
            } else {
                std::memset(static_cast<void*>(weights + r * SPAN), 0, width * 2);
            }
        }
        for (int64_t part = 0; part < s.dim / 32; part++) {
            const bf16* values =
                packed.values + (tile + skipped / 32) * step + part * 2 * SIZE;
            const int64_t depth = (width - skipped) / 32;
            float* to = sums + part * 32;
            if (few)
                product_few<true>(weights + skipped, SPAN, values, step, depth, to, s.dim);
            else
                product<true>(weights + skipped, SPAN, values, step, depth, to, s.dim);
        }
    }
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < s.dim; i++) sums[r * s.dim + i] /= state[r].total;
}

static bf16* aligned(std::vector<bf16>& buffer, int64_t size) {
    if (static_cast<int64_t>(buffer.size()) < size + 32) buffer.resize(size + 32);
    uintptr_t at = reinterpret_cast<uintptr_t>(buffer.data());
    return reinterpret_cast<bf16*>((at + 63) / 64 * 64);
}

// One KV head of one item.
static void run(const Sizes& s, const Item& item, const bf16* qkv, const bf16* pool, bf16* out,
                int64_t kv) {
    static thread_local std::vector<bf16> keys_buffer, values_buffer, query_buffer;
    static thread_local std::vector<float> sums;
    const int64_t group = s.num_heads / s.num_kv, step = s.dim * 32;
    const int64_t context = item.start + item.count, rows = item.count * group;
    const int64_t begin = s.window && item.start + 1 > s.window ? item.start + 1 - s.window : 0;
    const int64_t first = begin / 32 * 32, pieces = (context - first + 31) / 32;
    bf16* keys = aligned(keys_buffer, pieces * step);
    bf16* values = aligned(values_buffer, pieces * step);
    bf16* queries = aligned(query_buffer, 32 * s.dim);
    sums.resize(32 * s.dim);
    for (int64_t at = 0; at < pieces; at++)
        pack(s, pool, item.table, first + at * 32, context, kv, keys + at * step, values + at * step);
    const bool few = rows <= ROWS;
    configure(few ? rows : ROWS);
    const int64_t width = (s.num_heads + 2 * s.num_kv) * s.dim;
    for (int64_t row = 0; row < rows; row += 32) {
        const int64_t some = std::min<int64_t>(32, rows - row);
        for (int64_t r = 0; r < 32; r++) {
            const int64_t token = (row + std::min(r, some - 1)) / group;
            const int64_t head = kv * group + (row + std::min(r, some - 1)) % group;
            std::memcpy(queries + r * s.dim, qkv + (item.row + token) * width + head * s.dim,
                        s.dim * 2);
        }
        attend(s, item, queries, row, some, few, Packed{keys, values, first}, sums.data());
        for (int64_t r = 0; r < some; r++) {
            const int64_t token = item.row + (row + r) / group;
            const int64_t head = kv * group + (row + r) % group;
            bf16* to = out + (token * s.num_heads + head) * s.dim;
            for (int64_t i = 0; i < s.dim; i++) store(to + i, sums[r * s.dim + i]);
        }
    }
    _tile_release();
}

// qkv: [rows, heads + 2 * kv heads, dim]; out: [rows, heads * dim]; items cover all rows.
extern "C" void wl_flash(const Sizes* sizes, const Item* items, int64_t count, const bf16* qkv,
                         const bf16* pool, bf16* out) {
    each(count * sizes->num_kv, static_cast<int>(sizes->threads), [&](int64_t at) {
        run(*sizes, items[at / sizes->num_kv], qkv, pool, out, at % sizes->num_kv);
    });
}
#endif
