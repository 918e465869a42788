// The Python functions for packed pages, `[pages, H, page, D]` caches in which only whole pages of a head have a
// meaning; arguments are checked here, before anything is written.

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "arguments.h"

namespace nb = nanobind;

namespace portakv {
namespace {

enum class Layout { amx, vec };

PyObject *layout_, *amx_;

Layout read_layout(nb::handle fmt) {
    nb::object layout = nb::steal(PyObject_GetAttr(fmt.ptr(), layout_));
    if (!layout.is_valid()) nb::raise_python_error();
    return layout.is(amx_) ? Layout::amx : Layout::vec;
}

constexpr int64_t kPage = 32;

// Source of both: vLLM's CPU attention, csrc/cpu/cpu_attn_{amx,vec}.hpp. AMX multiplies pairs: K has them along the
// head dim and V along the tokens.
Packing packing_of(Layout layout, bool is_v, int64_t page, int64_t dim, int64_t item) {
    if (layout == Layout::amx) return is_v ? Packing{2, 2, 16} : Packing{4, 16, dim / 2};
    return {item, is_v ? 1 : page, dim};
}

// Slots that are served together, 64 at most. In `amx` their tokens share lines of K; in `vec` they fill half a line,
// one, two or four next to each other, by the size of an element.
int64_t tile_of(Layout layout, int64_t page) {
    if (layout == Layout::amx) return 16;
    return page % 64 ? kPage : 64;
}

struct PackedView {
    RowView view;
    Packing packing;
};

PackedView as_packed(const View& v, int first_axis, Layout layout, bool is_v, nb::handle fmt) {
    int last = v.rank - 1;
    if (v.rank - first_axis != 4) refuse_shape(v, first_axis ? "[layers, pages, heads, page, dim]" : "[pages, heads, page, dim]");
    int64_t page = v.shape[last - 1], dim = v.shape[last];
    if (v.dtype >= DType::i32 || (layout == Layout::amx && v.dtype != DType::bf16))
        refuse_type(v.name, layout == Layout::amx ? "a bfloat16 tensor" : "a float32, float16, bfloat16 or fp8 tensor", dtype_name(v.dtype));
    if (page != read_page_size(fmt) || page < 1 || page % kPage)
        refuse_value(v.name, "pages of the format's size, a multiple of 32", std::to_string(page).c_str());
    int64_t multiple = layout == Layout::amx ? 32 : 16;
    if (dim < 1 || dim % multiple)
        refuse_value(v.name, ("a head dim that is a multiple of " + std::to_string(multiple)).c_str(), std::to_string(dim).c_str());
    if (v.stride[last] != 1 || v.stride[last - 1] != dim)
        refuse_value(v.name, "dense pages of each head", ("stride " + std::to_string(v.stride[last - 1])).c_str());
    int64_t item = dtype_bytes(v.dtype);
    Rows rows{v.data, 0, v.stride[last - 2] * item, page, v.stride[last - 3] * item, v.dtype};
    return {{rows, v.shape[last - 3] * page, v.shape[last - 2], dim}, packing_of(layout, is_v, page, dim, item)};
}

void check_pair(const View& k_view, const View& v_view, const PackedView& k, const PackedView& v, nb::handle fmt) {
    check_dtype(fmt, k_view);
    if (v_view.dtype != k_view.dtype) refuse_type(v_view.name, dtype_name(k_view.dtype), dtype_name(v_view.dtype));
    if (v.view.count != k.view.count || v.view.heads != k.view.heads)
        refuse_shape(v_view, "[..., " + std::to_string(k.view.count / k.view.rows.page) + ", " +
                                 std::to_string(k.view.heads) + ", page, dim]");
}

// The slots to serve, those of a tile together.
struct Cut {
    std::vector<Pick> picks;
    std::vector<int64_t> starts;
    int64_t over = 0;
    int64_t partial = 0;  // tokens that are too few for a line of K
};

Cut cut(const Slots& loc, int64_t first, int64_t end, int64_t tile, int64_t line, bool may_sort) {
    struct Stretch {
        int64_t tile, begin, end;
    };
    Cut out;
    std::vector<Pick> picks;
    std::vector<Stretch> stretches;
    picks.reserve(size_t(loc.size));
    const int shift = __builtin_ctzll(uint64_t(tile));
    bool sorted = true;
    for (int64_t t = 0; t < loc.size; ++t) {
        int64_t slot = slot_at(loc, t), n = int64_t(picks.size());
        out.over += slot >= end;
        if (slot < first || slot >= end) continue;
        if (stretches.empty() || stretches.back().tile != slot >> shift) {
            sorted &= stretches.empty() || stretches.back().tile < slot >> shift;
            stretches.push_back({slot >> shift, n, n});
        }
        picks.push_back({slot, t});
        ++stretches.back().end;
    }
    // Scattered tokens that share lines are served together: a line is then fetched and written back once.
    if (!sorted && may_sort) {
        std::sort(stretches.begin(), stretches.end(), [](const Stretch& a, const Stretch& b) {
            return a.tile != b.tile ? a.tile < b.tile : a.begin < b.begin;
        });
        out.picks.reserve(picks.size());
        for (const Stretch& s : stretches) out.picks.insert(out.picks.end(), &picks[s.begin], &picks[s.begin] + (s.end - s.begin));
    } else {
        out.picks = std::move(picks);
    }
    int64_t at = 0;
    for (size_t i = 0; i < stretches.size(); ++i) {
        if (i == 0 || stretches[i].tile != stretches[i - 1].tile) out.starts.push_back(at);
        at += stretches[i].end - stretches[i].begin;
    }
    out.starts.push_back(at);
    for (size_t g = 0; g + 1 < out.starts.size(); ++g) out.partial += (out.starts[g + 1] - out.starts[g]) % line;
    return out;
}

// A token on its own touches a line for each unit of K.
constexpr int64_t kPartialCost = 16;

// A source of more bytes is asked for ahead. In smaller ones, which a cache may hold, that costs more than it saves.
constexpr int64_t kFar = 32 << 20;

void packed_op(bool scatter, nb::handle k, nb::handle v, nb::handle k_cache, nb::handle v_cache,
               nb::handle loc, nb::handle k_scale, nb::handle v_scale, nb::handle faults, nb::handle fmt,
               const char* const names[4]) {
    Layout layout = read_layout(fmt);
    Slots slots = read_slots(loc, "loc");
    View cache_views[2] = {read_tensor(k_cache, "k_cache"), read_tensor(v_cache, "v_cache")};
    PackedView caches[2] = {as_packed(cache_views[0], 0, layout, false, fmt), as_packed(cache_views[1], 0, layout, true, fmt)};
    check_pair(cache_views[0], cache_views[1], caches[0], caches[1], fmt);
    View k_view = read_tensor(k, names[0]), v_view = read_tensor(v, names[1]);
    check_apart(k_view, v_view, cache_views[0], cache_views[1]);
    if (!scatter) check_outputs(k_view, v_view);
    PackedJob job{};
    job.half[0] = bind(k_view, caches[0].view, slots.size, scatter, k_scale, names[2], false);
    job.half[1] = bind(v_view, caches[1].view, slots.size, scatter, v_scale, names[3], false);
    if (v_view.dtype != k_view.dtype) refuse_type(names[1], dtype_name(k_view.dtype), dtype_name(v_view.dtype));
    int64_t* fault = read_faults(faults) + (scatter ? kStoreKv : kGatherKv);
    int64_t page = caches[0].view.rows.page, item = dtype_bytes(cache_views[0].dtype);
    job.tile = tile_of(layout, page);
    int64_t line = std::min(job.tile, 64 / caches[0].packing.unit);
    Cut cuts = cut(slots, scatter ? page : 0, caches[0].view.count, job.tile, line, scatter);
    if (cuts.over) __atomic_fetch_add(fault, cuts.over, __ATOMIC_RELAXED);
    job.picks = cuts.picks.data();
    job.starts = cuts.starts.data();
    job.groups = int64_t(cuts.starts.size()) - 1;
    if (job.groups == 0) return;
    for (int i = 0; i < 2; ++i) job.packing[i] = caches[i].packing;
    int64_t row = (job.half[0].dim + job.half[1].dim) * job.half[0].heads * item;
    int64_t bytes = row * (slots.size + kPartialCost * cuts.partial);
    job.far = scatter && row / item * dtype_bytes(k_view.dtype) * slots.size > kFar;
    job.threads = int(std::min<int64_t>(threads_for(bytes), job.groups * job.half[0].heads));
    launch(scatter ? kernels->store_packed : kernels->gather_packed, job, bytes);
}

void store_kv(nb::handle k, nb::handle v, nb::handle k_cache, nb::handle v_cache, nb::handle loc, nb::handle k_inv,
              nb::handle v_inv, nb::handle faults, nb::handle fmt) {
    static const char* const names[] = {"k", "v", "k_inv", "v_inv"};
    packed_op(true, k, v, k_cache, v_cache, loc, k_inv, v_inv, faults, fmt, names);
}

void gather_kv(nb::handle k_cache, nb::handle v_cache, nb::handle loc, nb::handle k_out, nb::handle v_out,
               nb::handle k_scale, nb::handle v_scale, nb::handle faults, nb::handle fmt) {
    static const char* const names[] = {"k_out", "v_out", "k_scale", "v_scale"};
    packed_op(false, k_out, v_out, k_cache, v_cache, loc, k_scale, v_scale, faults, fmt, names);
}

void move_kv(nb::handle k_caches, nb::handle v_caches, nb::handle tgt, nb::handle src, nb::handle faults,
             nb::handle fmt) {
    Layout layout = read_layout(fmt);
    View views[2] = {read_tensor(k_caches, "k_caches"), read_tensor(v_caches, "v_caches")};
    PackedView caches[2] = {as_packed(views[0], 1, layout, false, fmt), as_packed(views[1], 1, layout, true, fmt)};
    check_pair(views[0], views[1], caches[0], caches[1], fmt);
    if (views[1].shape[0] != views[0].shape[0])
        refuse_value("v_caches", (std::to_string(views[0].shape[0]) + " layers").c_str(), std::to_string(views[1].shape[0]).c_str());
    MovePairs pairs = read_pairs(tgt, src, caches[0].view.rows.page, caches[0].view.count, faults);
    if (pairs.count == 0) return;
    MoveJob jobs[2];
    int64_t bytes = 0, widest = 0;
    for (int i = 0; i < 2; ++i) {
        const RowView& r = caches[i].view;
        int64_t item = dtype_bytes(r.rows.dtype), head_bytes = r.dim * item;
        jobs[i] = {r.rows, views[i].stride[0] * item, views[i].shape[0], r.heads, head_bytes, pairs.tgt(), pairs.src(), pairs.count, nullptr, pairs.count * head_bytes, 1};
        bytes += pairs.count * views[i].shape[0] * r.heads * head_bytes;
        widest = std::max(widest, jobs[i].staging_bytes);
    }
    int threads = threads_for(bytes * kPartialCost);
    std::unique_ptr<char[]> staging(new char[size_t(widest * threads)]);
    nb::gil_scoped_release release;
    for (int i = 0; i < 2; ++i) {
        jobs[i].staging = staging.get();
        jobs[i].threads = threads;
        kernels->move_packed(jobs[i], caches[i].packing);
    }
}

}  // namespace

void define_packed(nb::module_& m) {
    layout_ = PyUnicode_InternFromString("layout");
    amx_ = nb::object(nb::module_::import_("portakv.formats").attr("Layout").attr("CPU_AMX")).release().ptr();
    auto arg = [](const char* name) { return nb::arg(name).none(); };
    m.def("store_kv_packed", &store_kv, arg("k"), arg("v"), arg("k_cache"), arg("v_cache"), arg("loc"), arg("k_inv"),
          arg("v_inv"), arg("faults"), arg("fmt"));
    m.def("gather_kv_packed", &gather_kv, arg("k_cache"), arg("v_cache"), arg("loc"), arg("k_out"), arg("v_out"),
          arg("k_scale"), arg("v_scale"), arg("faults"), arg("fmt"));
    m.def("move_kv_packed", &move_kv, arg("k_caches"), arg("v_caches"), arg("tgt"), arg("src"), arg("faults"), arg("fmt"));
}

}  // namespace portakv
