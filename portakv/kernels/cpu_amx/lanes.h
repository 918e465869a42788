// Tokens transposed in registers and written line by line. Part of kernels.cpp, in whose namespace it stands.
#pragma once

#include "runs.h"

namespace portakv {
namespace {

inline uint64_t all_of(int64_t n) { return n < 64 ? (uint64_t(1) << n) - 1 : ~uint64_t(0); }

// ---- `L` 16-byte lanes, each of which holds units of one token, and their interleaving -------------------------------

template <int L>
struct Lanes;

#if defined(__SSE2__)
template <>
struct Lanes<1> {
    __m128i x;
    static Lanes load(const char* p, int) { return {_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))}; }
    void put(char* p) const { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), x); }
    void put_past_cache(char* p) const { _mm_stream_si128(reinterpret_cast<__m128i*>(p), x); }
};
template <int Unit>
inline void interleave(Lanes<1> a, Lanes<1> b, Lanes<1>& low, Lanes<1>& high) {
    if (Unit == 1) low.x = _mm_unpacklo_epi8(a.x, b.x), high.x = _mm_unpackhi_epi8(a.x, b.x);
    if (Unit == 2) low.x = _mm_unpacklo_epi16(a.x, b.x), high.x = _mm_unpackhi_epi16(a.x, b.x);
    if (Unit == 4) low.x = _mm_unpacklo_epi32(a.x, b.x), high.x = _mm_unpackhi_epi32(a.x, b.x);
}
#else
template <>
struct Lanes<1> {
    uint8_t x[16];
    static Lanes load(const char* p, int) {
        Lanes r;
        __builtin_memcpy(r.x, p, 16);
        return r;
    }
    void put(char* p) const { __builtin_memcpy(p, x, 16); }
    void put_past_cache(char* p) const { put(p); }
};
template <int Unit>
inline void interleave(Lanes<1> a, Lanes<1> b, Lanes<1>& low, Lanes<1>& high) {
    uint8_t out[32];
    for (int i = 0; i < 16; i += Unit)
        for (int j = 0; j < Unit; ++j) out[2 * i + j] = a.x[i + j], out[2 * i + Unit + j] = b.x[i + j];
    __builtin_memcpy(low.x, out, 16);
    __builtin_memcpy(high.x, out + 16, 16);
}
#endif

#if defined(__AVX2__)
template <>
struct Lanes<2> {
    __m256i x;
    static Lanes load(const char* p, int apart) {
        __m256i low = _mm256_castsi128_si256(Lanes<1>::load(p, 0).x);
        return {_mm256_inserti128_si256(low, Lanes<1>::load(p + apart, 0).x, 1)};
    }
    void put(char* p) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
    void put_past_cache(char* p) const { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), x); }
};
template <int Unit>
inline void interleave(Lanes<2> a, Lanes<2> b, Lanes<2>& low, Lanes<2>& high) {
    if (Unit == 1) low.x = _mm256_unpacklo_epi8(a.x, b.x), high.x = _mm256_unpackhi_epi8(a.x, b.x);
    if (Unit == 2) low.x = _mm256_unpacklo_epi16(a.x, b.x), high.x = _mm256_unpackhi_epi16(a.x, b.x);
    if (Unit == 4) low.x = _mm256_unpacklo_epi32(a.x, b.x), high.x = _mm256_unpackhi_epi32(a.x, b.x);
}
#endif

#if defined(__AVX512BW__)
template <>
struct Lanes<4> {
    __m512i x;
    // By masked broadcasts from memory, which leave the shuffle port to the interleaving.
    static Lanes load(const char* p, int apart) {
        auto at = [&](int i) { return Lanes<1>::load(p + i * apart, 0).x; };
        __m512i x = _mm512_broadcast_i32x4(at(0));
        x = _mm512_mask_broadcast_i32x4(x, 0x00F0, at(1));
        x = _mm512_mask_broadcast_i32x4(x, 0x0F00, at(2));
        return {_mm512_mask_broadcast_i32x4(x, 0xF000, at(3))};
    }
    void put(char* p) const { _mm512_storeu_si512(p, x); }
    template <int Unit>
    void put_some(char* p, uint64_t units) const {
        if (Unit == 1) _mm512_mask_storeu_epi8(p, units, x);
        if (Unit == 2) _mm512_mask_storeu_epi16(p, __mmask32(units), x);
        if (Unit == 4) _mm512_mask_storeu_epi32(p, __mmask16(units), x);
    }
    void put_past_cache(char* p) const { _mm512_stream_si512(reinterpret_cast<__m512i*>(p), x); }
};
template <int Unit>
inline void interleave(Lanes<4> a, Lanes<4> b, Lanes<4>& low, Lanes<4>& high) {
    if (Unit == 1) low.x = _mm512_unpacklo_epi8(a.x, b.x), high.x = _mm512_unpackhi_epi8(a.x, b.x);
    if (Unit == 2) low.x = _mm512_unpacklo_epi16(a.x, b.x), high.x = _mm512_unpackhi_epi16(a.x, b.x);
    if (Unit == 4) low.x = _mm512_unpacklo_epi32(a.x, b.x), high.x = _mm512_unpackhi_epi32(a.x, b.x);
}
#endif

