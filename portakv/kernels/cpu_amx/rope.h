// Rotary embedding of source rows on their way into the cache. Part of kernels.cpp, in whose namespace it stands.
#pragma once

#include "rows.h"

namespace portakv {
namespace {

// Elements (i, i + n) of 2n, or (2i, 2i + 1) where `Pairs`, turned by angle i: in float32, each product and each sum
// rounded, then rounded to the source's dtype.
template <class Float, bool Pairs>
void rotate(const char* src, char* dst, const float* cos, const float* sin, int64_t n) {
    using Bits = typename Float::Bits;
    const Bits* in = reinterpret_cast<const Bits*>(src);
    Bits* out = reinterpret_cast<Bits*>(dst);
    const int64_t step = Pairs ? 2 : 1, apart = Pairs ? 1 : n;
    for (int64_t begin = 0; begin < n; begin += kBlock) {
        const int count = int(n - begin < kBlock ? n - begin : kBlock);
        const Bits* x = in + begin * step;
        // As in convert_block, codes are made in 32 bits and narrowed by loops of their own.
        uint32_t first[kBlock], second[kBlock];
        for (int i = 0; i < count; ++i) {
            float a = float_of(Float::widen(x[i * step])), b = float_of(Float::widen(x[i * step + apart]));
            float c = cos[begin + i], s = sin[begin + i];
            first[i] = Float::narrow(bits_of(a * c - b * s));
            second[i] = Float::narrow(bits_of(b * c + a * s));
        }
        Bits* y = out + begin * step;
        if (Pairs) {
            for (int i = 0; i < count; ++i) y[2 * i] = Bits(first[i]), y[2 * i + 1] = Bits(second[i]);
        } else {
            for (int i = 0; i < count; ++i) y[i] = Bits(first[i]);
            for (int i = 0; i < count; ++i) y[i + n] = Bits(second[i]);
        }
    }
}

using RotateFn = void (*)(const char* src, char* dst, const float* cos, const float* sin, int64_t n);

inline RotateFn rotation(DType dtype, bool pairs) {
    if (dtype == DType::f32) return pairs ? rotate<F32, true> : rotate<F32, false>;
    if (dtype == DType::f16) return pairs ? rotate<F16, true> : rotate<F16, false>;
    return pairs ? rotate<BF16, true> : rotate<BF16, false>;
}

// One half of a store with its source rows rotated: into a scratch row of the thread, which is stored like any other.
struct Rotated {
    const Rope& rope;
    Half half;  // from the scratch row
    const Rows& src;
    RotateFn turn;
    int64_t item;
    float* angles;
    char* scratch;

    Rotated(const RowJob& job, int thread)
        : rope(job.rope), half(job.half[rope.half]), src(job.half[rope.half].src), turn(rotation(src.dtype, rope.pairs)),
          item(item_bytes(src.dtype)), angles(reinterpret_cast<float*>(rope.scratch + thread * rope.scratch_bytes)),
          scratch(rope.scratch + thread * rope.scratch_bytes + rope.dim * 4) {
        half.src.head_stride = half.dim * item;
        half.src.row_stride = 0;
    }

    bool takes(int64_t token) const {
        int64_t position = slot_at(rope.positions, token);
        return position >= 0 && position < rope.max_position;
    }

    const char* row(int64_t token) const {
        const char* table = rope.table + slot_at(rope.positions, token) * rope.row_stride;
        const float *cos = angles, *sin = angles + rope.dim / 2;
        if (rope.dtype == DType::f32)
            __builtin_memcpy(angles, table, std::size_t(rope.dim * 4));
        else
            converter(rope.dtype, DType::f32).plain(table, reinterpret_cast<char*>(angles), rope.dim, 1.0f, 0);
        const char* from = row_at(src, token);
        char* to = scratch;
        for (int64_t h = 0; h < half.heads; ++h, from += src.head_stride, to += half.dim * item) {
            turn(from, to, cos, sin, rope.dim / 2);
            int64_t rest = (half.dim - rope.dim) * item;
            if (rest) __builtin_memcpy(to + rope.dim * item, from + rope.dim * item, std::size_t(rest));
        }
        return scratch;
    }
};

// Source rows as they are.
struct Plain {
    const RowJob& job;
    Plain(const RowJob& j, int) : job(j) {}
    static constexpr bool takes(int64_t) { return true; }
};

}  // namespace
}  // namespace portakv
