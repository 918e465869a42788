// store_kv_flashmla and gather_kv_flashmla: arguments are checked here, before anything is written.

#include "arguments.h"

namespace nb = nanobind;

namespace portakv {
namespace {

void check_floats(const View& v, const char* name) {
    if (v.dtype > DType::bf16) refuse_type(name, "float32, float16 or bfloat16", dtype_name(v.dtype));
}

void flash_op(bool scatter, nb::handle k, nb::handle v, nb::handle k_cache, nb::handle v_cache, nb::handle loc,
              nb::handle faults, nb::handle fmt, const char* k_name, const char* v_name,
              const RopeArguments* rope = nullptr) {
    RowJob job{};
    job.loc = read_slots(loc, "loc");
    View views[] = {read_tensor(k_cache, "k_cache"), read_tensor(v_cache, "v_cache"), read_tensor(k, k_name),
                    read_tensor(v, v_name)};
    check_apart(views[2], views[3], views[0], views[1]);
    if (!scatter) check_outputs(views[2], views[3]);
    RowView kc = as_rows(views[0], 0, true), vc = as_rows(views[1], 0, true);
    RowView kx = as_rows(views[2], 0, false), vx = as_rows(views[3], 0, false);
    check_dtype(fmt, views[0]);
    check_dtype(fmt, views[1]);
    for (int i : {2, 3}) check_floats(views[i], views[i].name);
    if (views[3].dtype != views[2].dtype) refuse_type(v_name, dtype_name(views[2].dtype), dtype_name(views[3].dtype));
    if (vc.count != kc.count)
        refuse_value("v_cache", (std::to_string(kc.count) + " rows").c_str(), std::to_string(vc.count).c_str());
    for (const RowView* x : {&kx, &vx})
        if (x->count != job.loc.size || x->heads != 1)
            refuse_shape(views[x == &kx ? 2 : 3], "[" + std::to_string(job.loc.size) + ", 1, dim]");
    int64_t dim = kx.dim, rope_dim = vx.dim;
    if (dim % 64 == 0 && kc.dim == dim + 2 * rope_dim && vc.dim == dim / 64 + 1)
        job.block = 64;
    else if (dim % 128 == 0 && kc.dim == dim + dim / 32 && vc.dim == 2 * rope_dim)
        job.block = 128;
    else
        refuse_shape(views[2], "[tokens, 1, dim] with the dim of the caches' packed rows");
    job.first = scatter ? read_page_size(fmt) : 0;
    job.end = kc.count;
    job.half[0] = {scatter ? kx.rows : kc.rows, scatter ? kc.rows : kx.rows, 1, dim, nullptr, 0};
    job.half[1] = {scatter ? vx.rows : vc.rows, scatter ? vc.rows : vx.rows, 1, rope_dim, nullptr, 0};
    job.fault = read_faults(faults) + (scatter ? kStoreKv : kGatherKv);
    int64_t bytes = job.loc.size * (dim + rope_dim) * dtype_bytes(kx.rows.dtype);
    job.threads = threads_for(bytes);
    std::unique_ptr<char[]> scratch;
    if (rope) scratch = bind_rope(job, *rope, views[3], 1);
    if (job.loc.size == 0) return;
    launch(rope ? kernels->store_rope_flashmla : scatter ? kernels->store_flashmla : kernels->gather_flashmla, job, bytes);
}

void store_kv_flashmla(nb::handle k, nb::handle v, nb::handle k_cache, nb::handle v_cache, nb::handle loc, nb::handle,
                       nb::handle, nb::handle faults, nb::handle fmt) {
    flash_op(true, k, v, k_cache, v_cache, loc, faults, fmt, "k", "v");
}

void store_kv_rope_flashmla(nb::handle k, nb::handle v, nb::handle k_cache, nb::handle v_cache, nb::handle loc, nb::handle,
                            nb::handle, nb::handle cos_sin, nb::handle positions, bool interleaved, nb::handle faults,
                            nb::handle fmt) {
    RopeArguments rope{cos_sin, positions, interleaved};
    flash_op(true, k, v, k_cache, v_cache, loc, faults, fmt, "k", "v", &rope);
}

void gather_kv_flashmla(nb::handle k_cache, nb::handle v_cache, nb::handle loc, nb::handle k_out, nb::handle v_out,
                        nb::handle, nb::handle, nb::handle faults, nb::handle fmt) {
    flash_op(false, k_out, v_out, k_cache, v_cache, loc, faults, fmt, "k_out", "v_out");
}

}  // namespace

void define_flashmla(nb::module_& m) {
    auto arg = [](const char* name) { return nb::arg(name).none(); };
    m.def("store_kv_flashmla", &store_kv_flashmla, arg("k"), arg("v"), arg("k_cache"), arg("v_cache"), arg("loc"),
          arg("k_inv"), arg("v_inv"), arg("faults"), arg("fmt"));
    m.def("store_kv_rope_flashmla", &store_kv_rope_flashmla, arg("k"), arg("v"), arg("k_cache"), arg("v_cache"),
          arg("loc"), arg("k_inv"), arg("v_inv"), arg("cos_sin"), arg("positions"), nb::arg("interleaved"),
          arg("faults"), arg("fmt"));
    m.def("gather_kv_flashmla", &gather_kv_flashmla, arg("k_cache"), arg("v_cache"), arg("loc"), arg("k_out"),
          arg("v_out"), arg("k_scale"), arg("v_scale"), arg("faults"), arg("fmt"));
}

}  // namespace portakv
