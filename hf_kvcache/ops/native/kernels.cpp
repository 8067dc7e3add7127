// The two halves of attention over packed rows on the CPU. The layout is that of ops/packed.py, the meaning that of
// ops/decode_attention/reference.py.
//
// Both halves are one product: activations [M, R] times a tile of codes, R rows of 2 * half lanes. For logits the rows
// are channels and the lanes tokens, for weighted sums the rows are tokens and the lanes channels. A scale that belongs
// to (row, some lanes) is folded into the activations, one that belongs to (lane, some rows) multiplies what those rows
// give.
//
// Two ways to compute it:
// - float: a tile becomes full numbers, then a small matrix product. Portable, any format, exact to float32 rounding.
// - integer (AVX-512 VNNI and VBMI): activations become integers against the largest one of a tile, of two signed bytes
//   each (three for models in float32), and vpdpbusd multiplies them with the codes. What is lost is below the rounding
//   of bfloat16 (float32) activations.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512VNNI__) && \
    defined(__AVX512VBMI__)
#define KV_INTEGER 1
#else
#define KV_INTEGER 0
#endif

// Mirrored by `Problem` in __init__.py.
extern "C" struct Problem {
    const float* x;         // logits: queries [B, H, M, D]; weighted: probabilities [B, H, M, N]
    float* out;             // logits: [B, H, M, N]; weighted: [B, H, M, D]; contiguous
    const uint8_t* codes;
    const uint16_t* scale;  // float16
    const uint16_t* zero;   // float16, or null
    const float* table;     // level of each code, or null: code - centre
    int64_t batch, heads, rows, tokens, dim;
    int64_t bits;
    int64_t half;           // bytes of a row of codes
    int64_t tile;           // tokens of a tile
    int64_t by_channel;     // 1: a scale for each channel over `group` tokens; 0: for each token over `group` channels
    int64_t group;
    int64_t float8;         // 1: codes are e4m3 numbers
    int64_t exact;          // 1: activations are float32 numbers, not wider forms of 16-bit ones
    int64_t threads;
    int64_t x_b, x_h, x_m;                                // strides in elements
    int64_t codes_b, codes_h, codes_block, codes_tile;    // strides in bytes (no blocks in keys)
    int64_t scale_b, scale_h, zero_b, zero_h;             // strides in elements; rows are contiguous
    float centre;
};

namespace {

constexpr int64_t ALIGN = 64;

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Loops whose index is a constant: compilers keep small arrays in registers only where every index is one early on.
#define KV_INLINE inline __attribute__((always_inline))
#define KV_BODY __attribute__((always_inline))

template <typename F, int... I> KV_INLINE void each(F&& body, std::integer_sequence<int, I...>) {
    (body(std::integral_constant<int, I>{}), ...);
}

template <int N, typename F> KV_INLINE void unrolled(F&& body) { each(body, std::make_integer_sequence<int, N>{}); }

// Scratch memory of one thread, kept from call to call: fresh pages for each call would cost more than small calls do.
class Scratch {
  public:
    ~Scratch() { std::free(data_); }
    void reserve(size_t bytes) {
        used_ = 0;
        if (bytes <= size_) return;
        std::free(data_);
        size_ = round_up(bytes, 4096);
        data_ = static_cast<char*>(std::aligned_alloc(4096, size_));
        if (data_ == nullptr) std::abort();
    }
    template <typename T> T* take(int64_t count) {
        T* here = reinterpret_cast<T*>(data_ + used_);
        used_ += round_up(count * sizeof(T), ALIGN);
        if (used_ > size_) std::abort();
        return here;
    }

  private:
    char* data_ = nullptr;
    size_t size_ = 0, used_ = 0;
};

Scratch& scratch() {
    static thread_local Scratch mine;
    return mine;
}

float from_half(uint16_t h) {
    uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 0x3ff, bits;
    float value;
    if (exponent == 0) {  // subnormal: fraction * 2^-24
        value = float(fraction) * 5.9604644775390625e-8f;
        return sign ? -value : value;
    }
    bits = sign | ((exponent == 31 ? 255 : exponent + 112) << 23) | (fraction << 13);
    std::memcpy(&value, &bits, 4);
    return value;
}

void from_half(const uint16_t* in, float* out, int64_t count) {
    int64_t i = 0;
#if defined(__AVX512F__)
    for (; i + 16 <= count; i += 16)
        _mm512_storeu_ps(out + i, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + i))));
#elif defined(__F16C__) && defined(__AVX2__)
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i))));
#endif
    for (; i < count; i++) out[i] = from_half(in[i]);
}

// Scales `[valid, groups]` of a tile as float `[groups, tile]`, 0 after the valid tokens, where memory holds anything.
void by_group(const uint16_t* in, int64_t valid, int64_t groups, int64_t tile, float* out) {
#if KV_INTEGER
    if (tile == 64 && (groups & (groups - 1)) == 0 && groups <= 32) {
        alignas(64) uint16_t a[64 * 32], b[64 * 32];
        const uint16_t* from = in;
        if (valid < 64) {
            std::memcpy(a, in, valid * groups * 2);
            std::memset(a + valid * groups, 0, (64 - valid) * groups * 2);
            from = a;
        }
        alignas(64) uint16_t order[32];
        for (int i = 0; i < 32; i++) order[i] = 2 * i;
        const __m512i even = _mm512_load_si512(order), odd = _mm512_add_epi16(even, _mm512_set1_epi16(1));
        uint16_t* to = b;
        // Even elements before odd ones: the lowest bit of an index moves to its top. Once for each bit of the group.
        for (int64_t left = groups; left > 1; left /= 2) {
            for (int64_t i = 0; i < groups; i++) {
                const __m512i x = _mm512_loadu_si512(from + 64 * i), y = _mm512_loadu_si512(from + 64 * i + 32);
                _mm512_store_si512(to + 32 * i, _mm512_permutex2var_epi16(x, even, y));
                _mm512_store_si512(to + 32 * (groups + i), _mm512_permutex2var_epi16(x, odd, y));
            }
            from = to;
            to = to == b ? a : b;
        }
        from_half(from, out, 64 * groups);
        return;
    }
#endif
    for (int64_t t = 0; t < valid; t++)
        for (int64_t g = 0; g < groups; g++) out[g * tile + t] = from_half(in[t * groups + g]);
    for (int64_t g = 0; g < groups; g++) std::fill(out + g * tile + valid, out + (g + 1) * tile, 0.0f);
}

// ---------------------------------------------------------------------------------------------------------- float

#if defined(__AVX512F__)
constexpr int VECTOR = 16, WIDE = 4;
#elif defined(__AVX__)
constexpr int VECTOR = 8, WIDE = 2;
#else
constexpr int VECTOR = 4, WIDE = 2;
#endif
typedef float Vec __attribute__((vector_size(VECTOR * 4), aligned(4), may_alias));

// out [ROWS, COLUMNS * VECTOR] += x [ROWS, r] * w [r, ...]
template <int ROWS, int COLUMNS>
inline void block_product(const float* x, int64_t xs, int64_t r, const float* w, int64_t ld, float* out, int64_t os) {
    Vec sum[ROWS * COLUMNS];
    const auto at = [&](int n) { return reinterpret_cast<Vec*>(out + n / COLUMNS * os + n % COLUMNS * VECTOR); };
    unrolled<ROWS * COLUMNS>([&](auto n) KV_BODY { sum[n] = *at(n); });
    for (int64_t k = 0; k < r; k++) {
        Vec wide[COLUMNS];
        unrolled<COLUMNS>([&](auto j) KV_BODY { wide[j] = *reinterpret_cast<const Vec*>(w + k * ld + j * VECTOR); });
        unrolled<ROWS>([&](auto i) KV_BODY {
            const float one = x[i * xs + k];
            unrolled<COLUMNS>([&](auto j) KV_BODY { sum[i * COLUMNS + j] += wide[j] * one; });
        });
    }
    unrolled<ROWS * COLUMNS>([&](auto n) KV_BODY { *at(n) = sum[n]; });
}

