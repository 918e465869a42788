#include "tensor.h"

#include <dlfcn.h>

#include <string>

namespace nb = nanobind;

namespace portakv {
namespace {

// ---- torch's stable C interface, torch/csrc/inductor/aoti_torch/c/shim.h: the part used here ------------------------

// Its handles point to an at::Tensor, which is one pointer to the implementation that `_cdata` gives the address of.
// Nonzero is an error.
struct Shim {
    int32_t (*get_device_type)(void* handle, int32_t* out);
    int32_t (*get_layout)(void* handle, int32_t* out);
    int32_t (*get_dtype)(void* handle, int32_t* out);
    int32_t (*get_dim)(void* handle, int64_t* out);
    int32_t (*get_sizes)(void* handle, int64_t** out);
    int32_t (*get_strides)(void* handle, int64_t** out);
    int32_t (*get_data_ptr)(void* handle, void** out);
    int32_t (*get_storage_offset)(void* handle, int64_t* out);
    int32_t (*get_storage_size)(void* handle, int64_t* out);
    bool (*is_neg)(void* handle);  // no part of that interface: at::native::is_neg
    int32_t device_type_cpu, layout_strided;
    int32_t dtypes[int(DType::other)];
};

// -------------------------------------------------------------------------------------------------------------------

constexpr struct {
    const char* name;
    int64_t bytes;
} kDTypes[] = {{"float32", 4},         {"float16", 2},     {"bfloat16", 2},
               {"float8_e4m3fn", 1},   {"float8_e4m3fnuz", 1}, {"float8_e5m2", 1},
               {"float8_e5m2fnuz", 1}, {"int32", 4},       {"int64", 8}};
constexpr int kNumDTypes = int(DType::other);

// What torch is here. Written once, on import; the references are kept for the life of the process.
struct {
    PyTypeObject* tensor;
    PyTypeObject* parameter;
    PyObject* plain_dispatch;  // what `__torch_dispatch__` is on a class that does not override it
    PyObject* dtypes[kNumDTypes];
    Shim shim;
    size_t handle_at;  // where in a Python tensor its at::Tensor lies; 0 if it or the shim was not found
    Reader reader;
    PyObject *is_cpu, *layout, *strided, *dtype, *shape, *stride, *storage_offset, *data_ptr, *is_neg, *storage, *nbytes;
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

nb::object get(nb::handle object, PyObject* attribute) {
    nb::object value = nb::steal(PyObject_GetAttr(object.ptr(), attribute));
    if (!value.is_valid()) nb::raise_python_error();
    return value;
}

// What a view may be of: `storage` bytes, `offset` elements before it. Raises where it goes further, or is of none: an
// address that counts from 0 is that of a functional tensor, of one of zeros that nobody wrote, of a freed storage.
View check_memory(View view, int64_t offset, int64_t storage) {
    int64_t item = view.dtype == DType::other ? 1 : dtype_bytes(view.dtype), last = 0;
    for (int i = 0; i < view.rank; ++i) {
        if (view.shape[i] == 0) return view;
        last += (view.shape[i] - 1) * view.stride[i];
    }
    if (reinterpret_cast<uintptr_t>(view.data) == uintptr_t(offset * item))
        refuse_type(view.name, "a tensor with memory", "one without");
    if ((offset + last + 1) * item > storage)
        refuse_type(view.name, "a tensor inside its storage", ("one that ends past its " + std::to_string(storage) + " bytes").c_str());
    view.end = view.data + (last + 1) * item;
    return view;
}

[[noreturn]] void refuse_negated(const char* name) {
    refuse_type(name, "a plain tensor", "a view that negates or conjugates what it reads");
}

View read_attributes(nb::handle object, const char* name) try {
    if (get(object, torch_.is_cpu).ptr() != Py_True)
        refuse_type(name, "a CPU tensor", text(object.attr("device")).c_str());
    if (get(object, torch_.layout).ptr() != torch_.strided)
        refuse_type(name, "a dense CPU tensor", text(object.attr("layout")).c_str());
    if (get(object, torch_.is_neg)().ptr() == Py_True) refuse_negated(name);
    nb::object shape = get(object, torch_.shape), stride = get(object, torch_.stride)();
    int64_t rank = PyTuple_Size(shape.ptr());
    check_rank(rank, name);
    void* data = PyLong_AsVoidPtr(get(object, torch_.data_ptr)().ptr());
    View view{name, static_cast<char*>(data), nullptr, read_dtype(get(object, torch_.dtype)), int(rank), {}, {}};
    for (int64_t i = 0; i < rank; ++i) {
        view.shape[i] = PyLong_AsLongLong(PyTuple_GetItem(shape.ptr(), i));
        view.stride[i] = PyLong_AsLongLong(PyTuple_GetItem(stride.ptr(), i));
    }
    int64_t offset = PyLong_AsLongLong(get(object, torch_.storage_offset)().ptr());
    int64_t storage = PyLong_AsLongLong(get(get(object, torch_.storage)(), torch_.nbytes)().ptr());
    if (PyErr_Occurred()) nb::raise_python_error();
    return check_memory(view, offset, storage);
} catch (nb::python_error&) {  // of a nested tensor, which has no shape, and of torch.func's, which have no storage
    refuse_type(name, "a dense CPU tensor", "one without a shape or memory");
}

// Anything but a dense CPU tensor is left to `read_attributes`, which refuses it by name.
View read_shim(nb::handle object, const char* name) {
    void *handle = reinterpret_cast<char*>(object.ptr()) + torch_.handle_at, *data;
    int32_t device, layout, dtype;
    int64_t rank, *shape, *stride, offset, storage;
    const Shim& s = torch_.shim;
    if (s.get_device_type(handle, &device) || device != s.device_type_cpu || s.get_layout(handle, &layout) ||
        layout != s.layout_strided || s.get_strides(handle, &stride) || s.get_sizes(handle, &shape) ||
        s.get_dim(handle, &rank) || s.get_dtype(handle, &dtype) || s.get_data_ptr(handle, &data) ||
        s.get_storage_offset(handle, &offset) || s.get_storage_size(handle, &storage))
        return read_attributes(object, name);
    check_rank(rank, name);
    if (s.is_neg(handle)) refuse_negated(name);
    View view{name, static_cast<char*>(data), nullptr, DType::other, int(rank), {}, {}};
    for (int i = 0; i < kNumDTypes; ++i)
        if (s.dtypes[i] == dtype) view.dtype = DType(i);
    for (int64_t i = 0; i < rank; ++i) {
        view.shape[i] = shape[i];
        view.stride[i] = stride[i];
    }
    return check_memory(view, offset, storage);
}

bool find_shim(Shim& shim) {
    void* library = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    bool found = library != nullptr;
    auto find = [&](auto& function, const char* name) {
        void* symbol = found ? dlsym(library, name) : nullptr;
        found = symbol != nullptr;
        __builtin_memcpy(&function, &symbol, sizeof symbol);
    };
    auto look = [&](auto& function, const std::string& name) { find(function, ("aoti_torch_" + name).c_str()); };
    look(shim.get_device_type, "get_device_type");
    look(shim.get_layout, "get_layout");
    look(shim.get_dtype, "get_dtype");
    look(shim.get_dim, "get_dim");
    look(shim.get_sizes, "get_sizes");
    look(shim.get_strides, "get_strides");
    look(shim.get_data_ptr, "get_data_ptr");
    look(shim.get_storage_offset, "get_storage_offset");
    look(shim.get_storage_size, "get_storage_size");
    find(shim.is_neg, "_ZN2at6native6is_negERKNS_6TensorE");
    int32_t (*constant)();
    look(constant, "device_type_cpu");
    if (found) shim.device_type_cpu = constant();
    look(constant, "layout_strided");
    if (found) shim.layout_strided = constant();
    for (int i = 0; i < kNumDTypes; ++i) {
        look(constant, std::string("dtype_") + kDTypes[i].name);
        if (found) shim.dtypes[i] = constant();
    }
    return found;
}

// Asking for `_cdata` takes as long as reading all the rest. Past the two words of every object, torch keeps the
// at::Tensor, in older versions behind a flag.
size_t find_handle(nb::handle torch) {
    size_t at = 0;
    for (int i = 0; i < 3; ++i) {
        nb::object tensor = torch.attr("empty")(i + 1);
        uintptr_t cdata = nb::cast<uintptr_t>(tensor.attr("_cdata"));
        const auto* words = reinterpret_cast<const uintptr_t*>(tensor.ptr());
        size_t word = sizeof(PyObject) / sizeof(uintptr_t), last = word + 1;
        while (word <= last && words[word] != cdata) ++word;
        if (word > last || (i && word * sizeof(uintptr_t) != at)) return 0;
        at = word * sizeof(uintptr_t);
    }
    return at;
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
                               {&torch_.shape, "shape"}, {&torch_.stride, "stride"}, {&torch_.is_neg, "is_neg"},
                               {&torch_.storage_offset, "storage_offset"}, {&torch_.data_ptr, "data_ptr"},
                               {&torch_.storage, "untyped_storage"}, {&torch_.nbytes, "nbytes"}})
        *slot = PyUnicode_InternFromString(name);
    if (find_shim(torch_.shim)) torch_.handle_at = find_handle(torch);
    torch_.reader = torch_.handle_at ? Reader::shim : Reader::attributes;
}

View read_tensor(nb::handle object, const char* name) {
    check_plain(object, name);
    return torch_.reader == Reader::shim ? read_shim(object, name) : read_attributes(object, name);
}

DType read_dtype(nb::handle dtype) {
    for (int i = 0; i < kNumDTypes; ++i)
        if (torch_.dtypes[i] == dtype.ptr()) return DType(i);
    return DType::other;
}

const char* dtype_name(DType dtype) { return dtype == DType::other ? "another dtype" : kDTypes[int(dtype)].name; }

int64_t dtype_bytes(DType dtype) { return kDTypes[int(dtype)].bytes; }

bool use_reader(Reader reader) {
    if (reader == Reader::shim && !torch_.handle_at) return false;
    torch_.reader = reader;
    return true;
}

void check_apart(const View& k, const View& v, const View& k_cache, const View& v_cache) {
    for (const View* x : {&k, &v})
        for (const View* cache : {&k_cache, &v_cache})
            if (x->data < cache->end && cache->data < x->end)
                refuse_value(x->name, "memory apart from the cache", "a part of it");
}

void check_outputs(const View& k, const View& v) {
    auto dense = [](const View& x) {
        int64_t count = 1;
        for (int i = 0; i < x.rank; ++i) count *= x.shape[i];
        return x.end - x.data == count * dtype_bytes(x.dtype);
    };
    if (k.data < v.end && v.data < k.end && dense(k) && dense(v))
        refuse_value(v.name, (std::string("memory apart from ") + k.name).c_str(), "a part of it");
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
