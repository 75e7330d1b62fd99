// Python arguments of the verbs, checked: the same errors as flashd/kernels/check.py.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <initializer_list>
#include <string>
#include <vector>

#include "args/rows.hpp"

namespace flashd {

namespace nb = nanobind;

constexpr int64_t kAny = -1;
constexpr int64_t kBatchAxis = -2;  // 1..16
constexpr int64_t kTokenAxis = -3;  // 1 or more

// One axis: its length, or kAny, kBatchAxis or kTokenAxis, and what messages show.
struct Axis {
    Axis(int64_t length) : length(length), label(nullptr) {}
    Axis(const char* label) : length(kAny), label(label) {}
    static Axis batch() { return Axis("1..16", kBatchAxis); }
    static Axis tokens() { return Axis("1..", kTokenAxis); }

    int64_t length;
    const char* label;

private:
    Axis(const char* label, int64_t length) : length(length), label(label) {}
};

using Shape = std::initializer_list<Axis>;
using Types = std::initializer_list<Type>;

enum class Access { read, write };

// A NumPy array whose buffer is held until the end of the scope; construct and destroy it with the GIL.
class Array {
public:
    // Any shape: pass null. Raises TypeError or ValueError.
    Array(const char* verb, const char* name, nb::handle value, Types types, const Shape* shape,
          Access access = Access::read);
    // Holds nothing when `value` is None: data() is null.
    static Array optional(const char* verb, const char* name, nb::handle value, Types types, const Shape& shape,
                          Access access = Access::read);
    ~Array();
    Array(const Array&) = delete;
    Array& operator=(const Array&) = delete;
    Array(Array&& other) noexcept;

    template <class T>
    T* data() const {
        return static_cast<T*>(buffer_.buf);
    }
    int64_t size(int axis) const { return buffer_.shape[axis]; }
    int64_t elements() const { return buffer_.len / buffer_.itemsize; }
    Type type() const { return type_; }
    bool same_shape(const Array& other) const;
    nb::handle object() const { return buffer_.obj; }

private:
    Array();
    void check(const char* verb, const char* name, nb::handle value, Types types, const Shape* shape, Access access);

    Py_buffer buffer_{};
    Type type_ = Type::f32;
};

// The GIL is released while this lives. Python ends a thread that comes back while the interpreter exits by
// unwinding it, which no destructor may do and which would abort the process: such a thread sleeps instead,
// as it does from Python 3.14 on.
class NoGil {
public:
    NoGil() : state_(PyEval_SaveThread()) {}
    ~NoGil();
    NoGil(const NoGil&) = delete;
    NoGil& operator=(const NoGil&) = delete;

private:
    PyThreadState* state_;
};

void import_numpy();  // once, before any Array

// `numpy.empty(shape, type)`, and its memory in `data`.
nb::object new_array(Type type, std::initializer_list<int64_t> shape, void** data);

// int64 array of the numbers values[i] (i itself if null) for which flags[i] is 1, not 0.
nb::object flagged(const uint8_t* flags, int64_t count, const int64_t* values);

std::string text(nb::handle value);  // str(value)
[[noreturn]] void raise_value(const std::string& message);

void one_of(const char* verb, const char* name, const std::string& value, std::initializer_list<const char*> known);
Type weight_type(const char* verb, const std::string& name);
Activation activation_named(const char* verb, const std::string& name);
int64_t item_bytes(Type type);
std::string number(double value);  // as Python's repr(float) writes it

// `uint8[n, stride]` rows of `[up | gate | down]`; fills what RowArgs says of them.
Array neuron_rows(const char* verb, nb::handle rows, const std::string& dtype, int64_t d, bool gated, RowArgs& args);

// Checked numbers of rows or columns: a copy, because whoever shares the array might still change it.
using Numbers = std::vector<int64_t>;

// `int64[count]` numbers of those rows, or None for all: fills `index` and `count` of `args`.
Numbers row_index(const char* verb, nb::handle index, RowArgs& args);

// Numbers 0..limit-1, in any order or strictly ascending.
Numbers numbers_below(const char* verb, const char* name, const Array& given, int64_t limit, bool ascending = false);

// `int64[count]` columns below `limit`, strictly ascending.
Numbers column_slots(const char* verb, const Array& slots, int64_t limit);

}  // namespace flashd
