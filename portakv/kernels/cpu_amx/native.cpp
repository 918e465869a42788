// The Python functions of the CPU kernels: arguments are checked here, before anything is written.
//
// Signatures and meaning are those of portakv/kernels/reference/rows.py.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "arguments.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace portakv {
namespace {

// ---- rows ---------------------------------------------------------------------------------------------------------

int64_t half_bytes(const Half& h) { return h.heads * h.dim * (dtype_bytes(h.src.dtype) + dtype_bytes(h.dst.dtype)) / 2; }

void rows_op(bool scatter, nb::handle k, nb::handle v, nb::handle k_cache, nb::handle v_cache, nb::handle loc,
             nb::handle k_scale, nb::handle v_scale, nb::handle faults, nb::handle fmt, const char* const names[4],
             const RopeArguments* rope = nullptr) {
    RowJob job{};
    job.loc = read_slots(loc, "loc");
    View kc_view = read_tensor(k_cache, "k_cache"), vc_view = read_tensor(v_cache, "v_cache");
    RowView kc = as_rows(kc_view, 0, true), vc = as_rows(vc_view, 0, true);
    check_dtype(fmt, kc_view);
    if (vc.rows.dtype != kc.rows.dtype) refuse_type("v_cache", dtype_name(kc.rows.dtype), dtype_name(vc.rows.dtype));
    if (vc.count != kc.count)
        refuse_value("v_cache", (std::to_string(kc.count) + " rows").c_str(), std::to_string(vc.count).c_str());
    job.first = scatter ? read_page_size(fmt) : 0;
    job.end = kc.count;
    View k_view = read_tensor(k, names[0]), v_view = read_tensor(v, names[1]);
    check_apart(k_view, v_view, kc_view, vc_view);
    if (!scatter) check_outputs(k_view, v_view);
    // A gather's rows may be those of a batch, [B, S, H, D], which lie as pages do.
    job.half[0] = bind(k_view, kc, job.loc.size, scatter, k_scale, names[2], !scatter);
    job.half[1] = bind(v_view, vc, job.loc.size, scatter, v_scale, names[3], !scatter);
    if (v_view.dtype != k_view.dtype) refuse_type(names[1], dtype_name(k_view.dtype), dtype_name(v_view.dtype));
    job.fault = read_faults(faults) + (scatter ? kStoreKv : kGatherKv);
    int64_t bytes = job.loc.size * (half_bytes(job.half[0]) + half_bytes(job.half[1]));
    job.threads = threads_for(bytes);
    std::unique_ptr<char[]> scratch;
    if (rope) {
        int half = is_mla(fmt);
        scratch = bind_rope(job, *rope, half ? v_view : k_view, half);
    }
    if (job.loc.size == 0) return;
    launch(rope ? kernels->store_rope : scatter ? kernels->store : kernels->gather, job, bytes);
}

void store_kv(nb::handle k, nb::handle v, nb::handle k_cache, nb::handle v_cache, nb::handle loc, nb::handle k_inv,
              nb::handle v_inv, nb::handle faults, nb::handle fmt) {
    static const char* const names[] = {"k", "v", "k_inv", "v_inv"};
    rows_op(true, k, v, k_cache, v_cache, loc, k_inv, v_inv, faults, fmt, names);
}

void store_kv_rope(nb::handle k, nb::handle v, nb::handle k_cache, nb::handle v_cache, nb::handle loc, nb::handle k_inv,
                   nb::handle v_inv, nb::handle cos_sin, nb::handle positions, bool interleaved, nb::handle faults,
                   nb::handle fmt) {
    static const char* const names[] = {"k", "v", "k_inv", "v_inv"};
    RopeArguments rope{cos_sin, positions, interleaved};
    rows_op(true, k, v, k_cache, v_cache, loc, k_inv, v_inv, faults, fmt, names, &rope);
}

void gather_kv(nb::handle k_cache, nb::handle v_cache, nb::handle loc, nb::handle k_out, nb::handle v_out,
               nb::handle k_scale, nb::handle v_scale, nb::handle faults, nb::handle fmt) {
    static const char* const names[] = {"k_out", "v_out", "k_scale", "v_scale"};
    rows_op(false, k_out, v_out, k_cache, v_cache, loc, k_scale, v_scale, faults, fmt, names);
}

void move_kv(nb::handle k_caches, nb::handle v_caches, nb::handle tgt, nb::handle src, nb::handle faults,
             nb::handle fmt) {
    View views[2] = {read_tensor(k_caches, "k_caches"), read_tensor(v_caches, "v_caches")};
    MoveJob jobs[2];
    int64_t num_rows = -1, widest = 1;
    for (int i = 0; i < 2; ++i) {
        RowView r = as_rows(views[i], 1, true);
        if (i == 0) {
            check_dtype(fmt, views[0]);
            num_rows = r.count;
        } else if (views[1].dtype != views[0].dtype) {
            refuse_type("v_caches", dtype_name(views[0].dtype), dtype_name(views[1].dtype));
        } else if (r.count != num_rows || views[1].shape[0] != views[0].shape[0]) {
            refuse_shape(views[1], "[" + std::to_string(views[0].shape[0]) + ", " + std::to_string(num_rows) + ", heads, dim]");
        }
        int64_t item = dtype_bytes(views[i].dtype);
        jobs[i] = {r.rows, views[i].stride[0] * item, views[i].shape[0], r.heads, r.dim * item, nullptr, nullptr, 0, nullptr, 0, 1};
        widest = std::max(widest, r.heads * r.dim * item);
    }
    MovePairs pairs = read_pairs(tgt, src, read_page_size(fmt), num_rows, faults);
    int64_t count = pairs.count;
    if (count == 0) return;
    int64_t layers = views[0].shape[0];
    int64_t bytes = count * layers * (jobs[0].heads * jobs[0].head_bytes + jobs[1].heads * jobs[1].head_bytes);
    int threads = threads_for(bytes);
    int64_t staging = std::min(count * widest, std::max<int64_t>(256 << 10, count * 64));
    std::unique_ptr<char[]> buffer(new char[size_t(staging * threads)]);
    auto run = [&] {
        for (MoveJob& job : jobs) {
            job.tgt = pairs.tgt();
            job.src = pairs.src();
            job.count = count;
            job.staging = buffer.get();
            job.staging_bytes = staging;
            job.threads = threads;
            kernels->move(job);
        }
    };
    if (bytes < kGilBytes) return run();
    nb::gil_scoped_release release;
    run();
}

// ---- slots --------------------------------------------------------------------------------------------------------

void put_slot(const Slots& s, int64_t t, int64_t value) {
    t *= s.stride;
    if (s.wide)
        reinterpret_cast<Int64*>(s.data)[t] = value;
    else
        reinterpret_cast<Int32*>(s.data)[t] = int32_t(value);
}

struct Out {
    Slots slots;
    bool given;
};

Out read_out(nb::handle object, const char* name, int64_t tokens) {
    if (object.is_none()) return {{}, false};
    Slots s = read_slots(object, name);
    if (s.size < tokens)
        refuse_value(name, (std::to_string(tokens) + " or more slots").c_str(), std::to_string(s.size).c_str());
    return {s, true};
}

// Write one slot; -1 and a fault where an int32 output cannot hold it.
int64_t put_checked(const Slots& s, int64_t t, int64_t value) {
    bool unfit = !s.wide && value != int32_t(value);
    put_slot(s, t, unfit ? -1 : value);
    return unfit;
}

void put_tail(const Slots& s, int64_t begin) {
    for (int64_t t = begin; t < s.size; ++t) put_slot(s, t, 0);
}

void translate_loc(nb::handle mapping, nb::handle loc, nb::handle swa_out, nb::handle loc_out, nb::handle swa_twin,
                   nb::handle loc_twin, nb::handle faults) {
    Slots map = read_wide(mapping, "mapping"), in = read_slots(loc, "loc");
    if (map.size < 1) refuse_value("mapping", "1 or more entries", "0");
    Out swa[] = {read_out(swa_out, "swa_out", in.size), read_out(swa_twin, "swa_twin", in.size)};
    if (!swa[0].given) refuse_type("swa_out", "a tensor", "None");
    Out full[] = {read_out(loc_out, "loc_out", in.size), read_out(loc_twin, "loc_twin", in.size)};
    int64_t* fault = read_faults(faults);
    int64_t num_rows = map.size - 1, over = 0, unfit = 0;
    for (int64_t t = 0; t < in.size; ++t) {
        int64_t slot = slot_at(in, t);
        bool inside = slot >= 0 && slot < num_rows;
        over += slot >= num_rows;
        int64_t peer = inside ? reinterpret_cast<const Int64*>(map.data)[slot * map.stride] : -1;
        for (const Out& out : swa)
            if (out.given) unfit += put_checked(out.slots, t, peer);
        for (const Out& out : full)
            if (out.given) unfit += put_checked(out.slots, t, slot);
    }
    for (const Out* outs : {swa, full})
        for (int i = 0; i < 2; ++i)
            if (outs[i].given) put_tail(outs[i].slots, in.size);
    if (over) __atomic_fetch_add(fault + kTranslateLoc, over, __ATOMIC_RELAXED);
    if (unfit) __atomic_fetch_add(fault + kCastLoc, unfit, __ATOMIC_RELAXED);
}

void cast_loc(nb::handle loc, nb::handle out, nb::handle faults) {
    Slots in = read_slots(loc, "loc");
    Out to = read_out(out, "out", in.size);
    if (!to.given) refuse_type("out", "a tensor", "None");
    int64_t* fault = read_faults(faults);
    int64_t unfit = 0;
    for (int64_t t = 0; t < in.size; ++t) unfit += put_checked(to.slots, t, slot_at(in, t));
    put_tail(to.slots, in.size);
    if (unfit) __atomic_fetch_add(fault + kCastLoc, unfit, __ATOMIC_RELAXED);
}

void patch_map(nb::handle mapping, nb::handle slots, nb::handle values) {
    Slots map = read_wide(mapping, "mapping"), at = read_wide(slots, "slots"), to = read_wide(values, "values");
    if (to.size != at.size)
        refuse_value("values", (std::to_string(at.size) + " entries").c_str(), std::to_string(to.size).c_str());
    for (int64_t i = 0; i < at.size; ++i) {
        int64_t slot = slot_at(at, i);
        if (slot < 0 || slot >= map.size)
            refuse_value("slots", ("0 <= slot < " + std::to_string(map.size)).c_str(), std::to_string(slot).c_str());
    }
    for (int64_t i = 0; i < at.size; ++i) put_slot(map, slot_at(at, i), slot_at(to, i));
}

// ---- instruction sets ---------------------------------------------------------------------------------------------

std::vector<const Kernels*> runnable() {
    std::vector<const Kernels*> out;
#ifdef PORTAKV_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        out.push_back(&kernels_avx512);
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) out.push_back(&kernels_avx2);
#endif
    out.push_back(&kernels_generic);
    return out;
}

