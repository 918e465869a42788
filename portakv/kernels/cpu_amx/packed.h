// Packed pages: what matrix and vector units want of K and V. Part of kernels.cpp, in whose namespace it stands.
//
// Tokens that share lines of their page are brought together, transposed in registers and written line by line; others
// go unit by unit.
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

// The page of head 0 that a slot is in, and which of its tokens it is.
struct Place {
    char* page;
    int64_t t;
};

inline Place place(const Rows& rows, int64_t slot) {
    return {rows.data + slot / rows.page * rows.page_stride, slot % rows.page};
}

// From one block of units to the next.
inline int64_t block_stride(const Rows& rows, const Packing& p) { return p.block * rows.page * p.unit; }

// ---- tiles --------------------------------------------------------------------------------------------------------

// The packed side of a store or gather, K or V.
struct Packed {
    const Half* half;
    Rows cache;
    Rows other;
    Packing packing;
    Run run;  // null where bytes stay as they are
    int64_t units;
    int64_t item;        // bytes of a stored element
    int64_t other_item;  // and of one on the other side
    int64_t ahead;       // bytes from a row to the next head's, which is asked for meanwhile, or 0
};

inline float scale_of(const Half& half, int64_t head) {
    return half.scale ? half.scale[head * half.scale_stride] : 1.0f;
}

inline char* row_of(const Packed& p, const Pick& pick) { return p.other.data + pick.token * p.other.row_stride; }

// `put(offset in the page, units done, units)` for the runs of units [first, first + units) within blocks.
template <class Put>
void by_blocks(const Packed& p, int64_t first, int64_t units, Put put) {
    const int64_t step = p.packing.width * p.packing.unit, block = p.packing.block;
    int64_t whole = first ? first / block : 0, from = first - whole * block;
    int64_t offset = whole * block_stride(p.cache, p.packing);
    for (int64_t done = 0, n; done < units; done += n, from = 0, offset += block_stride(p.cache, p.packing)) {
        n = block - from < units - done ? block - from : units - done;
        put(offset + from * step, done, n);
    }
}

// Units [first, first + units) of one token, between `own`, where its unit 0 lies, and `row`.
template <Way W, int Unit>
void do_units(const Packed& p, char* row, char* own, int64_t first, int64_t units) {
    const int64_t step = p.packing.width * Unit;
    by_blocks(p, first, units, [&](int64_t offset, int64_t done, int64_t n) {
        if (W == Way::store)
            spread<Unit>(row + done * Unit, own + offset, step, n);
        else
            collect<Unit>(own + offset, step, row + done * Unit, n);
    });
}

// Units of a token that are brought together at a time: those of a whole tile stay in the first-level cache, where rows
// that are a power of two apart would push each other out.
constexpr int kUnits = 64;

template <Way W, int Unit>
void do_token(const Packed& p, char* row, char* own, float scale) {
    if (!p.run.plain) return do_units<W, Unit>(p, row, own, 0, p.units);
    if (p.packing.width == 1) {
        if (W == Way::gather) return p.run.plain(own, row, p.half->dim, scale, 0);
        const bool aligned = reinterpret_cast<uintptr_t>(own) % kVec == 0;
        return (aligned ? p.run.past_cache : p.run.plain)(row, own, p.half->dim, scale, p.ahead);
    }
    alignas(64) char some[kUnits * Unit];
    for (int64_t u = 0; u < p.units; u += kUnits) {
        const int64_t n = p.units - u < kUnits ? p.units - u : kUnits, elements = n * Unit / p.item;
        if (W == Way::store) p.run.plain(row, some, elements, scale, 0);
        do_units<W, Unit>(p, some, own, u, n);
        if (W == Way::gather) p.run.plain(some, row, elements, scale, 0);
        row += elements * p.other_item;
    }
}

constexpr int kTileTokens = 64;

// The tokens of a group, and where K and V of head 0 lie: what all heads share is found once.
struct Tile {
    const Pick* picks;
    int64_t count;
    int64_t first;  // slot of the tile
    uint64_t present;
    Place place[2];
    char* rows[2][kTileTokens];  // of a store: the last, where two slots are the same
};

