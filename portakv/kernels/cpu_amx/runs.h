// Number formats, and what is done to one run of elements. Part of kernels.cpp, in whose namespace it stands.
#pragma once

#include "kernels.h"

#include <cstddef>

#ifdef __SSE2__
#include <immintrin.h>
#endif

namespace portakv {
namespace {

// Tensors made from raw buffers may be misaligned. A pointer to such a type is not declared `auto`, which drops that.
template <int W>
struct Word;
template <>
struct Word<8> {
    typedef uint8_t Bits;
};
template <>
struct Word<16> {
    typedef uint16_t Bits __attribute__((aligned(1), may_alias));
};
template <>
struct Word<32> {
    typedef uint32_t Bits __attribute__((aligned(1), may_alias));
};

inline uint32_t bits_of(float x) {
    uint32_t b;
    __builtin_memcpy(&b, &x, 4);
    return b;
}

inline float float_of(uint32_t b) {
    float x;
    __builtin_memcpy(&x, &b, 4);
    return x;
}

constexpr uint32_t kMagnitude = 0x7FFFFFFF;
constexpr uint32_t kInf = 0x7F800000;

// For values below 2^31: SSE2 and AVX2 compare signed integers only.
inline bool above(uint32_t a, uint32_t b) { return int32_t(a) > int32_t(b); }

// ---- number formats: `widen` gives the bits of a float32, `narrow` takes them -------------------------------------

struct F32 : Word<32> {
    static uint32_t widen(uint32_t q) { return q; }
    static uint32_t narrow(uint32_t b) { return above(b & kMagnitude, kInf) ? 0x7FC00000 : b; }
};

struct BF16 : Word<16> {
    static uint32_t widen(uint32_t q) { return q << 16; }
    static uint32_t narrow(uint32_t b) {
        uint32_t rounded = (b + 0x7FFF + ((b >> 16) & 1)) >> 16;
        return above(b & kMagnitude, kInf) ? 0x7FC0 : rounded;
    }
};

enum class Special { ieee, fn, fnuz };  // infinities and NaNs; one NaN magnitude; the NaN is negative zero's code

// A float with `M` mantissa bits, exponent bias `B` and a sign in bit `W - 1`. Magnitudes are cut to `Limit` (float32
// bits), the largest finite value or, for float16, 2^16: the code that follows the largest finite one is infinity.
template <int W, int M, int B, uint32_t Limit, uint32_t Nan, Special S>
struct Small : Word<W> {
    static constexpr int kMantissa = M;
    static constexpr uint32_t kLimit = Limit;
    static constexpr uint32_t kNan = Nan;
    static constexpr bool kFnuz = S == Special::fnuz;
    static constexpr uint32_t kSign = 1u << (W - 1);
    static constexpr uint32_t kMinNormal = uint32_t(128 - B) << 23;
    // Added to a float of exponent e, 2^(e + 23 - M) leaves it rounded to nearest even, as a multiple of 2^(e - M), in
    // the low bits of the sum. The exponent's part of the code is e >> (23 - M) less that of the smallest
    // normal; the term below takes that off in the same addition (an even number, so ties still go to even).
    static constexpr uint32_t kMagic = (uint32_t(23 - M) << 23) + ((0u - (kMinNormal >> (23 - M))) & (kSign - 1));

    static uint32_t narrow(uint32_t b) {
        uint32_t all = b & kMagnitude;
        uint32_t mag = above(Limit, all) ? all : Limit;
        uint32_t exponent = mag & kInf;
        exponent = above(exponent, kMinNormal) ? exponent : kMinNormal;
        uint32_t sum = bits_of(float_of(mag) + float_of(exponent + kMagic));
        uint32_t code = (sum + (exponent >> (23 - M))) & (kSign - 1);
        uint32_t sign = (b >> (32 - W)) & kSign;
        if (S == Special::fnuz) sign = code ? sign : 0;
        return above(all, kInf) ? Nan : code | sign;
    }

