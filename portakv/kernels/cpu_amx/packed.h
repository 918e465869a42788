// Packed pages: what matrix and vector units want of K and V. Part of kernels.cpp, in whose namespace it stands.
//
// Tokens that share lines of their page are transposed in registers and written line by line; others go unit by unit.
#pragma once

#include "lanes.h"
#include "rows.h"

namespace portakv {
namespace {

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

// ---- tiles --------------------------------------------------------------------------------------------------------

// The packed side of a store or gather, K or V, of one head.
struct Packed {
    const Half* half;
    Rows cache;
    Packing packing;
    Run run;         // null where bytes stay as they are
    int64_t dim;
    int64_t item;    // bytes of a stored element
    int64_t other;   // and of one on the other side
    int64_t ahead;   // bytes from a row to the next head's, which is asked for meanwhile, or 0
};

// `put(offset in the page, units done, units)` for the runs of units [first, first + units) within blocks.
template <class Put>
void by_blocks(const Packed& p, int64_t first, int64_t units, Put put) {
    const int64_t step = p.packing.width * p.packing.unit, block = p.packing.block;
    for (int64_t done = 0, n; done < units; done += n, first += n) {
        n = block - first % block < units - done ? block - first % block : units - done;
        put(first / block * block_stride(p.cache, p.packing) + first % block * step, done, n);
    }
}

// Units [first, first + units) of one token, between its page and `row`.
template <Way W, int Unit>
void do_units(const Packed& p, char* row, int64_t slot, int64_t head, int64_t first, int64_t units) {
    const Place at = place(p.cache, slot, head);
    const int64_t step = p.packing.width * Unit;
    char* own = at.page + token_offset(p.packing, at.t);
    by_blocks(p, first, units, [&](int64_t offset, int64_t done, int64_t n) {
        if (W == Way::store)
            spread<Unit>(row + done * Unit, own + offset, step, n);
        else
            collect<Unit>(own + offset, step, row + done * Unit, n);
    });
}

inline char* row_of(const Rows& rows, const Pick& pick, int64_t head) {
    return rows.data + pick.token * rows.row_stride + head * rows.head_stride;
}

inline float scale_of(const Half& half, int64_t head) {
    return half.scale ? half.scale[head * half.scale_stride] : 1.0f;
}

// Elements of a token that are converted at a time; so many of a whole tile stay in the first-level cache.
constexpr int kChunk = 64;

template <Way W, int Unit>
void do_token(const Packed& p, const Pick& pick, int64_t head) {
    char* row = row_of(W == Way::store ? p.half->src : p.half->dst, pick, head);
    const float scale = scale_of(*p.half, head);
    if (p.packing.width == 1) {
        const Run run = p.run.plain ? p.run : kCopy;
        const int64_t n = p.run.plain ? p.dim : p.dim * p.item;
        const Place at = place(p.cache, pick.slot, head);
        char* own = at.page + token_offset(p.packing, at.t);
        if (W == Way::store) {
            if (p.ahead) fetch(row + p.ahead, int(p.dim * p.other));
            (reinterpret_cast<uintptr_t>(own) % kVec == 0 ? run.past_cache : run.plain)(row, own, n, scale, 0);
        } else {
            run.plain(own, row, n, scale, 0);
        }
        return;
    }
    if (!p.run.plain) return do_units<W, Unit>(p, row, pick.slot, head, 0, p.dim * p.item / Unit);
    alignas(64) char chunk[kChunk * 4];
    for (int64_t d = 0; d < p.dim; d += kChunk, row += kChunk * p.other) {
        const int64_t n = p.dim - d < kChunk ? p.dim - d : kChunk;
        if (W == Way::store) p.run.plain(row, chunk, n, scale, 0);
        do_units<W, Unit>(p, chunk, pick.slot, head, d * p.item / Unit, n * p.item / Unit);
        if (W == Way::gather) p.run.plain(chunk, row, n, scale, 0);
    }
}

constexpr int kTileTokens = 64;

// The rows of a tile's `tokens` from `slot` on; those of absent tokens are placeholders.
struct Tile {
    char* rows[kTileTokens];
    uint64_t present;
    int64_t tokens;
    int64_t slot;
};

template <int Unit>
void put_tile(const Packed& p, const Tile& tile, int64_t head, int64_t first, int64_t units, int64_t ahead) {
    const Place at = place(p.cache, tile.slot, head);
    char* to = at.page + token_offset(p.packing, at.t);
    const bool pairs = p.packing.width == 2, lines = tile.tokens * Unit == kLine;
    if (!pairs && !(lines && kMasks) && tile.present != all_of(tile.tokens)) {
        for (int64_t i = 0; i < tile.tokens; ++i)
            if (tile.present >> i & 1) do_units<Way::store, Unit>(p, tile.rows[i], tile.slot + i, head, first, units);
        return;
    }
    by_blocks(p, first, units, [&](int64_t offset, int64_t done, int64_t n) {
        const char* rows[kTileTokens];
        for (int64_t i = 0; i < tile.tokens; ++i) rows[i] = tile.rows[i] + done * Unit;
        char* out = to + offset;
        if (!pairs) {
            const int64_t step = p.packing.width * Unit;
            return (lines ? transpose<Unit, 4> : transpose<Unit, 2>)(rows, tile.present, out, step, n, ahead);
        }
        for (int64_t i = 0; i < tile.tokens; i += 2, out += kLine)
            if (uint64_t present = tile.present >> i & 3) zip(rows + i, present, out, ahead);
    });
}

// Where two slots of a tile are the same, the last counts.
template <int Unit>
void store_tile(const Packed& p, const Pick* picks, int64_t count, int64_t tokens, int64_t head) {
    Tile tile;
    tile.tokens = tokens;
    tile.slot = picks[0].slot & ~(tokens - 1);
    tile.present = 0;
    for (int64_t i = 0; i < tokens; ++i) tile.rows[i] = row_of(p.half->src, picks[0], head);
    for (int64_t i = 0; i < count; ++i) {
        tile.rows[picks[i].slot - tile.slot] = row_of(p.half->src, picks[i], head);
        tile.present |= uint64_t(1) << (picks[i].slot - tile.slot);
    }
    if (!p.run.plain) return put_tile<Unit>(p, tile, head, 0, p.dim * p.item / Unit, p.ahead);
    alignas(64) char chunk[kLine * kChunk];  // an element of each of a tile's tokens takes a line at most
    Tile converted = tile;
    for (int64_t d = 0; d < p.dim; d += kChunk) {
        const int64_t n = p.dim - d < kChunk ? p.dim - d : kChunk;
        for (int64_t i = 0; i < tokens; ++i) {
            converted.rows[i] = chunk + i * n * p.item;
            if (tile.present >> i & 1)
                p.run.plain(tile.rows[i] + d * p.other, converted.rows[i], n, scale_of(*p.half, head), p.ahead);
        }
        put_tile<Unit>(p, converted, head, d * p.item / Unit, n * p.item / Unit, 0);
    }
}

// Ask for the lines that a token's units are in.
inline void touch_token(const Packed& p, int64_t slot, int64_t head) {
    const Place first = place(p.cache, slot, head);
    char* at = first.page + token_offset(p.packing, first.t);
    int64_t units = p.dim * p.item / p.packing.unit, step = p.packing.width * p.packing.unit;
    int64_t per_line = step < kLine ? kLine / step : 1;
    for (int64_t b = 0; b < units; b += p.packing.block, at += block_stride(p.cache, p.packing))
        for (int64_t u = 0; u < p.packing.block; u += per_line) __builtin_prefetch(at + u * step, 1);
}

// From so many tokens on it pays to write a tile line by line.
constexpr int kMany = 4;

template <Way W, int Unit>
void do_tile(const PackedJob& job, const Packed& p, int64_t group, int64_t head) {
    const Pick* picks = job.picks + job.starts[group];
    const int64_t count = job.starts[group + 1] - job.starts[group];
    if (W == Way::store && count >= kMany && p.packing.width > 1) return store_tile<Unit>(p, picks, count, job.tile, head);
    for (int64_t i = 0; i < count; ++i) do_token<W, Unit>(p, picks[i], head);
}

template <Way W>
void do_tiles(const PackedJob& job, int64_t begin, int64_t end) {
    Packed packed[2];
    for (int h = 0; h < 2; ++h) {
        const Half& half = job.half[h];
        const Rows &cache = W == Way::store ? half.dst : half.src, &other = W == Way::store ? half.src : half.dst;
        packed[h] = {&half, cache, job.packing[h], {}, half.dim, item_bytes(cache.dtype), item_bytes(other.dtype),
                     job.far ? half.src.head_stride : 0};
        if (half.src.dtype != half.dst.dtype) packed[h].run = converter(half.src.dtype, half.dst.dtype);
    }
    const int64_t heads = job.half[0].heads;
    for (int64_t item = begin; item < end; ++item) {
        if (W == Way::store && item + 1 < end) {
            const int64_t* next = job.starts + (item + 1) / heads;
            // Tokens of a tile share the lines of K.
            if (next[1] - next[0] < job.tile) {
                touch_token(packed[0], job.picks[next[0]].slot, (item + 1) % heads);
                for (int64_t i = next[0]; i < next[1]; ++i) touch_token(packed[1], job.picks[i].slot, (item + 1) % heads);
            }
        }
        for (const Packed& p : packed) {
            if (p.packing.unit == 1) do_tile<W, 1>(job, p, item / heads, item % heads);
            if (p.packing.unit == 2) do_tile<W, 2>(job, p, item / heads, item % heads);
            if (p.packing.unit == 4) do_tile<W, 4>(job, p, item / heads, item % heads);
        }
    }
    if (W == Way::store) end_stream();
}

// A thread gets whole tiles, or heads of one: what a line holds has one owner, who goes in token order.
template <Way W>
void do_packed(const PackedJob& job) {
    int64_t items = job.groups * job.half[0].heads;
    if (job.threads <= 1) return do_tiles<W>(job, 0, items);
#ifdef _OPENMP
#pragma omp parallel num_threads(job.threads)
    {
        int64_t i = omp_get_thread_num(), n = omp_get_num_threads();
        do_tiles<W>(job, items * i / n, items * (i + 1) / n);
    }
#endif
}

template <int Unit>
void move_head(const MoveJob& job, const Packed& p, int64_t head, char* staged) {
    int64_t units = job.head_bytes / Unit;
    for (int64_t i = 0; i < job.count; ++i)
        do_units<Way::gather, Unit>(p, staged + i * job.head_bytes, job.src[i], head, 0, units);
    for (int64_t i = 0; i < job.count; ++i)
        do_units<Way::store, Unit>(p, staged + i * job.head_bytes, job.tgt[i], head, 0, units);
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
        Packed p{nullptr, job.rows, packing, {}, 0, 0, 0, 0};
        p.cache.data += item / job.heads * job.layer_stride;
        char* staged = job.staging + thread * job.staging_bytes;
        if (packing.unit == 1) move_head<1>(job, p, item % job.heads, staged);
        if (packing.unit == 2) move_head<2>(job, p, item % job.heads, staged);
        if (packing.unit == 4) move_head<4>(job, p, item % job.heads, staged);
    }
}

}  // namespace
}  // namespace portakv
