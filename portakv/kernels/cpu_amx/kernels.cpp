// The kernels that move rows, compiled once per instruction set (PORTAKV_ISA names the unit).
//
// Nothing here may have external linkage but the table at the end, and no inline function of the C++ library may be
// called: see kernels.h. Loops over elements are plain integer code that GCC and Clang vectorise.

#include "kernels.h"

#include <cstddef>

#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __SSE2__
#include <immintrin.h>
#endif

namespace portakv {
namespace {

// Tensors made from raw buffers may be misaligned.
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

using RunFn = void (*)(const char* src, char* dst, int64_t n, float scale);

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

template <class Src, class Dst, bool Scaled>
void convert(const char* src, char* dst, int64_t n, float scale) {
    auto* in = reinterpret_cast<const typename Src::Bits*>(src);
    auto* out = reinterpret_cast<typename Dst::Bits*>(dst);
    int64_t i = 0;
    for (; i + kBlock <= n; i += kBlock) convert_block<Src, Dst, Scaled>(in + i, out + i, kBlock, scale);
    if (i < n) convert_block<Src, Dst, Scaled>(in + i, out + i, int(n - i), scale);
}

template <class Src, class Dst>
constexpr RunFn by_value = convert<Src, Dst, false>;
template <class Src, class Dst>
constexpr RunFn scaled = convert<Src, Dst, true>;

// A 32-bit word holds two bfloat16: no shuffle widens them, and one narrowing takes both codes.
template <class Dst>
void quantise_bf16(const char* src, char* dst, int64_t n, float scale) {
    int64_t i = 0;
    for (; i + kBlock <= n; i += kBlock) {
        uint32_t words[kBlock / 2], codes[kBlock / 2];
        uint16_t out[kBlock / 2];
        __builtin_memcpy(words, src + 2 * i, sizeof words);
        for (int j = 0; j < kBlock / 2; ++j) {
            uint32_t low = Dst::narrow(bits_of(float_of(words[j] << 16) * scale));
            uint32_t high = Dst::narrow(bits_of(float_of(words[j] & 0xFFFF0000) * scale));
            codes[j] = low | high << 8;
        }
        for (int j = 0; j < kBlock / 2; ++j) out[j] = uint16_t(codes[j]);
        __builtin_memcpy(dst + i, out, sizeof out);
    }
    convert<BF16, Dst, true>(src + 2 * i, dst + i, n - i, scale);
}

template <class Dst>
constexpr RunFn scaled<BF16, Dst> = quantise_bf16<Dst>;

// The widest vector of this unit, and a store of it that goes past the caches where there is one.
#if defined(__AVX512F__)
constexpr int kVec = 64;
#elif defined(__AVX2__)
constexpr int kVec = 32;
#else
constexpr int kVec = 16;
#endif
typedef uint8_t Vec __attribute__((vector_size(kVec), aligned(1), may_alias));

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

template <void (*Put)(char*, Vec)>
inline void copy_vectors(const char* src, char* dst, int64_t n) {
    int64_t i = 0;
    for (; i + 4 * kVec <= n; i += 4 * kVec) {
        Vec x[4];
        __builtin_memcpy(x, src + i, sizeof x);
        for (int j = 0; j < 4; ++j) Put(dst + i + j * kVec, x[j]);
    }
    for (; i + kVec <= n; i += kVec) Put(dst + i, *reinterpret_cast<const Vec*>(src + i));
    __builtin_memcpy(dst + i, src + i, std::size_t(n - i));
}

// Not memcpy: glibc 2.36's took 1.6 times as long to gather 512 scattered rows of 2 KiB.
void copy_bytes(const char* src, char* dst, int64_t n, float) { copy_vectors<put>(src, dst, n); }

// A plain store first reads the cache line that it overwrites.
void stream_bytes(const char* src, char* dst, int64_t n, float) {
    if (reinterpret_cast<uintptr_t>(dst) % kVec == 0)
        copy_vectors<put_past_cache>(src, dst, n);
    else
        copy_vectors<put>(src, dst, n);
}

inline void end_stream() {
#ifdef __SSE2__
    _mm_sfence();
#endif
}

template <class Src>
RunFn narrowing(DType dst) {
    switch (dst) {
        case DType::f32: return by_value<Src, F32>;
        case DType::f16: return by_value<Src, F16>;
        case DType::bf16: return by_value<Src, BF16>;
        case DType::e4m3fn: return scaled<Src, E4M3FN>;
        case DType::e4m3fnuz: return scaled<Src, E4M3FNUZ>;
        case DType::e5m2: return scaled<Src, E5M2>;
        case DType::e5m2fnuz: return scaled<Src, E5M2FNUZ>;
        default: return nullptr;
    }
}

template <class Src>
RunFn dequantising(DType dst) {
    switch (dst) {
        case DType::f32: return scaled<Src, F32>;
        case DType::f16: return scaled<Src, F16>;
        case DType::bf16: return scaled<Src, BF16>;
        default: return nullptr;
    }
}

RunFn converter(DType src, DType dst) {
    switch (src) {
        case DType::f32: return narrowing<F32>(dst);
        case DType::f16: return narrowing<F16>(dst);
        case DType::bf16: return narrowing<BF16>(dst);
        case DType::e4m3fn: return dequantising<E4M3FN>(dst);
        case DType::e4m3fnuz: return dequantising<E4M3FNUZ>(dst);
        case DType::e5m2: return dequantising<E5M2>(dst);
        case DType::e5m2fnuz: return dequantising<E5M2FNUZ>(dst);
        default: return nullptr;
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

// ---- rows ---------------------------------------------------------------------------------------------------------

inline char* row_at(const Rows& rows, int64_t slot) {
    if (rows.page == 0) return rows.data + slot * rows.row_stride;
    return rows.data + slot / rows.page * rows.page_stride + slot % rows.page * rows.row_stride;
}

enum class Way { store, gather };

constexpr int64_t kStagedBytes = 4096;

// How one row of a half is done: `runs` runs of `n` elements. `staged` is the bytes of a converted row that goes
// through a buffer, so that it too is written past the caches; 0 where runs go straight to their place.
struct Plan {
    const Half* half;
    RunFn run;
    int64_t runs;
    int64_t n;
    int64_t src_step;
    int64_t dst_step;
    int64_t staged;
    int64_t row_bytes;  // on the side that slots point into
};

template <Way W>
Plan plan(const Half& half) {
    const Rows &src = half.src, &dst = half.dst;
    int64_t src_run = half.dim * item_bytes(src.dtype), dst_run = half.dim * item_bytes(dst.dtype);
    bool src_dense = half.heads == 1 || src.head_stride == src_run;
    bool dst_dense = half.heads == 1 || dst.head_stride == dst_run;
    Plan p{&half, nullptr, half.heads, half.dim, src.head_stride, dst.head_stride, 0, 0};
    p.row_bytes = half.heads * (W == Way::store ? dst_run : src_run);
    if (src.dtype == dst.dtype) {
        p.run = W == Way::store ? stream_bytes : copy_bytes;
        p.n = src_run;
    } else {
        p.run = converter(src.dtype, dst.dtype);
        if (W == Way::store && dst_dense && p.row_bytes <= kStagedBytes) {
            p.staged = p.row_bytes;
            p.dst_step = dst_run;
        }
    }
    if (src_dense && dst_dense && !half.scale) {
        p.n *= half.heads;
        p.runs = 1;
    }
    return p;
}

inline void do_row(const Plan& p, const char* src, char* dst) {
    alignas(64) char buffer[kStagedBytes];
    const Half& half = *p.half;
    char* out = p.staged ? buffer : dst;
    for (int64_t r = 0; r < p.runs; ++r) {
        float scale = half.scale ? half.scale[r * half.scale_stride] : 1.0f;
        p.run(src + r * p.src_step, out + r * p.dst_step, p.n, scale);
    }
    if (p.staged) stream_bytes(buffer, dst, p.staged, 1.0f);
}

inline int64_t slot_at(const Slots& s, int64_t t) {
    t *= s.stride;
    return s.wide ? reinterpret_cast<const int64_t*>(s.data)[t] : reinterpret_cast<const int32_t*>(s.data)[t];
}

constexpr int kAhead = 4;

// Ask for one line per page of a row that comes up in `kAhead` tokens: rows are scattered, and this took a third off
// a store of 64 or 512 rows of 2 KiB (distances of 2, 4 and 8 were alike).
template <Way W>
inline void touch(const Plan (&plans)[2], int64_t slot) {
    for (const Plan& p : plans) {
        const char* row = row_at(W == Way::store ? p.half->dst : p.half->src, slot);
        for (int64_t o = 0; o < p.row_bytes; o += 4096) __builtin_prefetch(row + o);
    }
}

// Tokens [begin, end) whose slot belongs to `part` of `parts`. A slot has one owner, so a slot that comes twice in
// a store is written by one thread, in token order, and never holds halves of two rows.
template <Way W>
void do_tokens(const RowJob& job, int64_t begin, int64_t end, uint32_t part, uint32_t parts) {
    constexpr int kBatch = 256;
    struct {
        int64_t token, slot;
    } picks[kBatch];
    const Plan plans[2] = {plan<W>(job.half[0]), plan<W>(job.half[1])};
    int64_t over = 0;
    for (int64_t t = begin; t < end;) {
        int n = 0;
        for (; t < end && n < kBatch; ++t) {
            int64_t slot = slot_at(job.loc, t);
            uint32_t hash = uint32_t(slot) * 0x9E3779B1u;
            bool mine = W == Way::gather || uint32_t((uint64_t(hash) * parts) >> 32) == part;
            over += mine & (slot >= job.end);
            picks[n] = {t, slot};
            n += mine & (slot >= job.first) & (slot < job.end);
        }
        for (int i = 0; i < n; ++i) {
            if (i + kAhead < n) touch<W>(plans, picks[i + kAhead].slot);
            for (const Plan& p : plans) {
                int64_t from = W == Way::store ? picks[i].token : picks[i].slot;
                int64_t to = W == Way::store ? picks[i].slot : picks[i].token;
                do_row(p, row_at(p.half->src, from), row_at(p.half->dst, to));
            }
        }
    }
    if (W == Way::store) end_stream();
    if (over) __atomic_fetch_add(job.fault, over, __ATOMIC_RELAXED);
}

template <Way W>
void do_job(const RowJob& job) {
    int64_t tokens = job.loc.size;
    if (job.threads <= 1) return do_tokens<W>(job, 0, tokens, 0, 1);
#ifdef _OPENMP
#pragma omp parallel num_threads(job.threads)
    {
        int64_t part = omp_get_thread_num(), parts = omp_get_num_threads();
        if (W == Way::store)
            do_tokens<W>(job, 0, tokens, uint32_t(part), uint32_t(parts));
        else
            do_tokens<W>(job, tokens * part / parts, tokens * (part + 1) / parts, 0, 1);
    }
#endif
}

// A row is cut into pieces small enough that `count` of one piece fit into the staging buffer. Every piece of every
// layer is read completely before it is written, and pieces are independent.
void move(const MoveJob& job) {
    bool dense = job.heads == 1 || job.rows.head_stride == job.head_bytes;
    int64_t runs = dense ? 1 : job.heads;
    int64_t run_bytes = dense ? job.heads * job.head_bytes : job.head_bytes;
    if (run_bytes == 0) return;
    int64_t piece = job.staging_bytes / job.count;
    piece = piece < run_bytes ? piece : run_bytes;
    int64_t pieces = (run_bytes + piece - 1) / piece;
    int64_t items = job.layers * runs * pieces;
#ifdef _OPENMP
#pragma omp parallel for num_threads(job.threads) if (job.threads > 1)
#endif
    for (int64_t item = 0; item < items; ++item) {
        int thread = 0;
#ifdef _OPENMP
        thread = omp_get_thread_num();
#endif
        int64_t offset = item % pieces * piece;
        int64_t bytes = run_bytes - offset < piece ? run_bytes - offset : piece;
        offset += item / pieces % runs * job.rows.head_stride + item / pieces / runs * job.layer_stride;
        char* staged = job.staging + thread * job.staging_bytes;
        for (int64_t i = 0; i < job.count; ++i)
            __builtin_memcpy(staged + i * bytes, row_at(job.rows, job.src[i]) + offset, std::size_t(bytes));
        for (int64_t i = 0; i < job.count; ++i)
            __builtin_memcpy(row_at(job.rows, job.tgt[i]) + offset, staged + i * bytes, std::size_t(bytes));
    }
}

}  // namespace

#define PORTAKV_JOIN(a, b) a##b
#define PORTAKV_TABLE(isa) PORTAKV_JOIN(kernels_, isa)
#define PORTAKV_QUOTE(x) #x
#define PORTAKV_NAME(isa) PORTAKV_QUOTE(isa)

const Kernels PORTAKV_TABLE(PORTAKV_ISA) = {PORTAKV_NAME(PORTAKV_ISA), do_job<Way::store>, do_job<Way::gather>, move};

}  // namespace portakv