    static uint32_t widen(uint32_t q) {
        uint32_t mag = q & (kSign - 1);
        uint32_t normal = (mag << (23 - M)) + (uint32_t(127 - B) << 23);
        uint32_t subnormal = bits_of(float_of(normal + (1u << 23)) - float_of(kMinNormal));
        uint32_t value = above(mag, (1u << M) - 1) ? normal : subnormal;
        if (S == Special::ieee) value = above(mag, (31u << M) - 1) ? normal + (uint32_t(127 - B) << 23) : value;
        value |= (q & kSign) << (32 - W);
        if (S == Special::fn) value = mag == kSign - 1 ? 0x7FC00000 : value;
        if (S == Special::fnuz) value = q == kSign ? 0x7FC00000 : value;
        return value;
    }
};

using F16 = Small<16, 10, 15, 0x47800000, 0x7E00, Special::ieee>;
using E4M3FN = Small<8, 3, 7, 0x43E00000, 0x7F, Special::fn>;
using E4M3FNUZ = Small<8, 3, 8, 0x43700000, 0x80, Special::fnuz>;
using E5M2 = Small<8, 2, 15, 0x47600000, 0x7F, Special::ieee>;
using E5M2FNUZ = Small<8, 2, 16, 0x47600000, 0x80, Special::fnuz>;

// ---- one run of elements ------------------------------------------------------------------------------------------

// The widest vector of this unit, and a store of it that goes past the caches where there is one: a plain store first
// reads the line that it overwrites. `dst` must then be aligned to the vector.
#if defined(__AVX512F__)
constexpr int kVec = 64;
#elif defined(__AVX2__)
constexpr int kVec = 32;
#else
constexpr int kVec = 16;
#endif
typedef uint8_t Vec __attribute__((vector_size(kVec), aligned(1), may_alias));
using PutFn = void (*)(char* dst, Vec x);

inline void put(char* dst, Vec x) { *reinterpret_cast<Vec*>(dst) = x; }

inline void put_past_cache(char* dst, Vec x) {
#if defined(__AVX512F__)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst), (__m512i)x);
#elif defined(__AVX2__)
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst), (__m256i)x);
#elif defined(__SSE2__)
    _mm_stream_si128(reinterpret_cast<__m128i*>(dst), (__m128i)x);
#else
    put(dst, x);
#endif
}

inline void end_stream() {
#ifdef __SSE2__
    _mm_sfence();
#endif
}

// `ahead` is how many bytes after `src` lies what will be read a little later; it is asked for meanwhile.
using RunFn = void (*)(const char* src, char* dst, int64_t n, float scale, int64_t ahead);

// A run by plain stores, and one past the caches for an aligned `dst`.
struct Run {
    RunFn plain;
    RunFn past_cache;
};

// Ask for a line, which may lie anywhere. GCC takes a function that does nothing else for one without effect, and drops
// calls of it: hence the empty statement.
inline void ask_for(const char* at) {
    __builtin_prefetch(at);
    asm volatile("");
}

// Ask for the lines of `bytes` from `at` on.
inline void fetch(const char* at, int bytes) {
    for (int o = 0; o < bytes; o += 64) ask_for(at + o);
}

// Not memcpy: glibc 2.36's took 1.6 times as long to gather 512 scattered rows of 2 KiB.
template <PutFn Put>
inline __attribute__((always_inline)) void copy_bytes(const char* src, char* dst, int64_t n) {
    int64_t i = 0;
    for (; i + 4 * kVec <= n; i += 4 * kVec) {
        Vec x[4];
        __builtin_memcpy(x, src + i, sizeof x);
        for (int j = 0; j < 4; ++j) Put(dst + i + j * kVec, x[j]);
    }
    for (; i + kVec <= n; i += kVec) Put(dst + i, *reinterpret_cast<const Vec*>(src + i));
    for (; i + 16 <= n; i += 16) __builtin_memcpy(dst + i, src + i, 16);
    if (i < n) __builtin_memcpy(dst + i, src + i, std::size_t(n - i));
}

template <PutFn Put>
void copy(const char* src, char* dst, int64_t n, float, int64_t) {
    copy_bytes<Put>(src, dst, n);
}

constexpr Run kCopy = {copy<put>, copy<put_past_cache>};

constexpr int kBlock = 64;

// Codes are made in 32 bits and narrowed by a loop of their own: in a single loop compilers narrow every term of a code
// before they combine them, which takes three times the shuffles.
template <class Src, class Dst, bool Scaled>
inline void convert_block(const typename Src::Bits* in, typename Dst::Bits* __restrict out, int n, float scale) {
    uint32_t codes[kBlock];
    for (int i = 0; i < n; ++i) {
        uint32_t x = Src::widen(in[i]);
        codes[i] = Dst::narrow(Scaled ? bits_of(float_of(x) * scale) : x);
    }
    for (int i = 0; i < n; ++i) out[i] = typename Dst::Bits(codes[i]);
}

