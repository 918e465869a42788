// Reading a torch.Tensor without torch's headers, so that one build serves every torch.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>

#include "kernels.h"

namespace portakv {

// A CPU tensor of at most five axes, borrowed from a Python object. Strides count elements, `end` is behind its last
// byte, null where it has no elements.
struct View {
    const char* name;
    char* data;
    char* end;
    DType dtype;
    int rank;
    int64_t shape[5];
    int64_t stride[5];
};

// Look up torch once, when the module is imported.
void init_tensors();

// Read `object`, the argument called `name`. TypeError where it is not a plain dense CPU tensor, whose numbers stand in
// its storage as its shape and strides say; ValueError where it has more than five axes.
View read_tensor(nanobind::handle object, const char* name);

// Which DType a torch.dtype is.
DType read_dtype(nanobind::handle dtype);

const char* dtype_name(DType dtype);
int64_t dtype_bytes(DType dtype);

// Ways to read a tensor, best first: by torch's stable C interface, by Python attributes.
enum class Reader { shim, attributes };

// For tests: read tensors so from now on. Returns whether this torch can.
bool use_reader(Reader reader);

// Raise ValueError where the rows of a call lie between the first and the last byte of a cache.
void check_apart(const View& k, const View& v, const View& k_cache, const View& v_cache);

// Raise ValueError where dense outputs share bytes; of others, whose rows may stand between each other's, callers know.
void check_outputs(const View& k, const View& v);

// The name of an object's type; not `tp_name`, which the limited API keeps to itself.
std::string class_name(nanobind::handle object);

// Raise TypeError or ValueError "{name}: expected {expected}, got {got}".
[[noreturn]] void refuse_type(const char* name, const char* expected, const char* got);
[[noreturn]] void refuse_value(const char* name, const char* expected, const char* got);

}  // namespace portakv