constexpr int kLine = 64;

struct PutLanes {
    template <int L>
    void operator()(char* at, const Lanes<L>& x) const { x.put(at); }
};

// To lines that are written whole, and aligned.
struct PutLanesPastCache {
    template <int L>
    void operator()(char* at, const Lanes<L>& x) const { x.put_past_cache(at); }
};

// Whether a line can be written in part, by a mask: vectors as wide as lines have those.
constexpr bool kMasks = kVec == kLine;

// Of the tokens that are `present`, where kMasks; the line keeps what it has of others.
template <int Unit>
struct PutSomeLanes {
    uint64_t present;
    template <int L>
    void operator()(char* at, const Lanes<L>& x) const {
        if constexpr (L * 16 == kLine) x.template put_some<Unit>(at, present);
    }
};

// 16 / Unit units of the tokens that share a line of K, `L * 16 / Unit` of them and `Stride` bytes apart, to as many
// lines that are `step` bytes apart, by `put(where, lanes)`.
template <int Unit, int L, int Stride, class Put>
inline void transpose(const char* from, char* to, int64_t step, Put put) {
    constexpr int kPer = 16 / Unit, kWide = 16 * L < kVec ? L : kVec / 16;
    for (int part = 0; part < L; part += kWide) {
        Lanes<kWide> a[kPer], b[kPer];
        for (int i = 0; i < kPer; ++i) a[i] = Lanes<kWide>::load(from + (part * kPer + i) * Stride, kPer * Stride);
        // Each pass interleaves the first half of the rows with the second: a perfect shuffle, and log2 of the rows of
        // them transpose.
        for (int n = 1; n < kPer; n *= 2) {
            for (int i = 0; i < kPer / 2; ++i) interleave<Unit>(a[i], a[i + kPer / 2], b[2 * i], b[2 * i + 1]);
            for (int i = 0; i < kPer; ++i) a[i] = b[i];
        }
        char* line = to + part * 16;
        for (int i = 0; i < kPer; ++i, line += step) put(line, a[i]);
    }
}

// Two tokens side by side, 16 units of two bytes each: a line, by `put(where, lanes)`.
template <class Put>
inline void zip(const char* first, const char* second, char* to, Put put) {
#if defined(__AVX512BW__)
    auto words = [](const char* p) {
        return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    };
    put(to, Lanes<4>{_mm512_or_si512(words(first), _mm512_slli_epi32(words(second), 16))});
#else
    for (int o = 0; o < 32; o += 16) {
        Lanes<1> low, high;
        interleave<2>(Lanes<1>::load(first + o, 0), Lanes<1>::load(second + o, 0), low, high);
        put(to + 2 * o, low);
        put(to + 2 * o + 16, high);
    }
#endif
}

template <int Unit>
using Bits = typename Word<8 * Unit>::Bits;

template <int Unit>
inline void spread(const char* src, char* dst, int64_t step, int64_t units) {
    for (int64_t u = 0; u < units; ++u)
        *reinterpret_cast<Bits<Unit>*>(dst + u * step) = reinterpret_cast<const Bits<Unit>*>(src)[u];
}

template <int Unit>
inline void collect(const char* src, int64_t step, char* dst, int64_t units) {
    for (int64_t u = 0; u < units; ++u)
        reinterpret_cast<Bits<Unit>*>(dst)[u] = *reinterpret_cast<const Bits<Unit>*>(src + u * step);
}

}  // namespace
}  // namespace portakv