template <int ROWS>
void rows_product(const float* x, int64_t xs, int64_t r, const float* w, int64_t ld, int64_t lanes, float* out,
                  int64_t os) {
    int64_t j = 0;
    for (; j + WIDE * VECTOR <= lanes; j += WIDE * VECTOR) block_product<ROWS, WIDE>(x, xs, r, w + j, ld, out + j, os);
    for (; j + VECTOR <= lanes; j += VECTOR) block_product<ROWS, 1>(x, xs, r, w + j, ld, out + j, os);
}

// out [m, lanes] += x [m, r] * w [r, lanes]; lanes is a multiple of 16.
void product(const float* x, int64_t xs, int64_t m, int64_t r, const float* w, int64_t ld, int64_t lanes, float* out,
             int64_t os) {
    int64_t i = 0;
    for (; i + 4 <= m; i += 4) rows_product<4>(x + i * xs, xs, r, w, ld, lanes, out + i * os, os);
    x += i * xs, out += i * os;
    if (m - i == 3) rows_product<3>(x, xs, r, w, ld, lanes, out, os);
    if (m - i == 2) rows_product<2>(x, xs, r, w, ld, lanes, out, os);
    if (m - i == 1) rows_product<1>(x, xs, r, w, ld, lanes, out, os);
}

// Codes of one tile as bytes `[rows, 2 * half]`. HALF is `half`, or 0 where it is not known beforehand.
template <int HALF>
void unpack_bytes(const uint8_t* __restrict in, int64_t bits, int64_t rows, int64_t given, uint8_t* __restrict out) {
    const int64_t half = HALF ? HALF : given, w = 2 * half;
    if (bits == 8) {
        const uint8_t* upper = in + rows * half;
        for (int64_t r = 0; r < rows; r++)
#pragma GCC ivdep
            for (int64_t i = 0; i < half; i++) {
                const uint8_t low = in[r * half + i], high = upper[r * half + i];
                out[r * w + i] = (low & 15) | (high << 4);
                out[r * w + half + i] = (low >> 4) | (high & 240);
            }
    } else if (bits == 4) {
        for (int64_t r = 0; r < rows; r++)
#pragma GCC ivdep
            for (int64_t i = 0; i < half; i++) {
                out[r * w + i] = in[r * half + i] & 15;
                out[r * w + half + i] = in[r * half + i] >> 4;
            }
    } else {
        for (int64_t r = 0; r < rows / 2; r++)
#pragma GCC ivdep
            for (int64_t i = 0; i < half; i++) {
                const uint8_t byte = in[r * half + i];
                uint8_t *first = out + r * w + i, *second = first + rows / 2 * w;
                first[0] = byte & 3;
                first[half] = (byte >> 4) & 3;
                second[0] = (byte >> 2) & 3;
                second[half] = byte >> 6;
            }
        if (bits == 2) return;
        const uint8_t* plane = in + rows / 2 * half;
        for (int j = 0; j < 4; j++)
            for (int64_t r = 0; r < rows / 4; r++)
#pragma GCC ivdep
                for (int64_t i = 0; i < half; i++) {
                    const uint8_t byte = plane[r * half + i];
                    uint8_t* here = out + (r + j * (rows / 4)) * w + i;
                    here[0] |= ((byte >> j) & 1) << 2;
                    here[half] |= ((byte >> (j + 4)) & 1) << 2;
                }
    }
}

void unpack_bytes(const uint8_t* in, int64_t bits, int64_t rows, int64_t half, uint8_t* out) {
    if (half == 32) unpack_bytes<32>(in, bits, rows, half, out);
    else if (half == 16) unpack_bytes<16>(in, bits, rows, half, out);
    else unpack_bytes<0>(in, bits, rows, half, out);
}

inline float from_float8(uint8_t code) {
    const uint32_t bits = (uint32_t(code & 127) << 20) + (120u << 23);
    float value;
    std::memcpy(&value, &bits, 4);
    value = code & 0x78 ? value : (value - 0.0078125f) * 2.0f;  // subnormal: no leading one
    return code & 128 ? -value : value;
}

void to_levels(const uint8_t* __restrict codes, int64_t count, const Problem& p, float* __restrict out) {
    if (p.float8) {
        for (int64_t i = 0; i < count; i++) out[i] = from_float8(codes[i]);
        return;
    }
    if (p.table == nullptr) {
        const float centre = p.centre;
        for (int64_t i = 0; i < count; i++) out[i] = float(codes[i]) - centre;
        return;
    }
    int64_t i = 0;
    if (p.bits <= 4) {  // the table has 16 entries
#if defined(__AVX512F__)
        const __m512 table = _mm512_loadu_ps(p.table);
        for (; i + 16 <= count; i += 16) {
            const __m512i at = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i)));
            _mm512_storeu_ps(out + i, _mm512_permutexvar_ps(at, table));
        }
#elif defined(__AVX2__)
        const __m256 low = _mm256_loadu_ps(p.table), high = _mm256_loadu_ps(p.table + 8);
        for (; i + 8 <= count; i += 8) {
            const __m256i at = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i)));
            const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(at, 28));
            const __m256 a = _mm256_permutevar8x32_ps(low, at), b = _mm256_permutevar8x32_ps(high, at);
            _mm256_storeu_ps(out + i, _mm256_blendv_ps(a, b, upper));
        }
#endif
    }
    for (; i < count; i++) out[i] = p.table[codes[i]];
}

void scale_lanes(float* w, int64_t count, const float* scale, const float* zero) {
    if (zero == nullptr) {
        for (int64_t i = 0; i < count; i++) w[i] *= scale[i];
    } else {
        for (int64_t i = 0; i < count; i++) w[i] = w[i] * scale[i] + zero[i];
    }
}

void scale_run(float* w, int64_t count, float scale, float zero) {
    for (int64_t i = 0; i < count; i++) w[i] = w[i] * scale + zero;
}

struct Head {  // one (batch row, head)
    const float* x;
    const uint8_t* codes;
    const uint16_t *scale, *zero;

    Head(const Problem& p, int64_t index) {
        const int64_t b = index / p.heads, h = index % p.heads;
        x = p.x + b * p.x_b + h * p.x_h;
        codes = p.codes + b * p.codes_b + h * p.codes_h;
        scale = p.scale + b * p.scale_b + h * p.scale_h;
        zero = p.zero == nullptr ? nullptr : p.zero + b * p.zero_b + h * p.zero_h;
    }
};

