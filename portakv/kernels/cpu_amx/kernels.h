// The jobs that the Python layer (native.cpp) hands to the kernels (kernels.cpp), as plain data.
//
// kernels.cpp is compiled once per instruction set. This header is all that those units share, and holds no inline
// function: a linker that merged an AVX-512 copy of one into the generic unit would break older machines.
#pragma once

#include <cstdint>

namespace portakv {

enum class DType : uint8_t { f32, f16, bf16, e4m3fn, e4m3fnuz, e5m2, e5m2fnuz, i32, i64, other };

// An element of an index tensor or of scales. A tensor made from a raw buffer may lie at any address. A
// pointer to one is not declared `auto`, which drops the alignment of its type.
template <int Bytes>
struct Index;
template <>
struct Index<4> {
    typedef int32_t Type __attribute__((aligned(1)));
};
template <>
struct Index<8> {
    typedef int64_t Type __attribute__((aligned(1)));
};
using Int32 = Index<4>::Type;
using Int64 = Index<8>::Type;
typedef float Scale __attribute__((aligned(1)));

// A 1-D int32 or int64 tensor. `stride` counts elements.
struct Slots {
    char* data;
    int64_t size;
    int64_t stride;
    bool wide;
};

// Rows `[rows, H, D]` or `[pages, page, H, D]`. Strides are bytes; `page` is 0 where rows are evenly spaced.
struct Rows {
    char* data;
    int64_t row_stride;
    int64_t head_stride;
    int64_t page;
    int64_t page_stride;
    DType dtype;
};

// K or V of a store or gather. `scale` is one float32 per head, `scale_stride` elements apart, where one side is fp8.
struct Half {
    Rows src;
    Rows dst;
    int64_t heads;
    int64_t dim;
    const Scale* scale;
    int64_t scale_stride;
};

// Rotary embedding of one half of a store. Rows of `table` have `dim / 2` cosines, then as many sines, for positions
// below `max_position`; the first `dim` elements of each head are rotated.
struct Rope {
    const char* table;
    DType dtype;
    int64_t row_stride;  // bytes
    int64_t max_position;
    Slots positions;
    int64_t dim;
    bool pairs;  // of neighbours, instead of an element of either half
    int half;
    char* scratch;  // a piece of `scratch_bytes` for each thread
    int64_t scratch_bytes;
};

// Slots outside [first, end) are skipped; those >= end, and tokens without an angle, are added to `*fault`.
struct RowJob {
    Slots loc;
    int64_t first;
    int64_t end;
    Half half[2];
    int64_t* fault;
    int threads;
    int64_t block;  // FlashMLA: values that share a scale
    Rope rope;
};

// One K or V buffer of every layer, and the rows to copy within each.
struct MoveJob {
    Rows rows;  // of layer 0
    int64_t layer_stride;
    int64_t layers;
    int64_t heads;
    int64_t head_bytes;
    const int64_t* tgt;
    const int64_t* src;
    int64_t count;
    char* staging;  // `threads` pieces of `staging_bytes`
    int64_t staging_bytes;
    int threads;
};

// One line of a read structure: `entries` slots of the table from element `from` on, `step` apart, to element `to` of
// the output. Its places are those from `at` to the next line's; what its entries leave over is padding.
struct ReadLine {
    int64_t from;
    int64_t entries;
    int64_t at;
    int64_t to;
};

struct ReadJob {
    const Int64* mapping;  // null: slots stay what they are
    int64_t num_slots;
    int64_t reserved;
    const char* table;
    bool table_wide;
    char* out;
    bool out_wide;
    int64_t places;
    const ReadLine* lines;
    int64_t num_lines;
    int64_t step;  // an entry is a slot divided by it
    int64_t pad;
    int64_t* fault;
    int64_t* cast_fault;
    int threads;
};

// How a page keeps the tokens of one head: for each `block` units of `unit` bytes, the page's tokens in groups of
// `width`; within a group unit after unit, and for each unit the group's tokens side by side.
struct Packing {
    int64_t unit;
    int64_t width;
    int64_t block;
};

struct Pick {
    int64_t slot;
    int64_t token;
};

// A store or gather of packed pages. The picks of group g, [starts[g], starts[g + 1]), lie in one tile of `tile` slots,
// a power of two; of a store they are all that do, in token order. The packed side of a half has pages; its row stride
// means nothing.
struct PackedJob {
    const Pick* picks;
    const int64_t* starts;
    int64_t groups;
    int64_t tile;
    Half half[2];
    Packing packing[2];
    bool far;  // the source of a store is larger than caches
    int threads;
};

struct Kernels {
    const char* isa;
    void (*store)(const RowJob&);
    void (*gather)(const RowJob&);
    void (*move)(const MoveJob&);
    void (*read)(const ReadJob&);
    void (*store_flashmla)(const RowJob&);
    void (*gather_flashmla)(const RowJob&);
    void (*store_packed)(const PackedJob&);
    void (*gather_packed)(const PackedJob&);
    void (*move_packed)(const MoveJob&, const Packing&);
    void (*store_rope)(const RowJob&);
    void (*store_rope_flashmla)(const RowJob&);
};

// On other machines than x86-64 only the last is there.
extern const Kernels kernels_avx512, kernels_avx2, kernels_generic;

}  // namespace portakv
