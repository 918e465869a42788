// The kernels that move rows, compiled once per instruction set (PORTAKV_ISA names the unit).
//
// Nothing here may have external linkage but the table at the end, and no inline function of the C++ library may be
// called: see kernels.h.

#include "runs.h"

#ifdef _OPENMP
#include <omp.h>
#endif

namespace portakv {
namespace {

// ---- rows ---------------------------------------------------------------------------------------------------------

inline char* row_at(const Rows& rows, int64_t slot) {
    if (rows.page == 0) return rows.data + slot * rows.row_stride;
    return rows.data + slot / rows.page * rows.page_stride + slot % rows.page * rows.row_stride;
}

enum class Way { store, gather };

// How one row of a half is done: `runs` runs of `n` elements.
struct Plan {
    const Half* half;
    Run run;
    int64_t runs;
    int64_t n;
    int64_t src_step;
    int64_t dst_step;
    int64_t row_bytes;  // on the side that slots point into
    int64_t fetch_bytes;  // of a source row that is worth asking for ahead
};

// Sources of more come from memory, and a conversion keeps too few loads under way by itself (16384 tokens: 1.18
// instead of 1.30 times the time of the copying store); for less it only costs instructions.
constexpr int64_t kFetchBytes = 16 << 20;

template <Way W>
Plan plan(const Half& half, int64_t tokens) {
    const Rows &src = half.src, &dst = half.dst;
    int64_t src_run = half.dim * item_bytes(src.dtype), dst_run = half.dim * item_bytes(dst.dtype);
    bool src_dense = half.heads == 1 || src.head_stride == src_run;
    bool dst_dense = half.heads == 1 || dst.head_stride == dst_run;
    bool one_scale = true;
    for (int64_t h = 1; half.scale && h < half.heads; ++h) one_scale &= half.scale[h * half.scale_stride] == *half.scale;
    Plan p{&half, kCopy, half.heads, src_run, src.head_stride, dst.head_stride, 0, 0};
    p.row_bytes = half.heads * (W == Way::store ? dst_run : src_run);
    if (src.dtype != dst.dtype) {
        p.run = converter(src.dtype, dst.dtype);
        p.n = half.dim;
        int64_t row = half.heads * src_run;
        if (W == Way::store && src_dense && tokens * row > kFetchBytes) p.fetch_bytes = row;
    }
    if (src_dense && dst_dense && one_scale) {
        p.n *= half.heads;
        p.runs = 1;
    }
    return p;
}

inline void do_row(const Plan& p, const char* src, char* dst, bool past_cache) {
    const Half& half = *p.half;
    for (int64_t r = 0; r < p.runs; ++r) {
        char* to = dst + r * p.dst_step;
        bool past = past_cache && reinterpret_cast<uintptr_t>(to) % kVec == 0;
        float scale = half.scale ? half.scale[r * half.scale_stride] : 1.0f;
        (past ? p.run.past_cache : p.run.plain)(src + r * p.src_step, to, p.n, scale);
    }
}

inline int64_t slot_at(const Slots& s, int64_t t) {
    t *= s.stride;
    return s.wide ? reinterpret_cast<const int64_t*>(s.data)[t] : reinterpret_cast<const int32_t*>(s.data)[t];
}

constexpr int kAhead = 4;

// Ask for one line per page of a row that comes up in `kAhead` tokens: rows are scattered, and this took a third off
// a store of 64 or 512 rows of 2 KiB (distances of 2, 4 and 8 were alike).
template <Way W>
inline void touch(const Plan& p, int64_t slot) {
    const char* row = row_at(W == Way::store ? p.half->dst : p.half->src, slot);
    for (int64_t o = 0; o < p.row_bytes; o += 4096) __builtin_prefetch(row + o);
}

// Ask for a whole row.
inline void fetch(const char* row, int64_t bytes) {
    for (int64_t o = 0; o < bytes; o += 64) __builtin_prefetch(row + o);
}

// What one thread does: tokens [begin, end) whose slot belongs to `part` of `parts`, of halves [first, last).
struct Share {
    int64_t begin;
    int64_t end;
    uint32_t part;
    uint32_t parts;
    int first;
    int last;
};

// The share of thread `i` of `threads`. A slot's K has one owner and so has its V, and owners go in token order: a
// slot that comes twice in a store holds the last of its rows, whole. An even number of threads is split into those
// for K and those for V, which then read it from end to end.
template <Way W>
Share share(int64_t tokens, int i, int threads) {
    if (W == Way::gather) return {tokens * i / threads, tokens * (i + 1) / threads, 0, 1, 0, 2};
    if (threads % 2) return {0, tokens, uint32_t(i), uint32_t(threads), 0, 2};
    return {0, tokens, uint32_t(i / 2), uint32_t(threads / 2), i % 2, i % 2 + 1};
}

template <Way W>
void do_share(const RowJob& job, const Share& s) {
    constexpr int kBatch = 256;
    struct {
        int64_t token, slot;
    } picks[kBatch];
    const Plan plans[2] = {plan<W>(job.half[0], job.loc.size), plan<W>(job.half[1], job.loc.size)};
    int64_t over = 0;
    for (int64_t t = s.begin; t < s.end;) {
        int n = 0;
        for (; t < s.end && n < kBatch; ++t) {
            int64_t slot = slot_at(job.loc, t);
            uint32_t hash = uint32_t(slot) * 0x9E3779B1u;
            bool mine = W == Way::gather || uint32_t((uint64_t(hash) * s.parts) >> 32) == s.part;
            over += mine & (s.first == 0) & (slot >= job.end);
            picks[n] = {t, slot};
            n += mine & (slot >= job.first) & (slot < job.end);
        }
        for (int i = 0; i < n; ++i) {
            for (int h = s.first; h < s.last; ++h) {
                const Plan& p = plans[h];
                if (i + kAhead < n) touch<W>(p, picks[i + kAhead].slot);
                if (p.fetch_bytes && i + 2 < n) fetch(row_at(p.half->src, picks[i + 2].token), p.fetch_bytes);
                int64_t from = W == Way::store ? picks[i].token : picks[i].slot;
                int64_t to = W == Way::store ? picks[i].slot : picks[i].token;
                do_row(p, row_at(p.half->src, from), row_at(p.half->dst, to), W == Way::store);
            }
        }
    }
    if (W == Way::store) end_stream();
    if (over) __atomic_fetch_add(job.fault, over, __ATOMIC_RELAXED);
}

template <Way W>
void do_job(const RowJob& job) {
    if (job.threads <= 1) return do_share<W>(job, share<W>(job.loc.size, 0, 1));
#ifdef _OPENMP
#pragma omp parallel num_threads(job.threads)
    do_share<W>(job, share<W>(job.loc.size, omp_get_thread_num(), omp_get_num_threads()));
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