void logits_float(const Problem& p, int64_t index, int64_t first, int64_t last) {
    const Head head(p, index);
    const int64_t d = p.dim, m = p.rows, tile = p.tile, groups = p.by_channel ? 1 : d / p.group;
    Scratch& memory = scratch();
    memory.reserve(d * tile * 5 + m * tile * 4 + 2 * (groups * tile + d) * 4 + 8 * ALIGN);
    uint8_t* codes = memory.take<uint8_t>(d * tile);
    float* w = memory.take<float>(d * tile);
    float* sums = memory.take<float>(m * tile);
    float* scale = memory.take<float>(groups * tile + d);
    float* zero = memory.take<float>(groups * tile + d);
    for (int64_t n = first; n < last; n++) {
        const int64_t start = n * tile, valid = std::min(tile, p.tokens - start);
        unpack_bytes(head.codes + n * p.codes_tile, p.bits, d, p.half, codes);
        to_levels(codes, d * tile, p, w);
        if (p.by_channel) {
            for (int64_t t = 0; t < valid;) {
                const int64_t group = (start + t) / p.group, run = std::min((group + 1) * p.group - start, valid) - t;
                from_half(head.scale + group * d, scale, d);
                if (head.zero) from_half(head.zero + group * d, zero, d);
                for (int64_t r = 0; r < d; r++) scale_run(w + r * tile + t, run, scale[r], head.zero ? zero[r] : 0.0f);
                t += run;
            }
        } else {
            by_group(head.scale + start * groups, valid, groups, tile, scale);
            if (head.zero) by_group(head.zero + start * groups, valid, groups, tile, zero);
            for (int64_t r = 0; r < d; r++) {
                const int64_t at = r / p.group * tile;
                scale_lanes(w + r * tile, tile, scale + at, head.zero ? zero + at : nullptr);
            }
        }
        std::memset(sums, 0, m * tile * 4);
        product(head.x, p.x_m, m, d, w, tile, tile, sums, tile);
        for (int64_t i = 0; i < m; i++)
            std::memcpy(p.out + (index * m + i) * p.tokens + start, sums + i * tile, valid * 4);
    }
}

void weighted_float(const Problem& p, int64_t index, int64_t first, int64_t last, float* out) {
    const Head head(p, index);
    const int64_t d = p.dim, m = p.rows, tile = p.tile, lanes = 2 * p.half, ld = round_up(d, 16);
    const int64_t groups = p.by_channel ? d : d / p.group;
    Scratch& memory = scratch();
    memory.reserve(tile * (lanes + ld * 4) + m * ld * 4 + 2 * groups * 4 + 8 * ALIGN);
    uint8_t* codes = memory.take<uint8_t>(tile * lanes);
    float* w = memory.take<float>(tile * ld);
    float* sums = memory.take<float>(m * ld);
    float* scale = memory.take<float>(groups);
    float* zero = memory.take<float>(groups);
    std::memset(sums, 0, m * ld * 4);
    std::memset(w, 0, tile * ld * 4);
    for (int64_t n = first; n < last; n++) {
        const int64_t start = n * tile, valid = std::min(tile, p.tokens - start);
        for (int64_t block = 0; block < d / lanes; block++) {
            unpack_bytes(head.codes + block * p.codes_block + n * p.codes_tile, p.bits, tile, p.half, codes);
            for (int64_t t = 0; t < valid; t++) to_levels(codes + t * lanes, lanes, p, w + t * ld + block * lanes);
        }
        for (int64_t t = 0; t < valid; t++) {
            const int64_t row = p.by_channel ? (start + t) / p.group : start + t;
            if (!p.by_channel || t == 0 || (start + t) % p.group == 0) {
                from_half(head.scale + row * groups, scale, groups);
                if (head.zero) from_half(head.zero + row * groups, zero, groups);
            }
            if (p.by_channel) {
                scale_lanes(w + t * ld, d, scale, head.zero ? zero : nullptr);
            } else {
                for (int64_t g = 0; g < groups; g++)
                    scale_run(w + t * ld + g * p.group, p.group, scale[g], head.zero ? zero[g] : 0.0f);
            }
        }
        product(head.x + start, p.x_m, m, valid, w, ld, ld, sums, ld);
    }
    for (int64_t i = 0; i < m; i++) std::memcpy(out + i * d, sums + i * ld, d * 4);
}

// -------------------------------------------------------------------------------------------------------- integer

#if KV_INTEGER

constexpr int64_t LANES = 64;       // of a tile: 4 vectors of 16
constexpr float REACH[4] = {0, 0, 32512.0f, 4160000.0f};  // of an activation of 2 or 3 bytes
constexpr int64_t PAGE = 512;        // tokens
constexpr float TINY = 1e-30f;      // activations below this are 0

inline __mmask16 first_lanes(int64_t count) { return count >= 16 ? 0xFFFF : count > 0 ? (1 << count) - 1 : 0; }

inline void prefetch(const void* from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch(static_cast<const char*>(from) + i, _MM_HINT_T0);
}

inline __m512 load_half(const uint16_t* in) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(in)));
}

// How codes become unsigned integers u: level = slope * u + base. A table has u of 16 bits, as two planes of bytes.
struct Levels {
    float slope, base;
    bool two;
    __m512i upper, lower;

    explicit Levels(const Problem& p) : slope(1.0f), base(-p.centre), two(p.table != nullptr) {
        upper = lower = _mm512_setzero_si512();
        if (!two) return;
        const float low = *std::min_element(p.table, p.table + 16), high = *std::max_element(p.table, p.table + 16);
        slope = high > low ? (high - low) / 65535.0f : 1.0f;
        base = low;
        alignas(16) uint8_t a[16], b[16];
        for (int i = 0; i < 16; i++) {
            const int u = int(std::lround((p.table[i] - low) / slope));
            a[i] = uint8_t(u >> 8), b[i] = uint8_t(u & 255);
        }
        upper = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(a)));
        lower = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(b)));
    }
};

// 4 rows of 32 bytes as the 4 bytes of each of 32 lanes.
struct Interleave {
    __m512i first, second;
    int64_t ahead = 0;  // bytes

    Interleave() {
        alignas(64) uint8_t at[64];
        for (int i = 0; i < 16; i++)
            for (int k = 0; k < 4; k++) at[4 * i + k] = uint8_t(32 * k + i);
        first = _mm512_load_si512(at);
        second = _mm512_add_epi8(first, _mm512_set1_epi8(16));
    }
    void operator()(const uint8_t* rows, __m512i& a, __m512i& b) const {
        // Ask for a later tile: caches hold little of a long context when a step begins, and the processor's own
        // guesses stop at the end of every page.
        _mm_prefetch(reinterpret_cast<const char*>(rows + ahead), _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(rows + ahead + 64), _MM_HINT_T0);
        const __m512i x = _mm512_loadu_si512(rows), y = _mm512_loadu_si512(rows + 64);
        a = _mm512_permutex2var_epi8(x, first, y);
        b = _mm512_permutex2var_epi8(x, second, y);
    }
};

template <bool TWO> inline void put(uint8_t* out, int64_t step, int vector, __m512i codes, const Levels& levels) {
    if (TWO) {
        uint8_t* here = out + step * 512 + vector * 128;
        _mm512_store_si512(here, _mm512_shuffle_epi8(levels.upper, codes));
        _mm512_store_si512(here + 64, _mm512_shuffle_epi8(levels.lower, codes));
    } else {
        _mm512_store_si512(out + step * 256 + vector * 64, codes);
    }
}