template <Way W>
void find(const PackedJob& job, const Packed* packed, int64_t group, Tile& tile) {
    tile.picks = job.picks + job.starts[group];
    tile.count = job.starts[group + 1] - job.starts[group];
    tile.first = tile.picks[0].slot & ~(job.tile - 1);
    tile.present = 0;
    for (int h = 0; h < 2; ++h) tile.place[h] = place(packed[h].cache, tile.first);
    for (int64_t i = 0; i < tile.count; ++i) {
        const int64_t at = tile.picks[i].slot - tile.first;
        tile.present |= uint64_t(1) << at;
        if (W == Way::store)
            for (int h = 0; h < 2; ++h) tile.rows[h][at] = row_of(packed[h], tile.picks[i]);
    }
}

// Where unit 0 of a slot of the tile lies.
inline char* own_of(const Packed& p, const Tile& tile, int h, int64_t head, int64_t slot) {
    const Place& at = tile.place[h];
    return at.page + head * p.cache.head_stride + token_offset(p.packing, at.t + slot - tile.first);
}

inline bool are_lines(const char* at, int64_t step) {
    return (reinterpret_cast<uintptr_t>(at) | uintptr_t(step)) % kLine == 0;
}

// 16 / Unit whole lines. Where vectors are narrower, lines are put together first: written in parts, by turns, they
// took three to ten times as long.
template <int Unit, int Stride>
inline void put_lines(const char* from, char* to, int64_t step) {
    if constexpr (kVec == kLine) return transpose<Unit, 4, Stride>(from, to, step, PutLanesPastCache{});
    alignas(kLine) char lines[16 / Unit * kLine];
    transpose<Unit, 4, Stride>(from, lines, kLine, PutLanes{});
    for (int i = 0; i < 16 / Unit; ++i) copy_bytes<put_past_cache>(lines + i * kLine, to + i * step, kLine);
}

// `units` of K of a tile's tokens, `kUnits` of each in `chunk`, to their page from `to` on.
template <int Unit>
void put_tile(const PackedJob& job, const Packed& p, uint64_t present, const char* chunk, char* to, int64_t units) {
    constexpr int kPer = 16 / Unit, kStride = kUnits * Unit, kTokens = kLine / Unit;
    const int64_t step = p.packing.width * Unit;
    const bool past_cache = are_lines(to, step);
    if (past_cache && present == all_of(job.tile)) {
        // The lines of a unit one after the other: to write every second line of memory takes longer.
        for (int64_t u = 0; u < units; u += kPer, chunk += 16, to += kPer * step)
            for (int64_t t = 0; t < job.tile; t += kTokens)
                put_lines<Unit, kStride>(chunk + t * kStride, to + t * Unit, step);
        return;
    }
    auto by_line = [&](auto lanes, auto put) {
        for (int64_t u = 0; u < units; u += kPer)
            transpose<Unit, decltype(lanes)::value, kStride>(chunk + u * Unit, to + u * step, step, put);
    };
    using Line = std::integral_constant<int, 4>;
    using HalfLine = std::integral_constant<int, 2>;
    for (int64_t t = 0; t < job.tile; t += kTokens, chunk += kTokens * kStride, to += kLine) {
        const uint64_t some = present >> t & all_of(kTokens);
        if (some == all_of(kTokens) && past_cache)
            for (int64_t u = 0; u < units; u += kPer) put_lines<Unit, kStride>(chunk + u * Unit, to + u * step, step);
        else if (some == all_of(kTokens))
            by_line(Line{}, PutLanes{});
        else if (some == all_of(kTokens / 2))
            by_line(HalfLine{}, PutLanes{});
        else if (kMasks && some && job.tile >= kTokens)
            by_line(Line{}, PutSomeLanes<Unit>{some});
        else
            for (int64_t i = 0; i < kTokens; ++i)
                if (some >> i & 1) spread<Unit>(chunk + i * kStride, to + i * Unit, step, units);
    }
}

