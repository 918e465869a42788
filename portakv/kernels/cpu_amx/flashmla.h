// FlashMLA's packed tokens: values quantised in blocks, the blocks' scales, and a bfloat16 rope part. Part of kernels.cpp,
// in whose namespace it stands.
#pragma once

#include "rope.h"

namespace portakv {
namespace {

// The bits of the largest finite magnitude of `n` elements.
template <class Src>
uint32_t largest(const char* src, int64_t n) {
    const typename Src::Bits* in = reinterpret_cast<const typename Src::Bits*>(src);
    int32_t most = 0;
    for (int64_t i = 0; i < n; ++i) {
        int32_t magnitude = int32_t(Src::widen(in[i]) & kMagnitude);
        magnitude = magnitude < int32_t(kInf) ? magnitude : 0;
        most = magnitude > most ? magnitude : most;
    }
    return uint32_t(most);
}

// The biased exponent of the least power of two times which 448 is no less than a magnitude, and 1e-4: one more for a
// mantissa above that of 448, 1.75.
inline uint32_t scale_exponent(uint32_t magnitude) {
    uint32_t least = bits_of(1e-4f);
    return (((above(magnitude, least) ? magnitude : least) + 0x1FFFFF) >> 23) - 8;
}

// The functions for one source or output dtype.
struct FlashRuns {
    uint32_t (*largest)(const char* src, int64_t n);
    Run values;
    Run rope;
};

template <class Float>
FlashRuns flash_runs(Way way, DType dtype) {
    Run rope = dtype == DType::bf16 ? kCopy : way == Way::store ? converter(dtype, DType::bf16) : converter(DType::bf16, dtype);
    return {largest<Float>, way == Way::store ? scaled<Float, E4M3FN> : scaled<E4M3FN, Float>, rope};
}

inline FlashRuns flash_runs(Way way, DType dtype) {
    if (dtype == DType::f32) return flash_runs<F32>(way, dtype);
    return dtype == DType::f16 ? flash_runs<F16>(way, dtype) : flash_runs<BF16>(way, dtype);
}

// `half[0]` is the values' rows and K's cache, `half[1]` the rope parts' and V's; these come rotated from a `Source`
// that is Rotated.
template <Way W, class Source>
struct Flash : Source {
    static constexpr int kHalves = 1;
    const RowJob& job;
    const FlashRuns runs;
    const int64_t dim, rope_dim, rope_bytes;
    const int64_t ahead;

    Flash(const RowJob& j, int thread)
        : Source(j, thread), job(j), runs(flash_runs(W, (W == Way::store ? j.half[0].src : j.half[0].dst).dtype)), dim(j.half[0].dim),
          rope_dim(j.half[1].dim), rope_bytes(rope_dim * item_bytes((W == Way::store ? j.half[1].src : j.half[1].dst).dtype)),
          ahead(W == Way::store ? ahead_of(j.half[0].src, dim * item_bytes(j.half[0].src.dtype)) : 0) {}

    static bool alike(const RowJob&) { return false; }
    void touch_slot(int64_t slot, int) const {
        for (const Half& half : job.half) touch(row_at(W == Way::store ? half.dst : half.src, slot), 1);
    }

    // DeepSeek-V4 keeps the rope part behind the values and an exponent a block in V's cache; V3.2 keeps float32 scales
    // behind the values and the rope part in V's.
    void row(int64_t token, int64_t slot, int) const {
        const Half &k = job.half[0], &v = job.half[1];
        const bool v4 = job.block == 64;
        char* packed = row_at(W == Way::store ? k.dst : k.src, slot);
        char* other = row_at(W == Way::store ? v.dst : v.src, slot);
        char* values = row_at(W == Way::store ? k.src : k.dst, token);
        char* floats = row_at(W == Way::store ? v.src : v.dst, token);
        const char* rope_from = floats;
        if constexpr (std::is_same<Source, Rotated>::value) rope_from = Source::row(token);
        char* scales = v4 ? other : packed + dim;
        char* packed_rope = v4 ? packed + dim : other;
        const int64_t item = item_bytes((W == Way::store ? k.src : k.dst).dtype);
        for (int64_t b = 0, at = 0; at < dim; ++b, at += job.block) {
            if (W == Way::store) {
                const char* from = values + at * item;
                uint32_t exponent = scale_exponent(runs.largest(from, job.block));
                if (v4) scales[b] = char(exponent);
                else put_word(scales + 4 * b, exponent << 23);
                run(runs.values, from, packed + at, job.block, float_of((254 - exponent) << 23), ahead);
            } else {
                uint32_t bits = v4 ? uint32_t(uint8_t(scales[b])) << 23 : get_word(scales + 4 * b);
                runs.values.plain(packed + at, values + at * item, job.block, float_of(bits), 0);
            }
        }
        if (W == Way::store) {
            if (v4) scales[dim / job.block] = 0;
            run(runs.rope, rope_from, packed_rope, rope_run(), 1.0f, 0);
        } else {
            runs.rope.plain(packed_rope, floats, rope_run(), 1.0f, 0);
        }
    }

private:
    // A copy counts bytes, a conversion elements.
    int64_t rope_run() const { return runs.rope.plain == kCopy.plain ? rope_bytes : rope_dim; }

    static void run(const Run& r, const char* from, char* to, int64_t n, float scale, int64_t ahead) {
        (reinterpret_cast<uintptr_t>(to) % kVec == 0 ? r.past_cache : r.plain)(from, to, n, scale, ahead);
    }
    static void put_word(char* to, uint32_t bits) { __builtin_memcpy(to, &bits, 4); }
    static uint32_t get_word(const char* from) {
        uint32_t bits;
        __builtin_memcpy(&bits, from, 4);
        return bits;
    }
};

}  // namespace
}  // namespace portakv