// Codes of one tile as `[rows / 4, 4 vectors, 16 lanes, 4 rows]`.
template <bool TWO>
void unpack_quads(const uint8_t* in, int64_t bits, int64_t rows, const Levels& levels, uint8_t* out) {
    static const Interleave made;
    Interleave quad = made;
    quad.ahead = round_up(4096, 8 * rows * bits);
    const __m512i m3 = _mm512_set1_epi8(3), m4 = _mm512_set1_epi8(4), m15 = _mm512_set1_epi8(15);
    const auto pick = [](__m512i mask, __m512i a, __m512i b) {  // bits of a where mask, else of b
        return _mm512_ternarylogic_epi32(mask, a, b, 0xCA);
    };
    __m512i v[2];
    if (bits == 4) {
        for (int64_t s = 0; s < rows / 4; s++) {
            quad(in + 128 * s, v[0], v[1]);
            for (int j = 0; j < 2; j++) {
                put<TWO>(out, s, j, _mm512_and_si512(v[j], m15), levels);
                put<TWO>(out, s, 2 + j, _mm512_and_si512(_mm512_srli_epi16(v[j], 4), m15), levels);
            }
        }
    } else if (bits == 8) {
        for (int64_t s = 0; s < rows / 4; s++) {
            __m512i u[2];
            quad(in + 128 * s, v[0], v[1]);
            quad(in + 32 * rows + 128 * s, u[0], u[1]);
            for (int j = 0; j < 2; j++) {
                put<TWO>(out, s, j, pick(m15, v[j], _mm512_slli_epi16(u[j], 4)), levels);
                put<TWO>(out, s, 2 + j, pick(m15, _mm512_srli_epi16(v[j], 4), u[j]), levels);
            }
        }
    } else if (bits == 2) {
        const int64_t far = rows / 8;
        for (int64_t s = 0; s < far; s++) {
            quad(in + 128 * s, v[0], v[1]);
            for (int j = 0; j < 2; j++) {
                put<TWO>(out, s, j, _mm512_and_si512(v[j], m3), levels);
                put<TWO>(out, s, 2 + j, _mm512_and_si512(_mm512_srli_epi16(v[j], 4), m3), levels);
                put<TWO>(out, s + far, j, _mm512_and_si512(_mm512_srli_epi16(v[j], 2), m3), levels);
                put<TWO>(out, s + far, 2 + j, _mm512_and_si512(_mm512_srli_epi16(v[j], 6), m3), levels);
            }
        }
    } else {
        const int64_t far = rows / 16;  // steps of a quarter of the rows
        for (int64_t s = 0; s < far; s++) {
            __m512i u[2], w[2];
            quad(in + 128 * s, v[0], v[1]);
            quad(in + 128 * (s + far), u[0], u[1]);
            quad(in + 16 * rows + 128 * s, w[0], w[1]);
            for (int j = 0; j < 2; j++)
                for (int high = 0; high < 2; high++) {
                    const __m512i a = high ? _mm512_srli_epi16(v[j], 4) : v[j];
                    const __m512i b = high ? _mm512_srli_epi16(u[j], 4) : u[j];
                    const __m512i top = high ? _mm512_srli_epi16(w[j], 4) : w[j];
                    const __m512i seven = _mm512_or_si512(m3, m4);
                    const auto join = [&](__m512i low, __m512i bit) {
                        return _mm512_and_si512(pick(m4, bit, low), seven);
                    };
                    const int at = 2 * high + j;
                    put<TWO>(out, s, at, join(a, _mm512_slli_epi16(top, 2)), levels);
                    put<TWO>(out, s + far, at, join(b, _mm512_slli_epi16(top, 1)), levels);
                    put<TWO>(out, s + 2 * far, at, join(_mm512_srli_epi16(a, 2), top), levels);
                    put<TWO>(out, s + 3 * far, at, join(_mm512_srli_epi16(b, 2), _mm512_srli_epi16(top, 1)), levels);
                }
        }
    }
}

// 32 activations as 8 steps of 4: upper bytes, (middle bytes,) lower bytes, all signed: n = 256 * upper + lower, or
// 65536 * upper + 256 * middle + lower.
struct Quantize {
    __m512i order[3], offset[2];
    __m512 magic[2];

    Quantize() {
        alignas(64) uint8_t at[3][64], shift[2][64];
        for (int s = 0; s < 8; s++)
            for (int k = 0; k < 4; k++) {
                for (int part = 0; part < 2; part++) {
                    at[0][8 * s + 4 * part + k] = uint8_t(4 * (4 * s + k) + 1 - part);
                    shift[0][8 * s + 4 * part + k] = part ? 0x80 : 0;
                }
                for (int part = 0; part < 4; part++) {
                    at[1 + s / 4][16 * (s % 4) + 4 * part + k] = uint8_t(4 * (4 * s + k) + (part < 3 ? 2 - part : 3));
                    shift[1][16 * (s % 4) + 4 * part + k] = part ? 0x80 : 0x40;
                }
            }
        for (int i = 0; i < 3; i++) order[i] = _mm512_load_si512(at[i]);
        for (int i = 0; i < 2; i++) offset[i] = _mm512_load_si512(shift[i]);
        // Adding 1.5 * 2^23 leaves a rounded integer in the low bits of a float; the rest makes lower bytes signed.
        magic[0] = _mm512_set1_ps(12582912.0f + 128.0f);
        magic[1] = _mm512_set1_ps(12582912.0f + 32896.0f);
    }

    template <int BYTES> void store(uint8_t* out, __m512 a, __m512 b, __m512 by_a, __m512 by_b) const {
        const __m512i x = _mm512_castps_si512(_mm512_fmadd_ps(a, by_a, magic[BYTES - 2]));
        const __m512i y = _mm512_castps_si512(_mm512_fmadd_ps(b, by_b, magic[BYTES - 2]));
        if (BYTES == 2) {
            _mm512_storeu_si512(out, _mm512_sub_epi8(_mm512_permutex2var_epi8(x, order[0], y), offset[0]));
        } else {
            _mm512_storeu_si512(out, _mm512_sub_epi8(_mm512_permutex2var_epi8(x, order[1], y), offset[1]));
            _mm512_storeu_si512(out + 64, _mm512_sub_epi8(_mm512_permutex2var_epi8(x, order[2], y), offset[1]));
        }
    }
};

int64_t bytes_of(const Problem& p) { return p.exact ? 3 : 2; }

// Bytes from one activation to the next: three are followed by an empty one.
constexpr int64_t width_of(int64_t bytes) { return bytes == 2 ? 2 : 4; }

const Quantize& quantizer() {
    static const Quantize made;
    return made;
}

// An asm statement rather than the intrinsic, because GCC copies the sum before and after each one.
inline void multiply_add(__m512i& sum, __m512i codes, __m512i activations) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(activations));
}

typedef int32_t Word __attribute__((may_alias, aligned(4)));

// raw [ROWS, V vectors] = activations times codes. Vectors of the second half of four take `act_b`. Products of equal
// weight share a sum; with codes of two bytes the lower bytes of both are not multiplied: that is below what is kept.
template <int ROWS, int V, bool TWO, int BYTES>
__attribute__((noinline)) void integer_product(const uint8_t* w, int64_t steps, const uint8_t* act,
                                               const uint8_t* act_b, int64_t as, float* raw) {
    __m512i sum[BYTES * ROWS * V];
    unrolled<BYTES * ROWS * V>([&](auto n) KV_BODY { sum[n] = _mm512_setzero_si512(); });
    constexpr int SIZE = TWO ? 128 : 64, PARTS = V == 4 ? 2 : 1, WIDTH = V / PARTS;
    for (int64_t s = 0; s < steps; s++) {
        __m512i u[V], t[V];
        unrolled<V>([&](auto j) KV_BODY {
            u[j] = _mm512_load_si512(w + s * 4 * SIZE + j * SIZE);
            if (TWO) t[j] = _mm512_load_si512(w + s * 4 * SIZE + j * SIZE + 64);
        });
        unrolled<ROWS * PARTS>([&](auto n) KV_BODY {
            constexpr int i = n / PARTS, part = n % PARTS;
            // Read word by word, so that each is broadcast by its load.
            const Word* four = reinterpret_cast<const Word*>((part ? act_b : act) + i * as + s * 4 * width_of(BYTES));
            unrolled<BYTES>([&](auto byte) KV_BODY {
                const __m512i a = _mm512_set1_epi32(four[byte]);
                unrolled<WIDTH>([&](auto k) KV_BODY {
                    constexpr int j = part * WIDTH + k;
                    multiply_add(sum[byte * ROWS * V + i * V + j], u[j], a);
                    if (TWO && byte + 1 < BYTES) multiply_add(sum[(byte + 1) % BYTES * ROWS * V + i * V + j], t[j], a);
                });
            });
        });
    }
    const __m512 base = _mm512_set1_ps(256.0f);
    unrolled<ROWS * V>([&](auto n) KV_BODY {
        __m512 all = _mm512_cvtepi32_ps(sum[n]);
        unrolled<BYTES - 1>([&](auto byte) KV_BODY {
            all = _mm512_fmadd_ps(all, base, _mm512_cvtepi32_ps(sum[(byte + 1) * ROWS * V + n]));
        });
        if (TWO) all = _mm512_mul_ps(all, base);
        _mm512_storeu_ps(raw + n / V * LANES + n % V * 16, all);
    });
}

