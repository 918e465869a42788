// Where rows lie, which thread does which of them, and in what order. Part of kernels.cpp, in whose namespace it stands.
#pragma once

#include "runs.h"

#include <type_traits>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace portakv {
namespace {

inline char* row_at(const Rows& rows, int64_t slot) {
    if (rows.page == 0) return rows.data + slot * rows.row_stride;
    return rows.data + slot / rows.page * rows.page_stride + slot % rows.page * rows.row_stride;
}

inline int64_t slot_at(const Slots& s, int64_t t) {
    t *= s.stride;
    return s.wide ? reinterpret_cast<const Int64*>(s.data)[t] : reinterpret_cast<const Int32*>(s.data)[t];
}

enum class Way { store, gather };

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
// slot that comes twice in a store holds the last of its rows, whole. Where K and V are alike, an even number of threads
// is split into those for K and those for V; each then reads its source from end to end.
template <Way W>
Share share(int64_t tokens, int halves, bool alike, int i, int threads) {
    if (W == Way::gather) return {tokens * i / threads, tokens * (i + 1) / threads, 0, 1, 0, halves};
    if (!alike || threads % 2) return {0, tokens, uint32_t(i), uint32_t(threads), 0, halves};
    return {0, tokens, uint32_t(i / 2), uint32_t(threads / 2), i % 2, i % 2 + 1};
}

constexpr int kAhead = 4;
constexpr int64_t kAheadBytes = 4096, kNear = 8;

// Ask for one line per page of a row that comes up in `kAhead` tokens, so that the walk to that page is over by then. Only
// where it is not near the row before: rows in order took a tenth longer with it, and scattered ones of a pool of some GB
// up to half as long again without.
inline void touch(const char* row, int64_t bytes) {
    for (int64_t o = 0; o < bytes; o += 4096) ask_for(row + o);
}

// How far ahead a conversion asks for its source, whose rows have `bytes`: 4 KiB of rows, one at least. By itself it
// keeps too few loads under way.
inline int64_t ahead_of(const Rows& src, int64_t bytes) {
    int64_t rows = bytes > 0 ? kAheadBytes / bytes : 0;
    return (rows > 0 ? rows : 1) * src.row_stride;
}

// `Work` says how a half of a row is done, `row(token, slot, half)`, what to ask for ahead of it, and which tokens it
// `takes`; and whether its halves are `alike`, as much work each.
template <Way W, class Work>
void do_share(const RowJob& job, const Share& s, int thread) {
    constexpr int kBatch = 256;
    struct {
        int64_t token, slot;
    } picks[kBatch];
    const Work work(job, thread);
    int64_t over = 0;
    for (int64_t t = s.begin; t < s.end;) {
        int n = 0;
        for (; t < s.end && n < kBatch; ++t) {
            int64_t slot = slot_at(job.loc, t);
            uint32_t hash = uint32_t(slot) * 0x9E3779B1u;
            bool mine = W == Way::gather || uint32_t((uint64_t(hash) * s.parts) >> 32) == s.part;
            bool inside = (slot >= job.first) & (slot < job.end), takes = work.takes(t);
            over += mine & (s.first == 0) & ((slot >= job.end) | (inside & !takes));
            picks[n] = {t, slot};
            n += mine & inside & takes;
        }
        for (int i = 0; i < n; ++i) {
            const int next = i + kAhead;
            const bool far = next < n && uint64_t(picks[next].slot - picks[next - 1].slot + kNear) > 2 * kNear;
            for (int h = s.first; h < s.last; ++h) {
                if (far) work.touch_slot(picks[next].slot, h);
                work.row(picks[i].token, picks[i].slot, h);
            }
        }
    }
    if (W == Way::store) end_stream();
    if (over) __atomic_fetch_add(job.fault, over, __ATOMIC_RELAXED);
}

template <Way W, class Work>
void do_job(const RowJob& job) {
    if (job.threads <= 1) return do_share<W, Work>(job, share<W>(job.loc.size, Work::kHalves, false, 0, 1), 0);
#ifdef _OPENMP
#pragma omp parallel num_threads(job.threads)
    {
        int i = omp_get_thread_num();
        do_share<W, Work>(job, share<W>(job.loc.size, Work::kHalves, Work::alike(job), i, omp_get_num_threads()), i);
    }
#endif
}

}  // namespace
}  // namespace portakv