// Units [first, first + units) of V of a tile's tokens, `from` bytes after `rows`, in pairs.
void put_pairs(const PackedJob& job, const Packed& p, uint64_t present, char* const* rows, int64_t from, char* to,
               int64_t first, int64_t units, int64_t ahead) {
    const bool past_cache = are_lines(to, block_stride(p.cache, p.packing));
    by_blocks(p, first, units, [&](int64_t offset, int64_t done, int64_t) {
        char* line = to + offset;
        const int64_t at = from + done * 2;
        if (ahead && done % 32 == 0)
            for (int64_t i = 0; i < job.tile; ++i)
                if (present >> i & 1) ask_for(rows[i] + at + ahead);
        for (int64_t i = 0; i < job.tile; i += 2, line += kLine) {
            const uint64_t some = present >> i & 3;
            if (some == 3 && past_cache)
                zip(rows[i] + at, rows[i + 1] + at, line, PutLanesPastCache{});
            else if (some == 3)
                zip(rows[i] + at, rows[i + 1] + at, line, PutLanes{});
            else if (some)
                spread<2>(rows[i + some / 2] + at, line + some / 2 * 2, 4, 16);
        }
    });
}

template <int Unit>
void store_tile(const PackedJob& job, const Packed& p, const Tile& tile, int h, int64_t head) {
    char* to = own_of(p, tile, h, head, tile.first);
    int64_t from = head * p.other.head_stride;
    const bool pairs = p.packing.width == 2;
    if (pairs && !p.run.plain) return put_pairs(job, p, tile.present, tile.rows[h], from, to, 0, p.units, p.ahead);
    alignas(64) char chunk[kTileTokens * kUnits * Unit];
    char* rows[kTileTokens];
    for (int64_t i = 0; i < job.tile; ++i) rows[i] = chunk + i * kUnits * Unit;
    for (int64_t u = 0; u < p.units; u += kUnits) {
        const int64_t n = p.units - u < kUnits ? p.units - u : kUnits, elements = n * Unit / p.item;
        for (int64_t i = 0; i < job.tile; ++i) {
            if (!(tile.present >> i & 1)) continue;
            const char* row = tile.rows[h][i] + from;
            if (p.ahead) fetch(row + p.ahead, int(elements * p.other_item));
            if (p.run.plain)
                p.run.plain(row, rows[i], elements, scale_of(*p.half, head), 0);
            else
                copy_bytes<put>(row, rows[i], n * Unit);
        }
        if (pairs)
            put_pairs(job, p, tile.present, rows, 0, to, u, n, 0);
        else
            put_tile<Unit>(job, p, tile.present, chunk, to + u * p.packing.width * Unit, n);
        from += elements * p.other_item;
    }
}

// Bytes as they are, where a token's units lie together.
void store_rows(const Packed& p, const Tile& tile, int h, int64_t head) {
    const int64_t bytes = p.units * p.packing.unit, from = head * p.other.head_stride;
    char* to = own_of(p, tile, h, head, tile.first);
    const bool past_cache = are_lines(to, bytes);
    for (uint64_t left = tile.present; left; left &= left - 1) {
        const int i = __builtin_ctzll(left);
        const char* row = tile.rows[h][i] + from;
        if (p.ahead) fetch(row + p.ahead, int(bytes));
        char* own = to + i * bytes;
        past_cache ? copy_bytes<put_past_cache>(row, own, bytes) : copy_bytes<put>(row, own, bytes);
    }
}

// Ask for the lines that a token's units are in.
inline void touch_token(const Packed& p, const char* own) {
    int64_t step = p.packing.width * p.packing.unit, per_line = step < kLine ? kLine / step : 1;
    for (int64_t b = 0; b < p.units; b += p.packing.block, own += block_stride(p.cache, p.packing))
        for (int64_t u = 0; u < p.packing.block; u += per_line) ask_for(own + u * step);
}

