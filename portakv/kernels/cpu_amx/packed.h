// Packed pages: what matrix and vector units want of K and V. Part of kernels.cpp, in whose namespace it stands.
//
// Tokens that fill lines of their page are transposed in registers and written as whole lines; others go unit by unit.
#pragma once

#include "rows.h"

namespace portakv {
namespace {

// ---- `L` 16-byte lanes, each of which holds units of one token, and their interleaving -------------------------------

template <int L>
struct Lanes;

#if defined(__SSE2__)
template <>
struct Lanes<1> {
    __m128i x;
    static Lanes load(const char* p, int64_t) { return {_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))}; }
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
    static Lanes load(const char* p, int64_t) {
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
    static Lanes load(const char* p, int64_t apart) {
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
    static Lanes load(const char* p, int64_t apart) {
        auto at = [&](int64_t i) { return Lanes<1>::load(p + i * apart, 0).x; };
        __m512i x = _mm512_broadcast_i32x4(at(0));
        x = _mm512_mask_broadcast_i32x4(x, 0x00F0, at(1));
        x = _mm512_mask_broadcast_i32x4(x, 0x0F00, at(2));
        return {_mm512_mask_broadcast_i32x4(x, 0xF000, at(3))};
    }
    void put(char* p) const { _mm512_storeu_si512(p, x); }
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

// The first `L * 16 / Unit` tokens of a line, for `units` units whose lines are `step` bytes apart. Rows of `src` are
// `stride` apart; `units` is a multiple of 16 / Unit.
template <int Unit, int L>
void transpose(const char* src, int64_t stride, char* dst, int64_t step, int64_t units) {
    constexpr int kPer = 16 / Unit, kWide = 16 * L < kVec ? L : kVec / 16;
    bool past_cache = L * 16 == kLine && (reinterpret_cast<uintptr_t>(dst) | uintptr_t(step)) % kLine == 0;
    for (int64_t u = 0; u < units; u += kPer) {
        for (int part = 0; part < L; part += kWide) {
            Lanes<kWide> a[kPer], b[kPer];
            const char* from = src + part * kPer * stride + u * Unit;
            for (int i = 0; i < kPer; ++i) a[i] = Lanes<kWide>::load(from + i * stride, kPer * stride);
            // Each pass interleaves the first half of the rows with the second: a perfect shuffle, and log2 of the
            // rows of them transpose.
            for (int rows = 1; rows < kPer; rows *= 2) {
                for (int i = 0; i < kPer / 2; ++i) interleave<Unit>(a[i], a[i + kPer / 2], b[2 * i], b[2 * i + 1]);
                for (int i = 0; i < kPer; ++i) a[i] = b[i];
            }
            char* to = dst + u * step + part * 16;
            for (int i = 0; i < kPer; ++i) past_cache ? a[i].put_past_cache(to + i * step) : a[i].put(to + i * step);
        }
    }
}

// Two tokens side by side, 16 units of each: a line.
template <int Unit>
void zip(const char* a, const char* b, char* dst) {
    bool past_cache = reinterpret_cast<uintptr_t>(dst) % kLine == 0;
#if defined(__AVX512BW__)
    if (Unit == 2) {
        auto words = [](const char* p) {
            return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
        };
        Lanes<4> line{_mm512_or_si512(words(a), _mm512_slli_epi32(words(b), 16))};
        return past_cache ? line.put_past_cache(dst) : line.put(dst);
    }
#endif
    for (int o = 0; o < 16 * Unit; o += 16) {
        Lanes<1> low, high;
        interleave<Unit>(Lanes<1>::load(a + o, 0), Lanes<1>::load(b + o, 0), low, high);
        past_cache ? low.put_past_cache(dst + 2 * o) : low.put(dst + 2 * o);
        past_cache ? high.put_past_cache(dst + 2 * o + 16) : high.put(dst + 2 * o + 16);
    }
}

// ---- one token ----------------------------------------------------------------------------------------------------

// Where unit 0 of token `t` of a page lies. By the widths there are, as divisions would cost more than moving a line.
inline int64_t token_offset(const Packing& p, int64_t t) {
    int64_t row = p.block * p.unit;
    switch (p.width) {
        case 1: return t * row;
        case 2: return t / 2 * (2 * row) + t % 2 * p.unit;
        case 16: return t / 16 * (16 * row) + t % 16 * p.unit;
        default: return t * p.unit;  // as wide as the page
    }
}

// The page of one head that a slot is in, and which of its tokens it is.
struct Place {
    char* page;
    int64_t t;
};

inline Place place(const Rows& rows, int64_t slot, int64_t head) {
    return {rows.data + slot / rows.page * rows.page_stride + head * rows.head_stride, slot % rows.page};
}

// From one block of units to the next.
inline int64_t block_stride(const Rows& rows, const Packing& p) { return p.block * rows.page * p.unit; }

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

// ---- pieces -------------------------------------------------------------------------------------------------------

// The packed side of a store or gather, K or V, of one head.
struct Packed {
    const Half* half;
    Rows cache;
    Packing packing;
    Run run;         // null where bytes stay as they are
    int64_t dim;
    int64_t item;    // bytes of a stored element
    int64_t other;   // and of one on the other side
};

// Units `first` to `first + units` of `count` tokens from `slot` on, whose rows are `stride` bytes apart at `src`.
template <int Unit>
void put_units(const Packed& p, const char* src, int64_t stride, int64_t slot, int64_t head, int64_t count,
               int64_t first, int64_t units) {
    const int64_t step = p.packing.width * Unit, block = p.packing.block;
    const Place at = place(p.cache, slot, head);
    for (int64_t end = first + units, n; first < end; first += n, src += n * Unit) {
        n = block - first % block < end - first ? block - first % block : end - first;
        int64_t offset = first / block * block_stride(p.cache, p.packing) + first % block * step;
        for (int64_t i = 0; i < count;) {
            constexpr int kPer = 16 / Unit;
            const char* from = src + i * stride;
            char* to = at.page + offset + token_offset(p.packing, at.t + i);
            auto whole = [&](int64_t tokens) { return (at.t + i) % tokens == 0 && count - i >= tokens; };
            if (p.packing.width == 2) {
                if (whole(2) && n == 16) {
                    zip<Unit>(from, from + stride, to);
                    i += 2;
                    continue;
                }
            } else if (whole(4 * kPer)) {
                transpose<Unit, 4>(from, stride, to, step, n);
                i += 4 * kPer;
                continue;
            } else if (whole(2 * kPer)) {
                transpose<Unit, 2>(from, stride, to, step, n);
                i += 2 * kPer;
                continue;
            } else if (whole(kPer)) {
                transpose<Unit, 1>(from, stride, to, step, n);
                i += kPer;
                continue;
            }
            spread<Unit>(from, to, step, n);
            ++i;
        }
    }
}

template <int Unit>
void get_units(const Packed& p, char* dst, int64_t stride, int64_t slot, int64_t head, int64_t count, int64_t first,
               int64_t units) {
    const int64_t step = p.packing.width * Unit, block = p.packing.block;
    const Place at = place(p.cache, slot, head);
    for (int64_t end = first + units, n; first < end; first += n, dst += n * Unit) {
        n = block - first % block < end - first ? block - first % block : end - first;
        int64_t offset = first / block * block_stride(p.cache, p.packing) + first % block * step;
        for (int64_t i = 0; i < count; ++i)
            collect<Unit>(at.page + offset + token_offset(p.packing, at.t + i), step, dst + i * stride, n);
    }
}

// Tokens of one piece at a time are converted in chunks that stay in the first-level cache.
constexpr int kPieceTokens = 64, kPieceUnits = 64;

template <int Unit, Way W>
void do_piece(const Packed& p, const Piece& piece, int64_t head) {
    const Rows& rows = W == Way::store ? p.half->src : p.half->dst;
    char* row = rows.data + piece.token * rows.row_stride + head * rows.head_stride;
    float scale = p.half->scale ? p.half->scale[head * p.half->scale_stride] : 1.0f;
    auto units = [&](char* at, int64_t stride, int64_t first, int64_t n) {
        if (W == Way::store)
            put_units<Unit>(p, at, stride, piece.slot, head, piece.count, first * p.item / Unit, n * p.item / Unit);
        else
            get_units<Unit>(p, at, stride, piece.slot, head, piece.count, first * p.item / Unit, n * p.item / Unit);
    };
    if (p.packing.width == 1) {
        Run run = p.run.plain ? p.run : kCopy;
        int64_t n = p.run.plain ? p.dim : p.dim * p.item;
        const Place at = place(p.cache, piece.slot, head);
        for (int64_t i = 0; i < piece.count; ++i) {
            char *out = row + i * rows.row_stride, *own = at.page + token_offset(p.packing, at.t + i);
            bool past_cache = W == Way::store && reinterpret_cast<uintptr_t>(own) % kVec == 0;
            if (W == Way::store)
                (past_cache ? run.past_cache : run.plain)(out, own, n, scale, 0);
            else
                run.plain(own, out, n, scale, 0);
        }
    } else if (!p.run.plain) {
        units(row, rows.row_stride, 0, p.dim);
    } else {
        alignas(64) char chunk[kPieceTokens * kPieceUnits * 4];
        for (int64_t d = 0; d < p.dim; d += kPieceUnits) {
            int64_t n = p.dim - d < kPieceUnits ? p.dim - d : kPieceUnits, stride = n * p.item;
            if (W == Way::gather) units(chunk, stride, d, n);
            for (int64_t i = 0; i < piece.count; ++i) {
                char* out = row + i * rows.row_stride + d * p.other;
                if (W == Way::store)
                    p.run.plain(out, chunk + i * stride, n, scale, 0);
                else
                    p.run.plain(chunk + i * stride, out, n, scale, 0);
            }
            if (W == Way::store) units(chunk, stride, d, n);
        }
    }
}

// Ask for the lines that a piece writes in part.
inline void touch_piece(const Packed& p, const Piece& piece, int64_t head) {
    const Place first = place(p.cache, piece.slot, head);
    char* at = first.page + token_offset(p.packing, first.t);
    int64_t units = p.dim * p.item / p.packing.unit, step = p.packing.width * p.packing.unit;
    int64_t per_line = step < kLine ? kLine / step : 1;
    for (int64_t b = 0; b < units; b += p.packing.block, at += block_stride(p.cache, p.packing))
        for (int64_t u = 0; u < p.packing.block; u += per_line) __builtin_prefetch(at + u * step, 1);
}

template <Way W>
void do_pieces(const PackedJob& job, int64_t begin, int64_t end) {
    Packed packed[2];
    for (int h = 0; h < 2; ++h) {
        const Half& half = job.half[h];
        const Rows &cache = W == Way::store ? half.dst : half.src, &other = W == Way::store ? half.src : half.dst;
        packed[h] = {&half, cache, job.packing[h], {}, half.dim, item_bytes(cache.dtype), item_bytes(other.dtype)};
        if (half.src.dtype != half.dst.dtype) packed[h].run = converter(half.src.dtype, half.dst.dtype);
    }
    const int64_t heads = job.half[0].heads;
    for (int64_t item = begin; item < end; ++item) {
        int64_t head = item % heads;
        const int64_t* group = job.starts + item / heads;
        if (W == Way::store && item + 1 < end) {
            int64_t next = (item + 1) % heads;
            const int64_t* after = job.starts + (item + 1) / heads;
            for (int64_t i = after[0]; i < after[1]; ++i)
                if (job.pieces[i].count < job.tile)
                    for (const Packed& p : packed) touch_piece(p, job.pieces[i], next);
        }
        for (const Packed& p : packed) {
            for (int64_t i = group[0]; i < group[1]; ++i) {
                const Piece& piece = job.pieces[i];
                if (p.packing.unit == 1) do_piece<1, W>(p, piece, head);
                if (p.packing.unit == 2) do_piece<2, W>(p, piece, head);
                if (p.packing.unit == 4) do_piece<4, W>(p, piece, head);
            }
        }
    }
    if (W == Way::store) end_stream();
}

// A thread gets whole tiles, or heads of one: what a line holds has one owner, who goes in token order.
template <Way W>
void do_packed(const PackedJob& job) {
    int64_t items = job.groups * job.half[0].heads;
    if (job.threads <= 1) return do_pieces<W>(job, 0, items);
#ifdef _OPENMP
#pragma omp parallel num_threads(job.threads)
    {
        int64_t i = omp_get_thread_num(), n = omp_get_num_threads();
        do_pieces<W>(job, items * i / n, items * (i + 1) / n);
    }
#endif
}

template <int Unit>
void move_head(const MoveJob& job, const Packed& p, int64_t head, char* staged) {
    int64_t units = job.head_bytes / Unit;
    for (int64_t i = 0; i < job.count; ++i)
        get_units<Unit>(p, staged + i * job.head_bytes, 0, job.src[i], head, 1, 0, units);
    for (int64_t i = 0; i < job.count; ++i)
        put_units<Unit>(p, staged + i * job.head_bytes, 0, job.tgt[i], head, 1, 0, units);
}

// Every head of every layer is read completely before it is written; `staging_bytes` hold `count` rows of one head.
void move_packed(const MoveJob& job, const Packing& packing) {
    int64_t items = job.layers * job.heads;
#ifdef _OPENMP
#pragma omp parallel for num_threads(job.threads) if (job.threads > 1)
#endif
    for (int64_t item = 0; item < items; ++item) {
        int thread = 0;
#ifdef _OPENMP
        thread = omp_get_thread_num();
#endif
        Packed p{nullptr, job.rows, packing, {}, 0, 0, 0};
        p.cache.data += item / job.heads * job.layer_stride;
        char* staged = job.staging + thread * job.staging_bytes;
        if (packing.unit == 1) move_head<1>(job, p, item % job.heads, staged);
        if (packing.unit == 2) move_head<2>(job, p, item % job.heads, staged);
        if (packing.unit == 4) move_head<4>(job, p, item % job.heads, staged);
    }
}

}  // namespace
}  // namespace portakv
