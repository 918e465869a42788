// The kernels that move rows, compiled once per instruction set (PORTAKV_ISA names the unit).
//
// Nothing here may have external linkage but the table at the end, and no inline function of the C++ library may be
// called: see kernels.h.

#include "flashmla.h"
#include "packed.h"
#include "reads.h"
#include "rows.h"

namespace portakv {
namespace {

// How one row of a half is done: `runs` runs of `n` elements.
struct Plan {
    const Half* half;
    Run run;
    int64_t runs;
    int64_t n;
    int64_t src_step;
    int64_t dst_step;
    int64_t row_bytes;  // on the side that slots point into
    int64_t ahead;
};

template <Way W>
Plan plan(const Half& half) {
    const Rows &src = half.src, &dst = half.dst;
    int64_t src_run = half.dim * item_bytes(src.dtype), dst_run = half.dim * item_bytes(dst.dtype);
    bool src_dense = half.heads == 1 || src.head_stride == src_run;
    bool dst_dense = half.heads == 1 || dst.head_stride == dst_run;
    bool one_scale = true;
    for (int64_t h = 1; half.scale && h < half.heads; ++h) one_scale &= half.scale[h * half.scale_stride] == *half.scale;
    Plan p{&half, kCopy, half.heads, src_run, src.head_stride, dst.head_stride, 0, 0};
    p.row_bytes = half.heads * (W == Way::store ? dst_run : src_run);
    if (W == Way::store) p.ahead = ahead_of(src, half.heads * src_run);
    if (src.dtype != dst.dtype) {
        p.run = converter(src.dtype, dst.dtype);
        p.n = half.dim;
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
        (past ? p.run.past_cache : p.run.plain)(src + r * p.src_step, to, p.n, scale, p.ahead);
    }
}

// K and V of tokens, each for itself; with `Source` Rotated, one of them from rotated rows.
template <Way W, class Source>
struct Halves : Source {
    static constexpr int kHalves = 2;
    static constexpr bool kRotated = std::is_same<Source, Rotated>::value;
    const RowJob& job;
    const Plan plans[2];
    const bool joined;  // V's rows lie in K's, as MLA's do

    Halves(const RowJob& j, int thread)
        : Source(j, thread), job(j), plans{plan<W>(half_of(0)), plan<W>(half_of(1))}, joined(are_joined(rows(0), rows(1))) {}

    static bool alike(const RowJob& j) {
        int64_t k = j.half[0].dim, v = j.half[1].dim;
        return !kRotated && k <= 2 * v && v <= 2 * k;
    }
    const Half& half_of(int h) const {
        if constexpr (kRotated) return h == job.rope.half ? Source::half : job.half[h];
        return job.half[h];
    }
    const Rows& rows(int h) const { return W == Way::store ? job.half[h].dst : job.half[h].src; }
    static bool are_joined(const Rows& k, const Rows& v) { return k.data < v.data && v.data < k.data + k.row_stride; }
    void touch_slot(int64_t slot, int h) const {
        if (h == 0 || !joined) touch(row_at(rows(h), slot), plans[h].row_bytes);
    }
    void row(int64_t token, int64_t slot, int h) const {
        int64_t from = W == Way::store ? token : slot, to = W == Way::store ? slot : token;
        const char* src = nullptr;
        if constexpr (kRotated) src = h == job.rope.half ? Source::row(token) : nullptr;
        if (!src) src = row_at(job.half[h].src, from);
        do_row(plans[h], src, row_at(job.half[h].dst, to), W == Way::store);
    }
};

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

const Kernels PORTAKV_TABLE(PORTAKV_ISA) = {
    PORTAKV_NAME(PORTAKV_ISA),
    do_job<Way::store, Halves<Way::store, Plain>>,
    do_job<Way::gather, Halves<Way::gather, Plain>>,
    move,
    read,
    do_job<Way::store, Flash<Way::store, Plain>>,
    do_job<Way::gather, Flash<Way::gather, Plain>>,
    do_packed<Way::store>,
    do_packed<Way::gather>,
    move_packed,
    do_job<Way::store, Halves<Way::store, Rotated>>,
    do_job<Way::store, Flash<Way::store, Rotated>>,
};

}  // namespace portakv