// raw [rows <= 4, 64]. `act[v]` are the activations of vector v of lanes.
template <int ROWS, bool TWO, int BYTES>
void integer_rows(const uint8_t* w, int64_t steps, const uint8_t* const act[4], int64_t as, float* raw) {
    constexpr int SIZE = TWO ? 128 : 64;
    if (act[0] != act[1] || act[2] != act[3]) {
        for (int j = 0; j < 4; j++)
            integer_product<ROWS, 1, TWO, BYTES>(w + j * SIZE, steps, act[j], nullptr, as, raw + 16 * j);
    } else if (ROWS == 1 || (ROWS == 2 && BYTES == 2)) {
        integer_product<ROWS, 4, TWO, BYTES>(w, steps, act[0], act[2], as, raw);
    } else {
        integer_product<ROWS, 2, TWO, BYTES>(w, steps, act[0], nullptr, as, raw);
        integer_product<ROWS, 2, TWO, BYTES>(w + 2 * SIZE, steps, act[2], nullptr, as, raw + 32);
    }
}

template <bool TWO, int BYTES>
void integer_rows(const uint8_t* w, int64_t steps, const uint8_t* const act[4], int64_t as, int64_t rows, float* raw) {
    switch (rows) {
        case 1: return integer_rows<1, TWO, BYTES>(w, steps, act, as, raw);
        case 2: return integer_rows<2, TWO, BYTES>(w, steps, act, as, raw);
        case 3: return integer_rows<3, TWO, BYTES>(w, steps, act, as, raw);
        default: return integer_rows<4, TWO, BYTES>(w, steps, act, as, raw);
    }
}

void integer_rows(const uint8_t* w, int64_t steps, const uint8_t* const act[4], int64_t as, int64_t rows, bool two,
                  int64_t bytes, float* raw) {
    if (bytes == 3) {
        if (two) integer_rows<true, 3>(w, steps, act, as, rows, raw);
        else integer_rows<false, 3>(w, steps, act, as, rows, raw);
    } else {
        if (two) integer_rows<true, 2>(w, steps, act, as, rows, raw);
        else integer_rows<false, 2>(w, steps, act, as, rows, raw);
    }
}

void unpack_tile(const uint8_t* in, int64_t bits, int64_t rows, const Levels& levels, uint8_t* out) {
    if (levels.two) unpack_quads<true>(in, bits, rows, levels, out);
    else unpack_quads<false>(in, bits, rows, levels, out);
}

// What one step of an integer activation is worth, if the largest of them is `largest`.
float unit_of(float largest, int64_t bytes) { return largest > TINY ? largest / REACH[bytes] : 1.0f; }

// Rows of float numbers as integer activations. `count` is a multiple of 32. Returns the worth of one step.
template <int BYTES> float quantize_row(const float* x, int64_t count, uint8_t* out) {
    const Quantize& quantize = quantizer();
    __m512 top = _mm512_setzero_ps();
    for (int64_t i = 0; i < count; i += 16) top = _mm512_max_ps(top, _mm512_abs_ps(_mm512_loadu_ps(x + i)));
    const float unit = unit_of(_mm512_reduce_max_ps(top), BYTES);
    const __m512 by = _mm512_set1_ps(1.0f / unit);
    for (int64_t i = 0; i < count; i += 32)
        quantize.store<BYTES>(out + width_of(BYTES) * i, _mm512_loadu_ps(x + i), _mm512_loadu_ps(x + i + 16), by, by);
    return unit;
}

float quantize_row(const float* x, int64_t count, int64_t bytes, uint8_t* out) {
    return bytes == 3 ? quantize_row<3>(x, count, out) : quantize_row<2>(x, count, out);
}

// Queries `x` (in units) times the scales of one group as integer activations, and their sums of x * added * factor.
template <int ROWS, int BYTES>
void fold_rows(const float* x, const float* unit, float factor, int64_t padded, const float* scale, const float* added,
               uint8_t* act, float* sums) {
    const Quantize quantize = quantizer();
    __m512 sum[ROWS];
    unrolled<ROWS>([&](auto i) KV_BODY { sum[i] = _mm512_setzero_ps(); });
    for (int64_t r = 0; r < padded; r += 32) {
        const __m512 s0 = _mm512_load_ps(scale + r), s1 = _mm512_load_ps(scale + r + 16);
        const __m512 z0 = _mm512_load_ps(added + r), z1 = _mm512_load_ps(added + r + 16);
        unrolled<ROWS>([&](auto i) KV_BODY {
            const __m512 a = _mm512_load_ps(x + i * padded + r), b = _mm512_load_ps(x + i * padded + r + 16);
            quantize.store<BYTES>(act + width_of(BYTES) * (i * padded + r), a, b, s0, s1);
            sum[i] = _mm512_fmadd_ps(b, z1, _mm512_fmadd_ps(a, z0, sum[i]));
        });
    }
    unrolled<ROWS>([&](auto i) KV_BODY { sums[i] = _mm512_reduce_add_ps(sum[i]) * unit[i] * factor; });
}

template <int BYTES>
void fold_all(int64_t m, const float* x, const float* unit, float factor, int64_t padded, const float* scale,
              const float* added, uint8_t* act, float* sums) {
    for (int64_t i = 0; i < m; i += 4, x += 4 * padded, act += 4 * padded * width_of(BYTES), unit += 4, sums += 4) {
        switch (std::min<int64_t>(4, m - i)) {
            case 1: fold_rows<1, BYTES>(x, unit, factor, padded, scale, added, act, sums); break;
            case 2: fold_rows<2, BYTES>(x, unit, factor, padded, scale, added, act, sums); break;
            case 3: fold_rows<3, BYTES>(x, unit, factor, padded, scale, added, act, sums); break;
            default: fold_rows<4, BYTES>(x, unit, factor, padded, scale, added, act, sums);
        }
    }
}

bool integer_levels(const Problem& p) { return !p.float8 && (p.table == nullptr || p.bits <= 4); }

bool integer_keys(const Problem& p) {
    const bool shape = p.tile == 64 && p.half == 32 && p.dim % 16 == 0;
    return shape && integer_levels(p) && (p.by_channel ? p.group % 16 == 0 : p.group % 4 == 0);
}

