#include "arguments.h"

#include <utility>

#ifdef _OPENMP
#include <omp.h>
#include <pthread.h>
#endif

namespace nb = nanobind;

namespace portakv {
namespace {

PyObject *page_size_, *dtype_, *layout_, *mla_;

constexpr int64_t kParallelBytes = 64 << 10;  // one thread below
constexpr int64_t kThreadBytes = 32 << 10;    // at least this much for each thread

#ifdef _OPENMP
// GCC's OpenMP keeps a team for each thread that has used one, and after a fork waits for ever for threads that were
// not copied. Whether there is a team it does not tell, and torch's ops start them too. So the thread that forked goes
// on alone in the child, in torch's ops as well; threads that the child starts may have teams of their own.
thread_local bool forked = false;

void stay_alone() {
    forked = true;
    omp_set_num_threads(1);
}
#endif

std::string shape_text(const View& v) {
    std::string s = "[";
    for (int i = 0; i < v.rank; ++i) s += (i ? ", " : "") + std::to_string(v.shape[i]);
    return s + "]";
}

}  // namespace

const Kernels* kernels = &kernels_generic;

void init_arguments() {
    page_size_ = PyUnicode_InternFromString("page_size");
    dtype_ = PyUnicode_InternFromString("dtype");
#ifdef _OPENMP
    pthread_atfork(nullptr, nullptr, stay_alone);
#endif
    layout_ = PyUnicode_InternFromString("layout");
    mla_ = nb::object(nb::module_::import_("portakv.formats").attr("Layout").attr("MLA")).release().ptr();
}

void refuse_shape(const View& v, const std::string& expected) {
    refuse_value(v.name, ("shape " + expected).c_str(), shape_text(v).c_str());
}

Slots as_slots(const View& v) {
    if (v.dtype != DType::i32 && v.dtype != DType::i64) refuse_type(v.name, "int32 or int64", dtype_name(v.dtype));
    if (v.rank != 1) refuse_shape(v, "[tokens]");
    return {v.data, v.shape[0], v.stride[0], v.dtype == DType::i64};
}

Slots read_slots(nb::handle object, const char* name) { return as_slots(read_tensor(object, name)); }

Slots read_wide(nb::handle object, const char* name) {
    Slots s = read_slots(object, name);
    if (!s.wide) refuse_type(name, "int64", "int32");
    return s;
}

int64_t* read_faults(nb::handle object) {
    Slots s = read_wide(object, "faults");
    if (s.size < kNumFaults || s.stride != 1)
        refuse_value("faults", (std::to_string(kNumFaults) + " or more dense counters").c_str(), std::to_string(s.size).c_str());
    uintptr_t address = reinterpret_cast<uintptr_t>(s.data);
    if (address % sizeof(int64_t)) refuse_value("faults", "counters aligned as atomics must be", "an address between");
    return reinterpret_cast<int64_t*>(s.data);
}

RowView as_rows(const View& v, int first_axis, bool may_page) {
    int rank = v.rank - first_axis;
    if (rank != 3 && !(may_page && rank == 4))
        refuse_shape(v, first_axis ? "[layers, rows, heads, dim] or [layers, pages, page, heads, dim]" : may_page ? "[rows, heads, dim] or [pages, page, heads, dim]" : "[tokens, heads, dim]");
    if (v.dtype >= DType::i32) refuse_type(v.name, "a float32, float16, bfloat16 or fp8 tensor", dtype_name(v.dtype));
    int last = v.rank - 1;
    if (v.shape[last] > 1 && v.stride[last] != 1)
        refuse_value(v.name, "a dense last axis", ("stride " + std::to_string(v.stride[last])).c_str());
    int64_t item = dtype_bytes(v.dtype);
    RowView r{{v.data, v.stride[last - 2] * item, v.stride[last - 1] * item, 0, 0, v.dtype},
              v.shape[last - 2], v.shape[last - 1], v.shape[last]};
    if (rank == 4) {
        int64_t page = r.count, page_stride = v.stride[first_axis] * item;
        r.count = v.shape[first_axis] * page;
        if (page == 1) {
            r.rows.row_stride = page_stride;
        } else if (page_stride != page * r.rows.row_stride) {
            r.rows.page = page;
            r.rows.page_stride = page_stride;
        }
    }
    return r;
}

int64_t read_page_size(nb::handle fmt) {
    nb::object value = nb::steal(PyObject_GetAttr(fmt.ptr(), page_size_));
    if (!value.is_valid()) nb::raise_python_error();
    int64_t page = PyLong_AsLongLong(value.ptr());
    if (page == -1 && PyErr_Occurred()) nb::raise_python_error();
    return page < 0 ? 0 : page;
}

void check_dtype(nb::handle fmt, const View& cache) {
    nb::object value = nb::steal(PyObject_GetAttr(fmt.ptr(), dtype_));
    if (!value.is_valid()) nb::raise_python_error();
    DType dtype = read_dtype(value);
    if (dtype != cache.dtype) refuse_type(cache.name, dtype_name(dtype), dtype_name(cache.dtype));
}

bool is_fp8(DType t) { return t >= DType::e4m3fn && t <= DType::e5m2fnuz; }

Half bind(const View& x_view, const RowView& cache, int64_t tokens, bool scatter, nb::handle scale,
          const char* scale_name, bool may_page) {
    RowView x = as_rows(x_view, 0, may_page);
    if (x.count != tokens || x.heads != cache.heads || x.dim != cache.dim)
        refuse_shape(x_view, "[" + std::to_string(tokens) + ", " + std::to_string(cache.heads) + ", " +
                                 std::to_string(cache.dim) + "]");
    Half half{scatter ? x.rows : cache.rows, scatter ? cache.rows : x.rows, x.heads, x.dim, nullptr, 0};
    if (x.rows.dtype == cache.rows.dtype) return half;
    if (is_fp8(x.rows.dtype))
        refuse_type(x_view.name, ("a float dtype or " + std::string(dtype_name(cache.rows.dtype))).c_str(),
                    dtype_name(x.rows.dtype));
    if (is_fp8(cache.rows.dtype)) {
        View s = read_tensor(scale, scale_name);
        if (s.dtype != DType::f32) refuse_type(scale_name, "float32", dtype_name(s.dtype));
        if (s.rank != 1 || s.shape[0] != x.heads) refuse_shape(s, "[" + std::to_string(x.heads) + "]");
        half.scale = reinterpret_cast<const Scale*>(s.data);
        half.scale_stride = s.stride[0];
    }
    return half;
}

MovePairs read_pairs(nb::handle tgt, nb::handle src, int64_t first, int64_t num_rows, nb::handle faults) {
    Slots to = read_slots(tgt, "tgt"), from = read_slots(src, "src");
    if (to.size != from.size)
        refuse_value("tgt", (std::to_string(from.size) + " slots").c_str(), std::to_string(to.size).c_str());
    int64_t *fault = read_faults(faults) + kMoveKv, over = 0, count = 0;
    std::vector<int64_t> slots(2 * size_t(to.size));
    for (int64_t i = 0; i < to.size; ++i) {
        int64_t s = slot_at(from, i), t = slot_at(to, i);
        bool readable = s >= 0 && s < num_rows;
        over += s >= num_rows || (readable && t >= num_rows);
        slots[size_t(count)] = t;
        slots[size_t(to.size + count)] = s;
        count += readable && t >= first && t < num_rows;
    }
    if (over) __atomic_fetch_add(fault, over, __ATOMIC_RELAXED);
    return {std::move(slots), count};
}

bool is_mla(nb::handle fmt) {
    nb::object layout = nb::steal(PyObject_GetAttr(fmt.ptr(), layout_));
    if (!layout.is_valid()) nb::raise_python_error();
    return layout.is(mla_);
}

std::unique_ptr<char[]> bind_rope(RowJob& job, const RopeArguments& rope, const View& x, int half) {
    View table = read_tensor(rope.cos_sin, "cos_sin");
    Slots positions = read_slots(rope.positions, "positions");
    const Half& rows = job.half[half];
    int64_t heads = rows.heads, dim = rows.dim, item = dtype_bytes(x.dtype);
    if (x.dtype > DType::bf16) refuse_type(x.name, "float32, float16 or bfloat16", dtype_name(x.dtype));
    if (table.dtype != DType::f32 && table.dtype != x.dtype)
        refuse_type("cos_sin", (std::string("float32 or ") + dtype_name(x.dtype)).c_str(), dtype_name(table.dtype));
    if (table.rank != 2 || table.shape[1] < 2 || table.shape[1] % 2 || table.shape[1] > dim)
        refuse_shape(table, "[positions, dims], an even number of dims, " + std::to_string(dim) + " at most");
    if (table.stride[1] != 1)
        refuse_value("cos_sin", "a dense last axis", ("stride " + std::to_string(table.stride[1])).c_str());
    if (positions.size != job.loc.size)
        refuse_value("positions", (std::to_string(job.loc.size) + " positions").c_str(), std::to_string(positions.size).c_str());
    int64_t bytes = (table.shape[1] * 4 + heads * dim * item + 63) / 64 * 64;
    int threads = job.threads > 1 ? job.threads : 1;
    std::unique_ptr<char[]> scratch(new char[size_t(bytes * threads)]);
    job.rope = {table.data, table.dtype, table.stride[0] * dtype_bytes(table.dtype), table.shape[0], positions,
                table.shape[1], rope.pairs, half, scratch.get(), bytes};
    return scratch;
}

int threads_for(int64_t bytes) {
#ifdef _OPENMP
    if (bytes < kParallelBytes || forked || omp_in_parallel()) return 1;
    // OpenMP counts threads per thread, and torch passes its own count on only when it is asked for in that thread.
    thread_local bool counted = false;
    if (!counted) nb::module_::import_("torch").attr("get_num_threads")();
    counted = true;
    int64_t most = omp_get_max_threads(), useful = bytes / kThreadBytes;
    return int(most < useful ? most : useful);
#else
    (void)bytes;
    return 1;
#endif
}

}  // namespace portakv
