// Python arguments of the verbs, checked: the same errors as flashd/kernels/check.py.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <initializer_list>
#include <string>

#include "args/rows.hpp"

namespace flashd {

namespace nb = nanobind;

constexpr int64_t kAny = -1;
constexpr int64_t kBatchAxis = -2;  // 1..16

// One axis: its length, or kAny or kBatchAxis with the letter that messages show.
struct Axis {
    Axis(int64_t length) : length(length), label(nullptr) {}
    Axis(const char* label) : length(kAny), label(label) {}
    static Axis batch() {
        Axis axis("1..16");
        axis.length = kBatchAxis;
        return axis;
    }

    int64_t length;
    const char* label;
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
    static Array optional(const char* verb, const char* name, nb::handle value, Types types, const Shape& shape);
    ~Array();
    Array(const Array&) = delete;
    Array& operator=(const Array&) = delete;
    Array(Array&& other) noexcept;

    template <class T>
    T* data() const {
        return static_cast<T*>(buffer_.buf);
    }
    int64_t size(int axis) const { return buffer_.shape[axis]; }
    int64_t bytes() const { return buffer_.len; }
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

void import_numpy();  // once, before any Array

std::string text(nb::handle value);  // str(value)
[[noreturn]] void raise_value(const std::string& message);

void one_of(const char* verb, const char* name, const std::string& value, std::initializer_list<const char*> known);
Type weight_type(const char* verb, const std::string& name);
Activation activation_named(const char* verb, const std::string& name);
int64_t item_bytes(Type type);

// `uint8[n, stride]` rows of `[up | gate | down]`; fills what RowArgs says of them.
Array neuron_rows(const char* verb, nb::handle rows, const std::string& dtype, int64_t d, bool gated, RowArgs& args);

}  // namespace flashd