bool integer_values(const Problem& p) {
    const bool shape = p.tile == 64 && p.half == 32 && p.dim % 64 == 0;
    if (!shape || !integer_levels(p)) return false;
    return p.by_channel ? p.group % 64 == 0 || (64 % p.group == 0 && p.group % 4 == 0) : p.group % 16 == 0;
}

// Logits where a scale belongs to a channel and a group of tokens: it goes into the query.
void logits_folded(const Problem& p, int64_t index, int64_t first, int64_t last) {
    const Head head(p, index);
    const Levels levels(p);
    const int64_t d = p.dim, m = p.rows, padded = round_up(d, 32), bytes = bytes_of(p), as = width_of(bytes) * padded;
    const int64_t slots = p.group % 32 == 0 ? 2 : 4, wide = 64 / slots;
    Scratch& memory = scratch();
    memory.reserve(d * 128 + slots * m * (as + 8) + (2 * m + 3) * padded * 4 + m * 4 + 4 * 64 * 4 + 16 * ALIGN);
    uint8_t* codes = memory.take<uint8_t>(d * (levels.two ? 128 : 64));
    uint8_t* act = memory.take<uint8_t>(slots * m * as);
    float* step = memory.take<float>(m);
    float* base = memory.take<float>(slots * m);
    float* q = memory.take<float>(m * padded);
    float* x = memory.take<float>(m * padded);
    float* unit = memory.take<float>(m);
    float* top = memory.take<float>(padded);
    float* scale = memory.take<float>(padded);
    float* zero = memory.take<float>(padded);
    float* raw = memory.take<float>(4 * LANES);
    std::memset(top, 0, padded * 4);
    std::memset(q, 0, m * padded * 4);
    std::memset(scale, 0, padded * 4);
    std::memset(zero, 0, padded * 4);
    for (int64_t i = 0; i < m; i++) std::memcpy(q + i * padded, head.x + i * p.x_m, d * 4);
    int64_t held[4] = {-1, -1, -1, -1};
    for (int64_t n = first; n < last; n++) {
        const int64_t start = n * LANES, valid = std::min(LANES, p.tokens - start);
        if (n == first || start % PAGE == 0) {
            // The unit of the activations holds for all groups of a page: it needs no look at each of their products.
            const int64_t end = std::min(std::min(start / PAGE * PAGE + PAGE, last * LANES), p.tokens);
            std::fill(held, held + 4, -1);
            std::memset(top, 0, d * 4);
            for (int64_t group = start / p.group; group <= (end - 1) / p.group; group++)
                for (int64_t r = 0; r < d; r += 16) {
                    const __m512 one = _mm512_abs_ps(load_half(head.scale + group * d + r));
                    _mm512_store_ps(top + r, _mm512_max_ps(_mm512_load_ps(top + r), one));
                }
            for (int64_t i = 0; i < m; i++) {
                __m512 most = _mm512_setzero_ps();
                for (int64_t r = 0; r < d; r += 16) {
                    const __m512 product = _mm512_mul_ps(_mm512_load_ps(q + i * padded + r), _mm512_load_ps(top + r));
                    most = _mm512_max_ps(most, _mm512_abs_ps(product));
                }
                unit[i] = unit_of(_mm512_reduce_max_ps(most), bytes);
                step[i] = levels.slope * unit[i];
                const __m512 by = _mm512_set1_ps(1.0f / unit[i]);
                for (int64_t r = 0; r < padded; r += 16)
                    _mm512_store_ps(x + i * padded + r, _mm512_mul_ps(_mm512_load_ps(q + i * padded + r), by));
            }
        }
        int64_t use[4];
        for (int64_t slot = 0; slot < slots; slot++) {
            const int64_t group = (start + slot * wide) / p.group;
            use[slot] = slot;
            if (slot * wide >= valid) {  // no such group: whatever the slot holds gives lanes that are not written
                use[slot] = 0;
                continue;
            }
            if (slot > 0 && held[use[slot - 1]] == group) {
                use[slot] = use[slot - 1];
                continue;
            }
            if (held[slot] == group) continue;
            held[slot] = group;
            from_half(head.scale + group * d, scale, d);
            prefetch(head.scale + (group + std::max<int64_t>(1, PAGE / p.group)) * d, 2 * d);
            if (head.zero) {
                from_half(head.zero + group * d, zero, d);
                prefetch(head.zero + (group + 8) * d, 2 * d);
            }
            const float* added = head.zero ? zero : scale;
            const float factor = head.zero ? 1.0f : levels.base;
            float* sums = base + slot * m;
            uint8_t* here = act + slot * m * as;
            if (bytes == 3) fold_all<3>(m, x, unit, factor, padded, scale, added, here, sums);
            else fold_all<2>(m, x, unit, factor, padded, scale, added, here, sums);
        }
        const int64_t slot_of[4] = {use[0], use[slots / 4], use[slots / 2], use[slots * 3 / 4]};
        unpack_tile(head.codes + n * p.codes_tile, p.bits, d, levels, codes);
        for (int64_t i = 0; i < m; i += 4) {
            const int64_t rows = std::min<int64_t>(4, m - i);
            const uint8_t* of[4];
            for (int j = 0; j < 4; j++) of[j] = act + (slot_of[j] * m + i) * as;
            integer_rows(codes, d / 4, of, as, rows, levels.two, bytes, raw);
            for (int64_t k = 0; k < rows; k++) {
                float* out = p.out + (index * m + i + k) * p.tokens + start;
                const __m512 by = _mm512_set1_ps(step[i + k]);
                const float* mine = base + i + k;
                unrolled<4>([&](auto j) KV_BODY {
                    const __m512 add = _mm512_set1_ps(mine[slot_of[j] * m]);
                    const __m512 sum = _mm512_fmadd_ps(_mm512_load_ps(raw + k * LANES + 16 * j), by, add);
                    if (valid == LANES) _mm512_storeu_ps(out + 16 * j, sum);
                    else _mm512_mask_storeu_ps(out + 16 * j, first_lanes(valid - 16 * j), sum);
                });
            }
        }
    }
}