nb::tuple isas() {
    nb::list names;
    for (const Kernels* k : runnable()) names.append(k->isa);
    return nb::tuple(names);
}

void set_isa(const std::string& name) {
    for (const Kernels* k : runnable())
        if (name == k->isa) return void(kernels = k);
    refuse_value("name", "one of isas()", name.c_str());
}

}  // namespace
}  // namespace portakv

NB_MODULE(_native, m) {
    using namespace portakv;
    init_tensors();
    kernels = runnable().front();
    init_arguments();

    m.doc() = "The ops of portakv.kernels.reference.rows on CPU tensors.";
    // None is let through to the functions, whose refusals name the argument.
    auto arg = [](const char* name) { return nb::arg(name).none(); };
    m.def("translate_loc", &translate_loc, arg("mapping"), arg("loc"), arg("swa_out"), arg("loc_out"), arg("swa_twin"),
          arg("loc_twin"), arg("faults"));
    m.def("cast_loc", &cast_loc, arg("loc"), arg("out"), arg("faults"));
    m.def("patch_map", &patch_map, arg("mapping"), arg("slots"), arg("values"));
    m.def("store_kv", &store_kv, arg("k"), arg("v"), arg("k_cache"), arg("v_cache"), arg("loc"), arg("k_inv"),
          arg("v_inv"), arg("faults"), arg("fmt"));
    m.def("store_kv_rope", &store_kv_rope, arg("k"), arg("v"), arg("k_cache"), arg("v_cache"), arg("loc"), arg("k_inv"),
          arg("v_inv"), arg("cos_sin"), arg("positions"), nb::arg("interleaved"), arg("faults"), arg("fmt"));
    m.def("gather_kv", &gather_kv, arg("k_cache"), arg("v_cache"), arg("loc"), arg("k_out"), arg("v_out"),
          arg("k_scale"), arg("v_scale"), arg("faults"), arg("fmt"));
    m.def("move_kv", &move_kv, arg("k_caches"), arg("v_caches"), arg("tgt"), arg("src"), arg("faults"), arg("fmt"));
    define_flashmla(m);
    define_read(m);
    define_packed(m);
    m.def("isa", [] { return kernels->isa; }, "The instruction set in use.");
    m.def("isas", &isas, "The instruction sets that this build and this machine have, best first.");
    m.def("set_isa", &set_isa, "name"_a, "For tests: use another of isas().");
    m.def("use_reader", [](int reader) { return use_reader(Reader(reader)); }, "reader"_a,
          "For tests: read tensors by torch's C interface (0) or attributes (1); whether this torch can.");
}
