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
    static Lanes load(const char* const* p, int, int64_t o) {
        return {_mm_loadu_si128(reinterpret_cast<const __m128i*>(p[0] + o))};
    }
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
    static Lanes load(const char* const* p, int, int64_t o) {
        Lanes r;
        __builtin_memcpy(r.x, p[0] + o, 16);
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
    static Lanes load(const char* const* p, int apart, int64_t o) {
        __m256i low = _mm256_castsi128_si256(Lanes<1>::load(p, 0, o).x);
        return {_mm256_inserti128_si256(low, Lanes<1>::load(p + apart, 0, o).x, 1)};
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
    static Lanes load(const char* const* p, int apart, int64_t o) {
        auto at = [&](int i) { return Lanes<1>::load(p + i * apart, 0, o).x; };
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
// Whether a line can be written in part, by a mask: vectors as wide as lines have those.
constexpr bool kMasks = kVec == kLine;

// The tokens that share a line of K, `L * 16 / Unit` of them, for `units` units whose lines are `step` bytes apart: unit
// u of token i lies at `rows[i] + u * Unit`. `units` is a multiple of 16 / Unit. Of tokens that are not `present` a line
// keeps what it has, where kMasks; else all are. `ahead` bytes after each row lies what will be read next, if not 0.
template <int Unit, int L>
void transpose(const char* const* rows, uint64_t present, char* dst, int64_t step, int64_t units, int64_t ahead) {
    constexpr int kPer = 16 / Unit, kWide = 16 * L < kVec ? L : kVec / 16;
    const bool whole = present == all_of(L * kPer);
    const bool past_cache = L * 16 == kLine && (reinterpret_cast<uintptr_t>(dst) | uintptr_t(step)) % kLine == 0;
    for (int64_t u = 0; u < units; u += kPer) {
        if (ahead)  // of four passes over a line, one asks for each row
            for (int i = int(u / kPer % 4); i < L * kPer; i += 4) __builtin_prefetch(rows[i] + u * Unit + ahead);
        for (int part = 0; part < L; part += kWide) {
            Lanes<kWide> a[kPer], b[kPer];
            for (int i = 0; i < kPer; ++i) a[i] = Lanes<kWide>::load(rows + part * kPer + i, kPer, u * Unit);
            // Each pass interleaves the first half of the rows with the second: a perfect shuffle, and log2 of the
            // rows of them transpose.
            for (int n = 1; n < kPer; n *= 2) {
                for (int i = 0; i < kPer / 2; ++i) interleave<Unit>(a[i], a[i + kPer / 2], b[2 * i], b[2 * i + 1]);
                for (int i = 0; i < kPer; ++i) a[i] = b[i];
            }
            char* to = dst + u * step + part * 16;
            for (int i = 0; i < kPer; ++i, to += step) {
                if (whole)
                    past_cache ? a[i].put_past_cache(to) : a[i].put(to);
                else if constexpr (kWide == 4)
                    a[i].template put_some<Unit>(to, present);
            }
        }
    }
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

// Two tokens side by side, 16 units of two bytes each: a line. `present` has a bit for each, `ahead` is as above.
inline void zip(const char* const* rows, uint64_t present, char* dst, int64_t ahead) {
    if (ahead) __builtin_prefetch(rows[0] + ahead), __builtin_prefetch(rows[1] + ahead);
    bool past_cache = reinterpret_cast<uintptr_t>(dst) % kLine == 0;
#if defined(__AVX512BW__)
    auto words = [](const char* p) {
        return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    };
    Lanes<4> line{_mm512_or_si512(words(rows[0]), _mm512_slli_epi32(words(rows[1]), 16))};
    if (present != 3) return line.put_some<2>(dst, present * 0x55555555);
    past_cache ? line.put_past_cache(dst) : line.put(dst);
#else
    if (present != 3) return spread<2>(rows[present == 2], dst + (present == 2) * 2, 4, 16);
    for (int o = 0; o < 32; o += 16) {
        Lanes<1> low, high;
        interleave<2>(Lanes<1>::load(rows, 0, o), Lanes<1>::load(rows + 1, 0, o), low, high);
        past_cache ? low.put_past_cache(dst + 2 * o) : low.put(dst + 2 * o);
        past_cache ? high.put_past_cache(dst + 2 * o + 16) : high.put(dst + 2 * o + 16);
    }
#endif
}

}  // namespace
}  // namespace portakv