// Logits where a scale belongs to a token and a group of channels: it multiplies what those channels give.
void logits_scaled(const Problem& p, int64_t index, int64_t first, int64_t last) {
    const Head head(p, index);
    const Levels levels(p);
    const int64_t d = p.dim, m = p.rows, padded = round_up(d, 32), groups = d / p.group;
    const int64_t bytes = bytes_of(p), as = width_of(bytes) * padded;
    Scratch& memory = scratch();
    memory.reserve(d * 128 + m * (as + 4 + groups * 4) + padded * 4 + 2 * groups * 64 * 4 + 8 * 64 * 4 + 16 * ALIGN);
    uint8_t* codes = memory.take<uint8_t>(d * (levels.two ? 128 : 64));
    uint8_t* act = memory.take<uint8_t>(m * as);
    float* step = memory.take<float>(m);
    float* sums = memory.take<float>(m * groups);
    float* x = memory.take<float>(padded);
    float* scale = memory.take<float>(groups * LANES);
    float* zero = memory.take<float>(groups * LANES);
    float* raw = memory.take<float>(4 * LANES);
    float* total = memory.take<float>(4 * LANES);
    std::memset(x, 0, padded * 4);
    for (int64_t i = 0; i < m; i++) {
        std::memcpy(x, head.x + i * p.x_m, d * 4);
        step[i] = levels.slope * quantize_row(x, padded, bytes, act + i * as);
        for (int64_t g = 0; g < groups; g++) {
            float sum = 0;
            for (int64_t r = 0; r < p.group; r++) sum += x[g * p.group + r];
            sums[i * groups + g] = sum;
        }
    }
    const int64_t size = levels.two ? 512 : 256;
    for (int64_t n = first; n < last; n++) {
        const int64_t start = n * LANES, valid = std::min(LANES, p.tokens - start);
        by_group(head.scale + start * groups, valid, groups, LANES, scale);
        prefetch(head.scale + (start + 3 * LANES) * groups, 2 * LANES * groups);
        if (head.zero) {
            by_group(head.zero + start * groups, valid, groups, LANES, zero);
            prefetch(head.zero + (start + 3 * LANES) * groups, 2 * LANES * groups);
        }
        unpack_tile(head.codes + n * p.codes_tile, p.bits, d, levels, codes);
        for (int64_t i = 0; i < m; i += 4) {
            const int64_t rows = std::min<int64_t>(4, m - i);
            for (int64_t g = 0; g < groups; g++) {
                const uint8_t* mine = act + i * as + g * p.group * width_of(bytes);
                const uint8_t* of[4] = {mine, mine, mine, mine};
                integer_rows(codes + g * (p.group / 4) * size, p.group / 4, of, as, rows, levels.two, bytes, raw);
                for (int64_t k = 0; k < rows; k++) {
                    const __m512 by = _mm512_set1_ps(step[i + k]), whole = _mm512_set1_ps(sums[(i + k) * groups + g]);
                    const __m512 base = _mm512_mul_ps(whole, _mm512_set1_ps(head.zero ? 0.0f : levels.base));
                    for (int j = 0; j < 4; j++) {
                        float* here = total + k * LANES + 16 * j;
                        __m512 sum = g == 0 ? _mm512_setzero_ps() : _mm512_load_ps(here);
                        const __m512 part = _mm512_fmadd_ps(_mm512_load_ps(raw + k * LANES + 16 * j), by, base);
                        sum = _mm512_fmadd_ps(part, _mm512_load_ps(scale + g * LANES + 16 * j), sum);
                        if (head.zero) sum = _mm512_fmadd_ps(whole, _mm512_load_ps(zero + g * LANES + 16 * j), sum);
                        _mm512_store_ps(here, sum);
                    }
                }
            }
            for (int64_t k = 0; k < rows; k++)
                std::memcpy(p.out + (index * m + i + k) * p.tokens + start, total + k * LANES, valid * 4);
        }
    }
}

// Sums where a scale belongs to a token and a group of channels: it goes into the probabilities.
void weighted_folded(const Problem& p, int64_t index, int64_t first, int64_t last, float* out) {
    const Head head(p, index);
    const Levels levels(p);
    const Quantize quantize = quantizer();
    const int64_t d = p.dim, m = p.rows, groups = d / p.group, bytes = bytes_of(p), as = width_of(bytes) * LANES;
    Scratch& memory = scratch();
    memory.reserve(LANES * 128 + groups * m * (as + 68) + groups * (4 + 8 * LANES) + 16 * LANES + 16 * ALIGN);
    uint8_t* codes = memory.take<uint8_t>(LANES * (levels.two ? 128 : 64));
    uint8_t* act = memory.take<uint8_t>(groups * m * as);
    float* step = memory.take<float>(groups * m);
    float* base = memory.take<float>(groups * m * 16);
    float* unit = memory.take<float>(groups);
    float* scale = memory.take<float>(groups * LANES);
    float* zero = memory.take<float>(groups * LANES);
    float* raw = memory.take<float>(4 * LANES);
    std::memset(base, 0, groups * m * 64);
    std::memset(out, 0, m * d * 4);
    for (int64_t n = first; n < last; n++) {
        const int64_t start = n * LANES, valid = std::min(LANES, p.tokens - start);
        by_group(head.scale + start * groups, valid, groups, LANES, scale);
        prefetch(head.scale + (start + 3 * LANES) * groups, 2 * LANES * groups);
        if (head.zero) {
            by_group(head.zero + start * groups, valid, groups, LANES, zero);
            prefetch(head.zero + (start + 3 * LANES) * groups, 2 * LANES * groups);
        }
        for (int64_t g = 0; g < groups; g++) {  // scales in units of the largest
            __m512 most = _mm512_setzero_ps();
            for (int j = 0; j < 4; j++)
                most = _mm512_max_ps(most, _mm512_abs_ps(_mm512_load_ps(scale + g * LANES + 16 * j)));
            const float largest = _mm512_reduce_max_ps(most);
            unit[g] = largest > 0 ? largest : 1.0f;
            const __m512 by = _mm512_set1_ps(1.0f / unit[g]);
            for (int j = 0; j < 4; j++) {
                float* here = scale + g * LANES + 16 * j;
                _mm512_store_ps(here, _mm512_mul_ps(_mm512_load_ps(here), by));
            }
        }
        float any = 0;
        for (int64_t i = 0; i < m; i++) {
            __m512 prob[4], x[4], most = _mm512_setzero_ps();
            for (int j = 0; j < 4; j++) {
                const __mmask16 mask = first_lanes(valid - 16 * j);
                const float* from = head.x + i * p.x_m + start + 16 * j;
                _mm_prefetch(reinterpret_cast<const char*>(from + 2 * LANES), _MM_HINT_T0);
                prob[j] = _mm512_maskz_loadu_ps(mask, from);
                most = _mm512_max_ps(most, _mm512_abs_ps(prob[j]));
            }
            const float largest = _mm512_reduce_max_ps(most), own = unit_of(largest, bytes);
            any = std::max(any, largest);
            const __m512 by = _mm512_set1_ps(1.0f / own);
            for (int j = 0; j < 4; j++) x[j] = _mm512_mul_ps(prob[j], by);
            for (int64_t g = 0; g < groups; g++) {
                __m512 s[4], sum = _mm512_load_ps(base + (g * m + i) * 16);
                for (int j = 0; j < 4; j++) s[j] = _mm512_load_ps(scale + g * LANES + 16 * j);
                if (head.zero) {
                    for (int j = 0; j < 4; j++)
                        sum = _mm512_fmadd_ps(prob[j], _mm512_load_ps(zero + g * LANES + 16 * j), sum);
                } else {
                    __m512 part = _mm512_mul_ps(prob[0], s[0]);
                    for (int j = 1; j < 4; j++) part = _mm512_fmadd_ps(prob[j], s[j], part);
                    sum = _mm512_fmadd_ps(part, _mm512_set1_ps(unit[g]), sum);
                }
                _mm512_store_ps(base + (g * m + i) * 16, sum);
                uint8_t* here = act + (g * m + i) * as;
                if (bytes == 3) {
                    quantize.store<3>(here, x[0], x[1], s[0], s[1]);
                    quantize.store<3>(here + 128, x[2], x[3], s[2], s[3]);
                } else {
                    quantize.store<2>(here, x[0], x[1], s[0], s[1]);
                    quantize.store<2>(here + 64, x[2], x[3], s[2], s[3]);
                }
                step[g * m + i] = own * unit[g] * levels.slope;
            }
        }
        if (!(any > TINY)) continue;  // a tile that nobody sees
        for (int64_t block = 0; block < d / LANES; block++) {
            unpack_tile(head.codes + block * p.codes_block + n * p.codes_tile, p.bits, LANES, levels, codes);
            for (int64_t i = 0; i < m; i += 4) {
                const int64_t rows = std::min<int64_t>(4, m - i);
                int64_t group[4];
                const uint8_t* of[4];
                for (int j = 0; j < 4; j++) {
                    group[j] = (block * LANES + 16 * j) / p.group;
                    of[j] = act + (group[j] * m + i) * as;
                }
                integer_rows(codes, LANES / 4, of, as, rows, levels.two, bytes, raw);
                for (int64_t k = 0; k < rows; k++) {
                    float* here = out + (i + k) * d + block * LANES;
                    const float* mine = step + i + k;
                    unrolled<4>([&](auto j) KV_BODY {
                        const __m512 by = _mm512_set1_ps(mine[group[j] * m]), sum = _mm512_loadu_ps(here + 16 * j);
                        const __m512 more = _mm512_load_ps(raw + k * LANES + 16 * j);
                        _mm512_storeu_ps(here + 16 * j, _mm512_fmadd_ps(more, by, sum));
                    });
                }
            }
        }
    }
    for (int64_t i = 0; i < m; i++)
        for (int64_t g = 0; g < groups; g++) {
            const float sum = _mm512_reduce_add_ps(_mm512_load_ps(base + (g * m + i) * 16));
            const float add = sum * (head.zero ? 1.0f : levels.base);
            for (int64_t c = 0; c < p.group; c++) out[i * d + g * p.group + c] += add;
        }
}

