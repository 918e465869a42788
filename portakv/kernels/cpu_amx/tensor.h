// Reading a torch.Tensor without torch's headers, so that one build serves every torch.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>

#include "kernels.h"

namespace portakv {

// A CPU tensor of at most five axes, borrowed from a Python object. Strides count elements.
struct View {
    const char* name;
    char* data;
    DType dtype;
    int rank;
    int64_t shape[5];
    int64_t stride[5];
};

// Look up torch once, when the module is imported.
void init_tensors();

// Read `object`, the argument called `name`. TypeError where it is not a plain dense CPU tensor, ValueError where it
// has more than five axes.
View read_tensor(nanobind::handle object, const char* name);

// Which DType a torch.dtype is.
DType read_dtype(nanobind::handle dtype);

const char* dtype_name(DType dtype);
int64_t dtype_bytes(DType dtype);

// Ways to read a tensor, best first: by DLPack (torch 2.10 and newer), by torch's stable C interface, by Python
// attributes. A store of one token takes 1.2, 1.4 and 5.0 us.
enum class Reader { exchange, shim, attributes };

// For tests: read tensors so from now on. Returns whether this torch can.
bool use_reader(Reader reader);

// The name of an object's type; not `tp_name`, which the limited API keeps to itself.
std::string class_name(nanobind::handle object);

// Raise TypeError or ValueError "{name}: expected {expected}, got {got}".
[[noreturn]] void refuse_type(const char* name, const char* expected, const char* got);
[[noreturn]] void refuse_value(const char* name, const char* expected, const char* got);

}  // namespace portakv
