// The Python functions `measure_read` and `build_read`. What each line of the output names is settled here; kernels.cpp
// fills it.

#include <algorithm>
#include <string>
#include <vector>

#include "arguments.h"

namespace nb = nanobind;

namespace portakv {
namespace {

enum Structure { kRagged, kPages, kRows, kQueryRows, kNumStructures };

PyObject* structures[kNumStructures];
PyObject *structure_, *window_, *page_size_, *pad_, *prefix_only_;

struct Format {
    Structure structure;
    int64_t window;  // INT64_MAX for all keys
    int64_t page_size;
    int64_t pad;
    bool prefix_only;
};

nb::object get(nb::handle object, PyObject* name) {
    nb::object value = nb::steal(PyObject_GetAttr(object.ptr(), name));
    if (!value.is_valid()) nb::raise_python_error();
    return value;
}

int64_t get_int(nb::handle object, PyObject* name) {
    int64_t value = PyLong_AsLongLong(get(object, name).ptr());
    if (value == -1 && PyErr_Occurred()) nb::raise_python_error();
    return value;
}

Format read_format(nb::handle fmt) {
    nb::object structure = get(fmt, structure_);
    int which = 0;
    while (which < kNumStructures && structures[which] != structure.ptr()) ++which;
    if (which == kNumStructures) refuse_type("fmt", "a Structure in fmt.structure", class_name(structure).c_str());
    int64_t window = get(fmt, window_).is_none() ? INT64_MAX : get_int(fmt, window_);
    if (window < 1) refuse_value("fmt", "a window of 1 or more", std::to_string(window).c_str());
    int64_t page_size = get_int(fmt, page_size_);
    if (page_size < 1) refuse_value("fmt", "a page size of 1 or more", std::to_string(page_size).c_str());
    return {Structure(which), window, page_size, get_int(fmt, pad_), get(fmt, prefix_only_).ptr() == Py_True};
}

// A tensor of `rank` axes, int32 or int64, whose last one is dense.
View read_dense(nb::handle object, const char* name, int rank) {
    View v = read_tensor(object, name);
    if (v.dtype != DType::i32 && v.dtype != DType::i64) refuse_type(name, "int32 or int64", dtype_name(v.dtype));
    if (v.rank != rank) refuse_value(name, (std::to_string(rank) + " axes").c_str(), std::to_string(v.rank).c_str());
    if (v.shape[rank - 1] > 1 && v.stride[rank - 1] != 1)
        refuse_value(name, "a dense last axis", ("stride " + std::to_string(v.stride[rank - 1])).c_str());
    return v;
}

// A vector of `size` elements, at least that many if `or_more`, of the dtype of `like`.
View read_like(nb::handle object, const char* name, const View& like, int64_t size, bool or_more = false) {
    View v = read_dense(object, name, 1);
    if (v.dtype != like.dtype) refuse_type(name, dtype_name(like.dtype), dtype_name(v.dtype));
    if (or_more ? v.shape[0] < size : v.shape[0] != size) refuse_shape(v, "[" + std::to_string(size) + (or_more ? " or more]" : "]"));
    return v;
}

// One length per sequence, of the dtype of `rows`; None where it may be absent.
Slots read_lengths(nb::handle object, const char* name, const Slots& rows) {
    Slots s = read_slots(object, name);
    if (s.wide != rows.wide) refuse_type(name, rows.wide ? "the dtype of rows, int64" : "the dtype of rows, int32", s.wide ? "int64" : "int32");
    if (s.size != rows.size)
        refuse_value(name, (std::to_string(rows.size) + " entries").c_str(), std::to_string(s.size).c_str());
    return s;
}

// Positions of which every `step`-th is named: [begin, stop), from the first of a page on.
struct Span {
    int64_t begin;
    int64_t tokens;
    int64_t entries;
};

Span span_of(int64_t begin, int64_t stop, int64_t step) {
    if (begin < stop) begin = begin / step * step;
    int64_t tokens = std::max<int64_t>(stop - begin, 0);
    return {begin, tokens, (tokens + step - 1) / step};
}

int64_t step_of(const Format& f) { return f.structure == kPages ? f.page_size : 1; }

void put(const View& v, int64_t i, int64_t value) {
    if (v.dtype == DType::i64)
        reinterpret_cast<Int64*>(v.data)[i] = value;
    else
        reinterpret_cast<Int32*>(v.data)[i] = int32_t(value);
}

void build_read(nb::handle mapping, nb::handle table, nb::handle rows, nb::handle seq_lens, nb::handle extra_lens,
                nb::handle query_lens, nb::handle out, nb::handle indptr, nb::handle lens, nb::handle starts,
                nb::handle faults, int64_t num_slots, nb::handle fmt) {
    Format f = read_format(fmt);
    bool ragged = f.structure == kRagged, per_query = f.structure == kQueryRows;
    View slots = read_dense(table, "table", 2);
    Slots requests = read_slots(rows, "rows"), sequences = read_lengths(seq_lens, "seq_lens", requests);
    bool has_extra = !extra_lens.is_none(), has_queries = !query_lens.is_none();
    Slots extras = has_extra ? read_lengths(extra_lens, "extra_lens", requests) : requests;
    Slots queries = has_queries ? read_lengths(query_lens, "query_lens", requests) : requests;
    int64_t batch = requests.size, width = slots.shape[1];

    ReadJob job{};
    View to = read_dense(out, "out", ragged ? 1 : 2), counts{}, firsts{}, ends{};
    counts = read_like(lens, "lens", to, per_query ? 0 : batch, true);
    int64_t n = counts.shape[0];
    firsts = read_like(starts, "starts", to, n);
    if (ragged)
        ends = read_like(indptr, "indptr", to, n + 1);
    else if (!indptr.is_none())
        refuse_type("indptr", "None for a structure that is not ragged", class_name(indptr).c_str());
    else if (to.shape[0] != n)
        refuse_shape(to, "[" + std::to_string(n) + ", columns]");
    if (num_slots < 0) refuse_value("num_slots", "0 or more", std::to_string(num_slots).c_str());
    if (!mapping.is_none()) {
        View map = read_dense(mapping, "mapping", 1);
        if (map.dtype != DType::i64) refuse_type("mapping", "int64", "int32");
        int64_t least = std::max<int64_t>(num_slots, 1);
        if (map.shape[0] < least) refuse_shape(map, "[" + std::to_string(least) + " or more]");
        job.mapping = reinterpret_cast<const Int64*>(map.data);
    }
    int64_t* fault = read_faults(faults);

    int64_t columns = ragged ? 0 : to.shape[1], room = ragged ? to.shape[0] : n * columns;
    int64_t step = step_of(f), window = std::min(f.window, width + 1);
    int64_t line = 0, at = 0, over = 0;
    std::vector<ReadLine> lines(size_t(n + ragged));

    // The next line names positions [begin, stop) of table row `row`, as far as there is room.
    auto name = [&](int64_t row, int64_t begin, int64_t stop) {
        auto [first, tokens, entries] = span_of(begin, stop, step);
        int64_t most = ragged ? room - at : columns;
        if (entries > most) {
            entries = most;
            tokens = most * step;
            ++over;
        }
        lines[size_t(line)] = {row * slots.stride[0] + first, entries, at, ragged ? at : line * to.stride[0]};
        put(counts, line, tokens);
        put(firsts, line, tokens ? first : 0);
        if (ragged) put(ends, line, at);
        at += ragged ? entries : columns;
        ++line;
    };
    auto length = [&](const Slots& s, int64_t b) { return std::clamp<int64_t>(slot_at(s, b), 0, width + 1); };

    for (int64_t b = 0; b < batch; ++b) {
        int64_t row = slot_at(requests, b), end = length(sequences, b) + (has_extra ? length(extras, b) : 0);
        int64_t count = has_queries ? std::min(length(queries, b), width) : 1;
        if (row < 0 || row >= slots.shape[0]) {
            row = end = 0;
            ++over;
        } else if (end > width) {
            end = width;
            ++over;
        }
        int64_t first = end - count, last = f.prefix_only ? first : end;
        if (!per_query) {
            name(row, std::max<int64_t>(first - window + 1, 0), last);
            continue;
        }
        over += count > n - line;
        count = std::min(count, n - line);
        for (int64_t p = first; p < first + count; ++p)
            name(row, std::max<int64_t>(p - window + 1, 0), std::min(p + 1, last));
    }
    while (line < n) name(0, 0, 0);
    if (ragged) {
        put(ends, n, at);
        lines[size_t(n)] = {0, 0, at, at};
    }
    if (over) __atomic_fetch_add(fault + kBuildRead, over, __ATOMIC_RELAXED);
    if (room == 0) return;

    job.num_slots = num_slots;
    job.reserved = f.page_size;
    job.table = slots.data;
    job.table_wide = slots.dtype == DType::i64;
    job.out = to.data;
    job.out_wide = to.dtype == DType::i64;
    job.places = room;
    job.lines = lines.data();
    job.num_lines = int64_t(lines.size());
    job.step = step;
    job.pad = f.pad;
    job.fault = fault + kBuildRead;
    job.cast_fault = fault + kCastLoc;
    int64_t bytes = room * (dtype_bytes(slots.dtype) + dtype_bytes(to.dtype));
    // Pages wait for a line of the table each, and one of the mapping: as long as copying so many bytes takes.
    if (step > 1) bytes = room * (job.mapping ? 64 : 24);
    job.threads = threads_for(bytes);
    launch(kernels->read, job, bytes);
}

// What `out` must hold: (N,), or (rows, columns).
nb::tuple shape_of(const Format& f, const Slots& rows, const Slots& sequences, const Slots* extras, const Slots* queries,
                   int64_t column_multiple) {
    int64_t lines = 0, sum = 0, most = 0, step = step_of(f);
    bool per_query = f.structure == kQueryRows;
    for (int64_t b = 0; b < rows.size; ++b) {
        int64_t end = slot_at(sequences, b) + (extras ? slot_at(*extras, b) : 0);
        int64_t count = queries ? slot_at(*queries, b) : 1, first = end - count, entries;
        if (per_query)  // none has more than the last
            entries = count ? std::min(end, f.window) : 0;
        else
            entries = span_of(std::max<int64_t>(first - f.window + 1, 0), f.prefix_only ? first : end, step).entries;
        lines += per_query ? count : 1;
        sum += entries;
        most = std::max(most, entries);
    }
    if (f.structure == kRagged) return nb::make_tuple(sum);
    if (per_query) most = (most + column_multiple - 1) / column_multiple * column_multiple;
    return nb::make_tuple(lines, most);
}

// `(batch size, [shape of `out` for each of formats])`, or None where anything is not as `build_read` takes it or out of
// bounds.
nb::object measure_read(nb::handle rows, nb::handle seq_lens, nb::handle extra_lens, nb::handle query_lens,
                        int64_t num_rows, int64_t max_len, int64_t max_query_len, int64_t column_multiple,
                        nb::tuple formats) {
    Slots requests, sequences, extras, queries;
    bool has_extra = !extra_lens.is_none(), has_queries = !query_lens.is_none();
    try {
        requests = read_slots(rows, "rows");
        sequences = read_lengths(seq_lens, "seq_lens", requests);
        if (has_extra) extras = read_lengths(extra_lens, "extra_lens", requests);
        if (has_queries) queries = read_lengths(query_lens, "query_lens", requests);
    } catch (const nb::builtin_exception&) {
        return nb::none();
    }
    for (int64_t b = 0; b < requests.size; ++b) {
        int64_t row = slot_at(requests, b), end = slot_at(sequences, b);
        if (row < 0 || row >= num_rows || end < 0 || end > max_len) return nb::none();
        if (has_extra) {
            int64_t extra = slot_at(extras, b);
            if (extra < 0 || extra > max_len - end) return nb::none();
            end += extra;
        }
        int64_t count = has_queries ? slot_at(queries, b) : 0;
        if (count < 0 || count > end || count > max_query_len) return nb::none();
    }
    nb::list shapes;
    for (nb::handle fmt : formats)
        shapes.append(shape_of(read_format(fmt), requests, sequences, has_extra ? &extras : nullptr,
                               has_queries ? &queries : nullptr, column_multiple));
    return nb::make_tuple(requests.size, shapes);
}

}  // namespace

void define_read(nb::module_& m) {
    auto keep = [](nb::object object) { return object.release().ptr(); };
    nb::object members = nb::module_::import_("portakv.formats").attr("Structure");
    for (auto& [which, name] : {std::pair{kRagged, "RAGGED"}, {kPages, "PAGES"}, {kRows, "ROWS"}, {kQueryRows, "QUERY_ROWS"}})
        structures[which] = keep(members.attr(name));
    for (auto& [slot, name] : {std::pair{&structure_, "structure"}, {&window_, "window"}, {&page_size_, "page_size"},
                               {&pad_, "pad"}, {&prefix_only_, "prefix_only"}})
        *slot = PyUnicode_InternFromString(name);
    auto arg = [](const char* name) { return nb::arg(name).none(); };
    m.def("measure_read", &measure_read, arg("rows"), arg("seq_lens"), arg("extra_lens"), arg("query_lens"),
          nb::arg("num_rows"), nb::arg("max_len"), nb::arg("max_query_len"), nb::arg("column_multiple"),
          nb::arg("formats"));
    m.def("build_read", &build_read, arg("mapping"), arg("table"), arg("rows"), arg("seq_lens"), arg("extra_lens"),
          arg("query_lens"), arg("out"), arg("indptr"), arg("lens"), arg("starts"), arg("faults"),
          nb::arg("num_slots"), arg("fmt"));
}

}  // namespace portakv