template <PutFn Put, int Bytes>
inline void put_block(char* dst, const void* block) {
    for (int i = 0; i < Bytes; i += kVec) Put(dst + i, *reinterpret_cast<const Vec*>(static_cast<const char*>(block) + i));
}

template <class Src, class Dst, bool Scaled, PutFn Put>
void convert(const char* src, char* dst, int64_t n, float scale, int64_t ahead) {
    using Bits = typename Dst::Bits;
    const typename Src::Bits* in = reinterpret_cast<const typename Src::Bits*>(src);
    int64_t i = 0;
    for (; i + kBlock <= n; i += kBlock) {
        fetch(reinterpret_cast<const char*>(in + i) + ahead, kBlock * int(sizeof *in));
        alignas(64) Bits out[kBlock];
        convert_block<Src, Dst, Scaled>(in + i, out, kBlock, scale);
        put_block<Put, sizeof out>(dst + i * int64_t(sizeof(Bits)), out);
    }
    if (i < n) convert_block<Src, Dst, Scaled>(in + i, reinterpret_cast<Bits*>(dst) + i, int(n - i), scale);
}

template <class Src, class Dst>
constexpr Run by_value = {convert<Src, Dst, false, put>, convert<Src, Dst, false, put_past_cache>};
template <class Src, class Dst>
constexpr Run scaled = {convert<Src, Dst, true, put>, convert<Src, Dst, true, put_past_cache>};

#if defined(__AVX512BW__)

// The bfloat16 nearest to what is scaled to the limit: its product rounds to the limit, and so do those of its
// neighbours, so magnitudes are cut to it before they are scaled. 0 if there is no finite one.
template <class Dst>
inline uint32_t saturating_bf16(float scale) {
    uint32_t nearest = (bits_of(float_of(Dst::kLimit) / scale) + 0x8000) >> 16;
    return nearest < 0x7F80 ? nearest : 0;
}

// What Small::narrow adds to a magnitude, both of its additions in one, by the last five bits of the exponent.
template <class Dst>
struct Magic {
    alignas(64) uint32_t bits[32];
    constexpr Magic() : bits() {
        for (uint32_t e = Dst::kMinNormal >> 23; e <= Dst::kLimit >> 23; ++e)
            bits[e % 32] = (e << 23) + Dst::kMagic + (e << Dst::kMantissa);
    }
};
template <class Dst>
constexpr Magic<Dst> magic;

// The codes of 32 bfloat16, as words. Everything that is not arithmetic on a float32 (sign, NaN, saturation) is done
// once for both halves of a word.
template <class Dst>
inline __m512i quantise_words(__m512i x, __m512 scale, __m512i most, __m512 magic_low, __m512 magic_high) {
    __m512i all = _mm512_and_si512(x, _mm512_set1_epi16(0x7FFF));
    __mmask32 nan = _mm512_cmpgt_epu16_mask(all, _mm512_set1_epi16(0x7F80));
    all = _mm512_min_epu16(all, most);
    auto code = [&](__m512i bits) {
        __m512 mag = _mm512_mul_ps(_mm512_castsi512_ps(bits), scale);
        __m512i exponent = _mm512_max_epi32(_mm512_castps_si512(mag), _mm512_set1_epi32(Dst::kMinNormal));
        exponent = _mm512_srli_epi32(exponent, 23);
        return _mm512_castps_si512(_mm512_add_ps(mag, _mm512_permutex2var_ps(magic_low, exponent, magic_high)));
    };
    __m512i low = code(_mm512_slli_epi32(all, 16));
    __m512i high = code(_mm512_and_si512(all, _mm512_set1_epi32(int(0xFFFF0000))));
    __m512i codes = _mm512_mask_mov_epi16(low, 0xAAAAAAAA, _mm512_slli_epi32(high, 16));
    codes = _mm512_and_si512(codes, _mm512_set1_epi16(0x7F));
    __m512i sign = _mm512_set1_epi16(0x80);
    if (Dst::kFnuz) sign = _mm512_maskz_mov_epi16(_mm512_test_epi16_mask(codes, codes), sign);
    codes = _mm512_ternarylogic_epi32(codes, sign, _mm512_srli_epi16(x, 8), 0xF8);  // codes | (sign & x >> 8)
    return _mm512_mask_mov_epi16(codes, nan, _mm512_set1_epi16(Dst::kNan));
}

