#include "tensor.h"

#include <dlfcn.h>

#include <string>

namespace nb = nanobind;

namespace portakv {
namespace {

// ---- DLPack 1.x, https://github.com/dmlc/dlpack/blob/main/include/dlpack/dlpack.h: the part used here -------------

enum : int32_t { kDLCPU = 1, kDLCUDAHost = 3, kDLROCMHost = 11 };
enum : uint8_t { kDLInt = 0, kDLFloat = 2, kDLBfloat = 4, kDLE4M3FN = 10, kDLE4M3FNUZ = 11, kDLE5M2 = 12, kDLE5M2FNUZ = 13 };

struct DLTensor {
    void* data;
    int32_t device_type;
    int32_t device_id;
    int32_t ndim;
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
    int64_t* shape;
    int64_t* strides;
    uint64_t byte_offset;
};

struct DLPackExchangeAPI {
    uint32_t major;
    uint32_t minor;
    DLPackExchangeAPI* prev_api;
    void* managed_tensor_allocator;
    void* managed_tensor_from_py_object_no_sync;
    void* managed_tensor_to_py_object_no_sync;
    int (*dltensor_from_py_object_no_sync)(void* object, DLTensor* out);
    void* current_work_stream;
};

// ---- torch's stable C interface, torch/csrc/inductor/aoti_torch/c/shim.h: the part used here ------------------------

// Its handles point to an at::Tensor, which is one pointer to the implementation that `_cdata` gives the address of.
// Nonzero is an error.
struct Shim {
    int32_t (*get_device_type)(void* handle, int32_t* out);
    int32_t (*get_dtype)(void* handle, int32_t* out);
    int32_t (*get_dim)(void* handle, int64_t* out);
    int32_t (*get_sizes)(void* handle, int64_t** out);
    int32_t (*get_strides)(void* handle, int64_t** out);
    int32_t (*get_data_ptr)(void* handle, void** out);
    int32_t device_type_cpu;
    int32_t dtypes[int(DType::other)];
};

// -------------------------------------------------------------------------------------------------------------------

constexpr struct {
    const char* name;
    int64_t bytes;
    uint8_t code;
} kDTypes[] = {{"float32", 4, kDLFloat},         {"float16", 2, kDLFloat},
               {"bfloat16", 2, kDLBfloat},       {"float8_e4m3fn", 1, kDLE4M3FN},
               {"float8_e4m3fnuz", 1, kDLE4M3FNUZ}, {"float8_e5m2", 1, kDLE5M2},
               {"float8_e5m2fnuz", 1, kDLE5M2FNUZ}, {"int32", 4, kDLInt},
               {"int64", 8, kDLInt}};
constexpr int kNumDTypes = int(DType::other);

// What torch is here. Written once, on import; the references are kept for the life of the process.
struct {
    PyTypeObject* tensor;
    PyTypeObject* parameter;
    PyObject* plain_dispatch;  // what `__torch_dispatch__` is on a class that does not override it
    PyObject* dtypes[kNumDTypes];
    const DLPackExchangeAPI* api;
    Shim shim;
    bool has_shim;
    Reader reader;
    PyObject *is_cpu, *layout, *strided, *dtype, *shape, *stride, *storage_offset, *data_ptr, *cdata;
} torch_;

std::string text(nb::handle object) { return nb::str(object).c_str(); }

// Subclasses that answer for themselves (FakeTensor, DTensor) have no memory of their own to read.
void check_plain(nb::handle object, const char* name) {
    PyTypeObject* type = Py_TYPE(object.ptr());
    if (type == torch_.tensor || type == torch_.parameter) return;
    bool is_tensor = PyType_IsSubtype(type, torch_.tensor);
    if (is_tensor && nb::handle(reinterpret_cast<PyObject*>(type)).attr("__torch_dispatch__").is(torch_.plain_dispatch))
        return;
    refuse_type(name, "a plain torch.Tensor", class_name(object).c_str());
}

void check_rank(int64_t rank, const char* name) {
    if (rank > 5) refuse_value(name, "at most 5 axes", std::to_string(rank).c_str());
}

View read_exchange(nb::handle object, const char* name) {
    DLTensor t;
    if (torch_.api->dltensor_from_py_object_no_sync(object.ptr(), &t) != 0) {
        nb::python_error error;  // takes the pending exception
        refuse_type(name, "a dense CPU tensor", error.what());
    }
    if (t.device_type != kDLCPU && t.device_type != kDLCUDAHost && t.device_type != kDLROCMHost)
        refuse_type(name, "a CPU tensor", text(object.attr("device")).c_str());
    check_rank(t.ndim, name);
    View view{name, static_cast<char*>(t.data) + t.byte_offset, DType::other, t.ndim, {}, {}};
    for (int i = 0; i < kNumDTypes; ++i)
        if (kDTypes[i].code == t.code && kDTypes[i].bytes * 8 == t.bits) view.dtype = DType(i);
    if (t.lanes != 1) view.dtype = DType::other;
    for (int i = 0; i < t.ndim; ++i) {
        view.shape[i] = t.shape[i];
        view.stride[i] = t.strides[i];
    }
    return view;
}

nb::object get(nb::handle object, PyObject* attribute) { return nb::steal(PyObject_GetAttr(object.ptr(), attribute)); }

View read_attributes(nb::handle object, const char* name) {
    if (get(object, torch_.is_cpu).ptr() != Py_True)
        refuse_type(name, "a CPU tensor", text(object.attr("device")).c_str());
    if (get(object, torch_.layout).ptr() != torch_.strided)
        refuse_type(name, "a dense CPU tensor", text(object.attr("layout")).c_str());
    nb::object shape = get(object, torch_.shape), stride = get(object, torch_.stride)();
    int64_t rank = PyTuple_Size(shape.ptr());
    check_rank(rank, name);
    void* data = PyLong_AsVoidPtr(get(object, torch_.data_ptr)().ptr());
    View view{name, static_cast<char*>(data), read_dtype(get(object, torch_.dtype)), int(rank), {}, {}};
    for (int64_t i = 0; i < rank; ++i) {
        view.shape[i] = PyLong_AsLongLong(PyTuple_GetItem(shape.ptr(), i));
        view.stride[i] = PyLong_AsLongLong(PyTuple_GetItem(stride.ptr(), i));
    }
    if (PyErr_Occurred()) nb::raise_python_error();
    return view;
}

// Anything but a dense CPU tensor is left to `read_attributes`, which refuses it by name.
View read_shim(nb::handle object, const char* name) {
    void* implementation = PyLong_AsVoidPtr(get(object, torch_.cdata).ptr());
    void *handle = &implementation, *data;
    int32_t device, dtype;
    int64_t rank, *shape, *stride;
    const Shim& s = torch_.shim;
    if (s.get_device_type(handle, &device) || device != s.device_type_cpu || s.get_strides(handle, &stride) ||
        s.get_sizes(handle, &shape) || s.get_dim(handle, &rank) || s.get_dtype(handle, &dtype) ||
        s.get_data_ptr(handle, &data))
        return read_attributes(object, name);
    check_rank(rank, name);
    View view{name, static_cast<char*>(data), DType::other, int(rank), {}, {}};
    for (int i = 0; i < kNumDTypes; ++i)
        if (s.dtypes[i] == dtype) view.dtype = DType(i);
    for (int64_t i = 0; i < rank; ++i) {
        view.shape[i] = shape[i];
        view.stride[i] = stride[i];
    }
    return view;
}

// Such a tensor, as of a functional one, a wrapper without bytes of its own, has its offset for an address. Few systems
// hand out memory below 4 GiB, so that Python is not asked on the hot path.
bool without_memory(nb::handle object, const View& view) {
    uintptr_t address = reinterpret_cast<uintptr_t>(view.data);
    if (!address || address >= uintptr_t(1) << 32 || view.dtype == DType::other) return !address;
    nb::object offset = get(object, torch_.storage_offset)();
    return PyLong_AsLongLong(offset.ptr()) * dtype_bytes(view.dtype) == int64_t(address);
}

bool find_shim(Shim& shim) {
    void* library = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    bool found = library != nullptr;
    auto look = [&](auto& function, const std::string& name) {
        void* symbol = found ? dlsym(library, ("aoti_torch_" + name).c_str()) : nullptr;
        found = symbol != nullptr;
        __builtin_memcpy(&function, &symbol, sizeof symbol);
    };
    look(shim.get_device_type, "get_device_type");
    look(shim.get_dtype, "get_dtype");
    look(shim.get_dim, "get_dim");
    look(shim.get_sizes, "get_sizes");
    look(shim.get_strides, "get_strides");
    look(shim.get_data_ptr, "get_data_ptr");
    int32_t (*constant)();
    look(constant, "device_type_cpu");
    if (found) shim.device_type_cpu = constant();
    for (int i = 0; i < kNumDTypes; ++i) {
        look(constant, std::string("dtype_") + kDTypes[i].name);
        if (found) shim.dtypes[i] = constant();
    }
    return found;
}

}  // namespace

void init_tensors() {
    nb::module_ torch = nb::module_::import_("torch");
    auto keep = [](nb::object object) { return object.release().ptr(); };
    auto type = [&](nb::handle owner, const char* name) {
        return reinterpret_cast<PyTypeObject*>(keep(owner.attr(name)));
    };
    torch_.tensor = type(torch, "Tensor");
    torch_.parameter = type(torch.attr("nn"), "Parameter");
    torch_.plain_dispatch = keep(torch.attr("Tensor").attr("__torch_dispatch__"));
    torch_.strided = keep(torch.attr("strided"));
    for (int i = 0; i < kNumDTypes; ++i) torch_.dtypes[i] = keep(torch.attr(kDTypes[i].name));
    for (auto& [slot, name] : {std::pair{&torch_.is_cpu, "is_cpu"}, {&torch_.layout, "layout"}, {&torch_.dtype, "dtype"},
                               {&torch_.shape, "shape"}, {&torch_.stride, "stride"}, {&torch_.storage_offset, "storage_offset"}, {&torch_.data_ptr, "data_ptr"}, {&torch_.cdata, "_cdata"}})
        *slot = PyUnicode_InternFromString(name);

    torch_.has_shim = find_shim(torch_.shim);
    torch_.reader = torch_.has_shim ? Reader::shim : Reader::attributes;

    // torch 2.10 and newer, on the type: no attribute means an older one.
    nb::object capsule = nb::getattr(torch.attr("Tensor"), "__dlpack_c_exchange_api__", nb::none());
    if (capsule.is_none()) return;
    auto* api = static_cast<DLPackExchangeAPI*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (!api) nb::raise_python_error();
    while (api && api->major != 1) api = api->prev_api;
    if (!api || !api->dltensor_from_py_object_no_sync) return;
    torch_.api = api;
    torch_.reader = Reader::exchange;
}

View read_tensor(nb::handle object, const char* name) {
    check_plain(object, name);
    View view = torch_.reader == Reader::exchange ? read_exchange(object, name)
                : torch_.reader == Reader::shim   ? read_shim(object, name)
                                                  : read_attributes(object, name);
    bool empty = false;
    for (int i = 0; i < view.rank; ++i) empty |= view.shape[i] == 0;
    if (!empty && without_memory(object, view)) refuse_type(name, "a tensor with memory", "one without");
    return view;
}

DType read_dtype(nb::handle dtype) {
    for (int i = 0; i < kNumDTypes; ++i)
        if (torch_.dtypes[i] == dtype.ptr()) return DType(i);
    return DType::other;
}

const char* dtype_name(DType dtype) { return dtype == DType::other ? "another dtype" : kDTypes[int(dtype)].name; }

int64_t dtype_bytes(DType dtype) { return kDTypes[int(dtype)].bytes; }

bool use_reader(Reader reader) {
    if (reader == Reader::exchange && !torch_.api) return false;
    if (reader == Reader::shim && !torch_.has_shim) return false;
    torch_.reader = reader;
    return true;
}

static std::string refusal(const char* name, const char* expected, const char* got) {
    return std::string(name) + ": expected " + expected + ", got " + got;
}

std::string class_name(nb::handle object) { return nb::str(object.type().attr("__name__")).c_str(); }

void refuse_type(const char* name, const char* expected, const char* got) {
    throw nb::type_error(refusal(name, expected, got).c_str());
}

void refuse_value(const char* name, const char* expected, const char* got) {
    throw nb::value_error(refusal(name, expected, got).c_str());
}

}  // namespace portakv