// Ask for the lines that a tile's tokens fill in part.
void touch_tile(const PackedJob& job, const Packed& p, const Tile& tile, int h, int64_t head) {
    const int64_t width = p.packing.width, line = kLine / p.packing.unit;
    const int64_t tokens = width < line ? width : line < job.tile ? line : job.tile;
    for (int64_t t = 0; t < job.tile; t += tokens) {
        const uint64_t some = tile.present >> t & all_of(tokens);
        if (some && some != all_of(tokens)) touch_token(p, own_of(p, tile, h, head, tile.first + t));
    }
}

// From so many tokens on it pays to write a tile line by line.
constexpr int kMany = 2;

template <Way W, int Unit>
void do_tile(const PackedJob& job, const Packed& p, const Tile& tile, int h, int64_t head) {
    if (W == Way::store && p.packing.width == 1 && !p.run.plain) return store_rows(p, tile, h, head);
    if (W == Way::store && p.packing.width > 1 && tile.count >= kMany) return store_tile<Unit>(job, p, tile, h, head);
    for (int64_t i = 0; i < tile.count; ++i) {
        char* row = row_of(p, tile.picks[i]) + head * p.other.head_stride;
        do_token<W, Unit>(p, row, own_of(p, tile, h, head, tile.picks[i].slot), scale_of(*p.half, head));
    }
}

template <Way W>
void do_tiles(const PackedJob& job, int64_t begin, int64_t end) {
    Packed packed[2];
    for (int h = 0; h < 2; ++h) {
        const Half& half = job.half[h];
        const Rows &cache = W == Way::store ? half.dst : half.src, &other = W == Way::store ? half.src : half.dst;
        const int64_t item = item_bytes(cache.dtype);
        packed[h] = {&half, cache, other, job.packing[h], {}, half.dim * item / job.packing[h].unit, item,
                     item_bytes(other.dtype), job.far ? half.src.head_stride : 0};
        if (half.src.dtype != half.dst.dtype) packed[h].run = converter(half.src.dtype, half.dst.dtype);
    }
    const int64_t heads = job.half[0].heads;
    Tile tiles[2];
    int64_t found = -1;
    auto look_at = [&](int64_t item) {
        const int64_t group = item / heads;
        Tile& tile = tiles[group % 2];
        if (group != found) find<W>(job, packed, found = group, tile);
        if (W == Way::store)
            for (int h = 0; h < 2; ++h) touch_tile(job, packed[h], tile, h, item % heads);
    };
    if (begin < end) look_at(begin);
    for (int64_t item = begin; item < end; ++item) {
        if (item + 1 < end) look_at(item + 1);
        const int64_t head = item % heads;
        const Tile& tile = tiles[item / heads % 2];
        for (int h = 0; h < 2; ++h) {
            const Packed& p = packed[h];
            if (p.packing.unit == 1) do_tile<W, 1>(job, p, tile, h, head);
            if (p.packing.unit == 2) do_tile<W, 2>(job, p, tile, h, head);
            if (p.packing.unit == 4) do_tile<W, 4>(job, p, tile, h, head);
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
    auto own = [&](int64_t slot) {
        const Place at = place(p.cache, slot);
        return at.page + head * p.cache.head_stride + token_offset(p.packing, at.t);
    };
    for (int64_t i = 0; i < job.count; ++i)
        do_units<Way::gather, Unit>(p, staged + i * job.head_bytes, own(job.src[i]), 0, p.units);
    for (int64_t i = 0; i < job.count; ++i)
        do_units<Way::store, Unit>(p, staged + i * job.head_bytes, own(job.tgt[i]), 0, p.units);
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
        Packed p{nullptr, job.rows, {}, packing, {}, job.head_bytes / packing.unit, 0, 0, 0};
        p.cache.data += item / job.heads * job.layer_stride;
        char* staged = job.staging + thread * job.staging_bytes;
        if (packing.unit == 1) move_head<1>(job, p, item % job.heads, staged);
        if (packing.unit == 2) move_head<2>(job, p, item % job.heads, staged);
        if (packing.unit == 4) move_head<4>(job, p, item % job.heads, staged);
    }
}

}  // namespace
}  // namespace portakv
