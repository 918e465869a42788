// The kernel that names the slots attention reads. Part of kernels.cpp, in whose namespace it stands.
#pragma once

#include "kernels.h"

namespace portakv {
namespace {

// What the elements of one job share, and what they count.
struct Reading {
    const Int64* mapping;
    int64_t num_slots;
    int64_t reserved;  // slots below stand for nothing and have no peer
    int64_t pad;
    int64_t step;
    int shift;  // of a division by `step`, -1 where that is no power of two
    int64_t over;
    int64_t unfit;
};

// Every `step`-th of `n` slots from `from` on, as `to` has them. An invalid slot becomes PAD, which has no peer
// and gives the padding, so that the loop has no branch.
template <int In, int To, bool Mapped, bool Paged>
void name_slots(Reading& r, const typename Index<In>::Type* from, typename Index<To>::Type* to, int64_t n) {
    int64_t over = 0, unfit = 0, num_slots = r.num_slots, reserved = r.reserved, pad = r.pad, step = Paged ? r.step : 1;
    const Int64* mapping = r.mapping;
    for (int64_t i = 0; i < n; ++i) {
        int64_t slot = from[i * step];
        over += slot >= num_slots;
        slot = (slot > 0) & (slot < num_slots) ? slot : 0;
        if (Mapped) {
            int64_t peer = mapping[slot];
            over += (slot >= reserved) & (peer <= 0);
            slot = peer;
        }
        bool named = slot > 0;
        if (Paged) {
            int64_t page = r.shift >= 0 ? slot >> r.shift : slot / step;
            bool inside = r.shift >= 0 ? slot & (step - 1) : page * step != slot;  // no product of 64 bits for masks
            bool askew = (page > 0) & inside;
            over += askew;
            named &= !askew;
            slot = page;
        }
        if (To == 4) {
            bool fits = slot <= INT32_MAX;
            unfit += named & !fits;
            named &= fits;
        }
        to[i] = typename Index<To>::Type(named ? slot : pad);
    }
    r.over += over;
    r.unfit += unfit;
}

using NameFn = void (*)(Reading& r, const char* table, int64_t at, char* out, int64_t to, int64_t n);

template <int In, int To, bool Mapped, bool Paged>
void name_at(Reading& r, const char* table, int64_t at, char* out, int64_t to, int64_t n) {
    const typename Index<In>::Type* from = reinterpret_cast<const typename Index<In>::Type*>(table);
    name_slots<In, To, Mapped, Paged>(r, from + at, reinterpret_cast<typename Index<To>::Type*>(out) + to, n);
}

template <int In, int To>
NameFn pick(bool mapped, bool paged) {
    if (mapped) return paged ? name_at<In, To, true, true> : name_at<In, To, true, false>;
    return paged ? name_at<In, To, false, true> : name_at<In, To, false, false>;
}

template <int To>
void fill_pad(char* out, int64_t to, int64_t n, int64_t pad) {
    typename Index<To>::Type* p = reinterpret_cast<typename Index<To>::Type*>(out) + to;
    for (int64_t i = 0; i < n; ++i) p[i] = typename Index<To>::Type(pad);
}

// The last line that begins at or before place `at`.
inline int64_t line_at(const ReadJob& job, int64_t at) {
    int64_t low = 0, high = job.num_lines - 1;
    while (low < high) {
        int64_t middle = (low + high + 1) / 2;
        if (job.lines[middle].at <= at) low = middle;
        else high = middle - 1;
    }
    return low;
}

// Places are cut into chunks that any thread may take: a place that is padding takes less time than one that is not.
constexpr int64_t kLeastChunk = 512, kMostChunk = 8192, kChunksPerThread = 4;

void read(const ReadJob& job) {
    bool mapped = job.mapping, paged = job.step > 1;
    NameFn name = job.table_wide ? (job.out_wide ? pick<8, 8>(mapped, paged) : pick<8, 4>(mapped, paged))
                                 : (job.out_wide ? pick<4, 8>(mapped, paged) : pick<4, 4>(mapped, paged));
    auto pad = job.out_wide ? fill_pad<8> : fill_pad<4>;
    int shift = job.step & (job.step - 1) ? -1 : __builtin_ctzll(uint64_t(job.step));
    int64_t size = job.places / (job.threads * kChunksPerThread);
    size = size < kLeastChunk ? kLeastChunk : size > kMostChunk ? kMostChunk : size;
    int64_t chunks = (job.places + size - 1) / size, over = 0, unfit = 0;
#ifdef _OPENMP
#pragma omp parallel for schedule(dynamic) reduction(+ : over, unfit) num_threads(job.threads) if (job.threads > 1)
#endif
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        Reading r{job.mapping, job.num_slots, job.reserved, job.pad, job.step, shift, 0, 0};
        int64_t at = chunk * size, end = at + size < job.places ? at + size : job.places;
        for (int64_t i = line_at(job, at); at < end; ++i) {
            const ReadLine& line = job.lines[i];
            int64_t stop = i + 1 < job.num_lines && job.lines[i + 1].at < end ? job.lines[i + 1].at : end;
            int64_t done = at - line.at, n = stop - at;
            int64_t live = line.entries - done < n ? line.entries - done : n;
            live = live > 0 ? live : 0;
            name(r, job.table, line.from + done * job.step, job.out, line.to + done, live);
            pad(job.out, line.to + done + live, n - live, job.pad);
            at = stop;
        }
        over += r.over;
        unfit += r.unfit;
    }
    if (over) __atomic_fetch_add(job.fault, over, __ATOMIC_RELAXED);
    if (unfit) __atomic_fetch_add(job.cast_fault, unfit, __ATOMIC_RELAXED);
}

}  // namespace
}  // namespace portakv
