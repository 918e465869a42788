// What the Python functions share: reading and refusing their arguments, threads, and the kernels in use.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels.h"
#include "tensor.h"

namespace portakv {

// Order of portakv.formats.FAULT_KINDS.
enum Fault { kTranslateLoc, kCastLoc, kStoreKv, kGatherKv, kMoveKv, kBuildRead, kNumFaults };

// Those of the instruction set in use.
extern const Kernels* kernels;

// Look up attribute names once, when the module is imported.
void init_arguments();

// Ops in files of their own.
void define_flashmla(nanobind::module_& m);

[[noreturn]] void refuse_shape(const View& v, const std::string& expected);

Slots as_slots(const View& v);
Slots read_slots(nanobind::handle object, const char* name);
Slots read_wide(nanobind::handle object, const char* name);  // int64 only
int64_t* read_faults(nanobind::handle object);

inline int64_t slot_at(const Slots& s, int64_t t) {
    t *= s.stride;
    return s.wide ? reinterpret_cast<const Int64*>(s.data)[t] : reinterpret_cast<const Int32*>(s.data)[t];
}

// `heads` and `dim` of a row tensor are its last two axes; whatever stands before them counts rows.
struct RowView {
    Rows rows;
    int64_t count;
    int64_t heads;
    int64_t dim;
};

// The axes of `v` from `first_axis` on as rows, evenly spaced or, with `may_page`, in pages.
RowView as_rows(const View& v, int first_axis, bool may_page);

int64_t read_page_size(nanobind::handle fmt);
void check_dtype(nanobind::handle fmt, const View& cache);
bool is_fp8(DType t);

struct RopeArguments {
    nanobind::handle cos_sin;
    nanobind::handle positions;
    bool pairs;
};

// Have `job`, which is complete but for its rope, rotate the rows `x` of half `half`. The result is its scratch memory.
std::unique_ptr<char[]> bind_rope(RowJob& job, const RopeArguments& rope, const View& x, int half);

// Whether the rows of `fmt` are a latent and, as V, a rope part.
bool is_mla(nanobind::handle fmt);

// One side of a store (`scatter`) or gather: `x [tokens, H, D]` against the rows of `cache`.
Half bind(const View& x_view, const RowView& cache, int64_t tokens, bool scatter, nanobind::handle scale,
          const char* scale_name, bool may_page);

// What a move has to copy: `tgt[i]` from `src[i]`, `count` times; slots to skip are left out and counted.
struct MovePairs {
    std::vector<int64_t> slots;
    int64_t count;
    const int64_t* tgt() const { return slots.data(); }
    const int64_t* src() const { return slots.data() + slots.size() / 2; }
};

MovePairs read_pairs(nanobind::handle tgt, nanobind::handle src, int64_t first, int64_t num_rows,
                     nanobind::handle faults);

constexpr int64_t kGilBytes = 32 << 10;  // the GIL is kept below

int threads_for(int64_t bytes);

template <class Job>
void launch(void (*kernel)(const Job&), const Job& job, int64_t bytes) {
    if (bytes < kGilBytes) return kernel(job);
    nanobind::gil_scoped_release release;
    kernel(job);
}

// The ops that have a file of their own.
void define_read(nanobind::module_& m);
void define_packed(nanobind::module_& m);

}  // namespace portakv