// The leading whole blocks; returns how many elements that was.
template <class Dst, PutFn Put>
inline int64_t quantise_blocks(const char* src, char* dst, int64_t n, float scale, int64_t ahead) {
    uint32_t most = saturating_bf16<Dst>(scale);
    if (most == 0) return 0;
    const __m512i cut = _mm512_set1_epi16(int16_t(most)), order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    const __m512 factor = _mm512_set1_ps(scale);
    const __m512 low = _mm512_load_ps(magic<Dst>.bits), high = _mm512_load_ps(magic<Dst>.bits + 16);
    int64_t i = 0;
    for (; i + kBlock <= n; i += kBlock) {
        fetch(src + 2 * i + ahead, 2 * kBlock);
        __m512i a = quantise_words<Dst>(_mm512_loadu_si512(src + 2 * i), factor, cut, low, high);
        __m512i b = quantise_words<Dst>(_mm512_loadu_si512(src + 2 * i + 64), factor, cut, low, high);
        Put(dst + i, (Vec)_mm512_permutexvar_epi64(order, _mm512_packus_epi16(a, b)));
    }
    return i;
}

#else

// A 32-bit word holds two bfloat16: no shuffle widens them, and one narrowing takes both codes.
template <class Dst, PutFn Put>
inline int64_t quantise_blocks(const char* src, char* dst, int64_t n, float scale, int64_t ahead) {
    int64_t i = 0;
    for (; i + kBlock <= n; i += kBlock) {
        fetch(src + 2 * i + ahead, 2 * kBlock);
        uint32_t words[kBlock / 2], codes[kBlock / 2];
        alignas(64) uint16_t out[kBlock / 2];
        __builtin_memcpy(words, src + 2 * i, sizeof words);
        for (int j = 0; j < kBlock / 2; ++j) {
            uint32_t low = Dst::narrow(bits_of(float_of(words[j] << 16) * scale));
            uint32_t high = Dst::narrow(bits_of(float_of(words[j] & 0xFFFF0000) * scale));
            codes[j] = low | high << 8;
        }
        for (int j = 0; j < kBlock / 2; ++j) out[j] = uint16_t(codes[j]);
        put_block<Put, sizeof out>(dst + i, out);
    }
    return i;
}

#endif

template <class Dst, PutFn Put>
void quantise_bf16(const char* src, char* dst, int64_t n, float scale, int64_t ahead) {
    int64_t i = quantise_blocks<Dst, Put>(src, dst, n, scale, ahead);
    convert<BF16, Dst, true, put>(src + 2 * i, dst + i, n - i, scale, ahead);
}

template <class Dst>
constexpr Run scaled<BF16, Dst> = {quantise_bf16<Dst, put>, quantise_bf16<Dst, put_past_cache>};

template <class Src>
Run narrowing(DType dst) {
    switch (dst) {
        case DType::f32: return by_value<Src, F32>;
        case DType::f16: return by_value<Src, F16>;
        case DType::bf16: return by_value<Src, BF16>;
        case DType::e4m3fn: return scaled<Src, E4M3FN>;
        case DType::e4m3fnuz: return scaled<Src, E4M3FNUZ>;
        case DType::e5m2: return scaled<Src, E5M2>;
        case DType::e5m2fnuz: return scaled<Src, E5M2FNUZ>;
        default: return {};
    }
}

template <class Src>
Run dequantising(DType dst) {
    switch (dst) {
        case DType::f32: return scaled<Src, F32>;
        case DType::f16: return scaled<Src, F16>;
        case DType::bf16: return scaled<Src, BF16>;
        default: return {};
    }
}

Run converter(DType src, DType dst) {
    switch (src) {
        case DType::f32: return narrowing<F32>(dst);
        case DType::f16: return narrowing<F16>(dst);
        case DType::bf16: return narrowing<BF16>(dst);
        case DType::e4m3fn: return dequantising<E4M3FN>(dst);
        case DType::e4m3fnuz: return dequantising<E4M3FNUZ>(dst);
        case DType::e5m2: return dequantising<E5M2>(dst);
        case DType::e5m2fnuz: return dequantising<E5M2FNUZ>(dst);
        default: return {};
    }
}

inline int64_t item_bytes(DType t) {
    switch (t) {
        case DType::f32: return 4;
        case DType::f16:
        case DType::bf16: return 2;
        default: return 1;
    }
}

}  // namespace
}  // namespace portakv