// Sums where a scale belongs to a channel and a group of tokens: it multiplies what those tokens give.
void weighted_scaled(const Problem& p, int64_t index, int64_t first, int64_t last, float* out) {
    const Head head(p, index);
    const Levels levels(p);
    const int64_t d = p.dim, m = p.rows, run = std::min(p.group, LANES), runs = LANES / run;
    const int64_t bytes = bytes_of(p), as = width_of(bytes) * LANES;
    Scratch& memory = scratch();
    memory.reserve(LANES * 128 + m * (as + 4 + runs * 4) + 2 * d * 4 + 5 * LANES * 4 + 16 * ALIGN);
    uint8_t* codes = memory.take<uint8_t>(LANES * (levels.two ? 128 : 64));
    uint8_t* act = memory.take<uint8_t>(m * as);
    float* step = memory.take<float>(m);
    float* sums = memory.take<float>(m * runs);
    float* scale = memory.take<float>(d);
    float* zero = memory.take<float>(d);
    float* raw = memory.take<float>(4 * LANES);
    float* x = memory.take<float>(LANES);
    std::memset(out, 0, m * d * 4);
    const int64_t size = levels.two ? 512 : 256;
    for (int64_t n = first; n < last; n++) {
        const int64_t start = n * LANES, valid = std::min(LANES, p.tokens - start);
        std::memset(x, 0, LANES * 4);
        for (int64_t i = 0; i < m; i++) {
            std::memcpy(x, head.x + i * p.x_m + start, valid * 4);
            step[i] = levels.slope * quantize_row(x, LANES, bytes, act + i * as);
            for (int64_t part = 0; part < runs; part++) {
                float sum = 0;
                for (int64_t r = 0; r < run; r++) sum += x[part * run + r];
                sums[i * runs + part] = sum;
            }
        }
        for (int64_t block = 0; block < d / LANES; block++) {
            unpack_tile(head.codes + block * p.codes_block + n * p.codes_tile, p.bits, LANES, levels, codes);
            for (int64_t part = 0; part < runs && part * run < valid; part++) {
                const int64_t group = (start + part * run) / p.group;
                from_half(head.scale + group * d + block * LANES, scale, LANES);
                if (head.zero) from_half(head.zero + group * d + block * LANES, zero, LANES);
                for (int64_t i = 0; i < m; i += 4) {
                    const int64_t rows = std::min<int64_t>(4, m - i);
                    const uint8_t* mine = act + i * as + part * run * width_of(bytes);
                    const uint8_t* of[4] = {mine, mine, mine, mine};
                    integer_rows(codes + part * (run / 4) * size, run / 4, of, as, rows, levels.two, bytes, raw);
                    for (int64_t k = 0; k < rows; k++) {
                        const __m512 whole = _mm512_set1_ps(sums[(i + k) * runs + part]);
                        const __m512 base = _mm512_mul_ps(whole, _mm512_set1_ps(head.zero ? 0.0f : levels.base));
                        for (int j = 0; j < 4; j++) {
                            float* here = out + (i + k) * d + block * LANES + 16 * j;
                            const __m512 value = _mm512_fmadd_ps(_mm512_load_ps(raw + k * LANES + 16 * j),
                                                                 _mm512_set1_ps(step[i + k]), base);
                            __m512 sum = _mm512_fmadd_ps(value, _mm512_load_ps(scale + 16 * j), _mm512_loadu_ps(here));
                            if (head.zero) sum = _mm512_fmadd_ps(whole, _mm512_load_ps(zero + 16 * j), sum);
                            _mm512_storeu_ps(here, sum);
                        }
                    }
                }
            }
        }
    }
}

#endif

void logits_range(const Problem& p, int64_t index, int64_t first, int64_t last) {
#if KV_INTEGER
    if (integer_keys(p))
        return p.by_channel ? logits_folded(p, index, first, last) : logits_scaled(p, index, first, last);
#endif
    logits_float(p, index, first, last);
}

void weighted_range(const Problem& p, int64_t index, int64_t first, int64_t last, float* out) {
#if KV_INTEGER
    if (integer_values(p))
        return p.by_channel ? weighted_scaled(p, index, first, last, out) : weighted_folded(p, index, first, last, out);
#endif
    weighted_float(p, index, first, last, out);
}

// Parts into which the tokens of a head are cut so that every thread has something to do, none below 16 tiles.
int64_t parts_of(const Problem& p, int64_t tiles) {
    if (p.threads <= 1) return 1;
    const int64_t wanted = (4 * p.threads + p.batch * p.heads - 1) / (p.batch * p.heads);
    return std::max<int64_t>(1, std::min(wanted, tiles / 16));
}

}  // namespace

extern "C" int kv_integer() { return KV_INTEGER; }

extern "C" void kv_logits(const Problem* problem) {
    const Problem& p = *problem;
    const int64_t tiles = (p.tokens + p.tile - 1) / p.tile, parts = parts_of(p, tiles);
    const int64_t tasks = p.batch * p.heads * parts;
#ifdef _OPENMP
#pragma omp parallel for schedule(dynamic) num_threads(int(p.threads)) if (p.threads > 1 && tasks > 1)
#endif
    for (int64_t task = 0; task < tasks; task++) {
        const int64_t part = task % parts;
        logits_range(p, task / parts, tiles * part / parts, tiles * (part + 1) / parts);
    }
}

extern "C" void kv_weighted(const Problem* problem) {
    const Problem& p = *problem;
    const int64_t tiles = (p.tokens + p.tile - 1) / p.tile, parts = parts_of(p, tiles);
    const int64_t tasks = p.batch * p.heads * parts;
    const int64_t size = p.rows * p.dim;
    std::vector<float> partial(parts > 1 ? tasks * size : 0);
    float* into = parts > 1 ? partial.data() : p.out;
#ifdef _OPENMP
#pragma omp parallel for schedule(dynamic) num_threads(int(p.threads)) if (p.threads > 1 && tasks > 1)
#endif
    for (int64_t task = 0; task < tasks; task++) {
        const int64_t part = task % parts;
        weighted_range(p, task / parts, tiles * part / parts, tiles * (part + 1) / parts, into + task * size);
    }
    if (parts == 1) return;
    for (int64_t index = 0; index < p.batch * p.heads; index++) {
        float* out = p.out + index * size;
        std::copy_n(into + index * parts * size, size, out);
        for (int64_t part = 1; part < parts; part++)
            for (int64_t i = 0; i < size; i++) out[i] += into[(index * parts + part) * size + i];
    }
}
