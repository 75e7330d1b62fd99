#include "arguments.hpp"

#include <unistd.h>

#include <utility>

namespace flashd {
namespace {

struct TypeName {
    Type type;
    char format;  // of the buffer protocol
    const char* numpy;
};

constexpr TypeName kTypes[] = {{Type::f32, 'f', "float32"},
                               {Type::f16, 'e', "float16"},
                               {Type::bf16, 'H', "uint16"},
                               {Type::u8, 'B', "uint8"},
                               {Type::u32, 'I', "uint32"},
                               {Type::i32, 'i', "int32"},
                               {Type::i64, 'l', "int64"},
                               {Type::boolean, '?', "bool"}};

nb::handle g_ndarray, g_empty;  // kept for the life of the process

bool is_array(nb::handle value) {
    const int answer = PyObject_IsInstance(value.ptr(), g_ndarray.ptr());
    if (answer < 0) nb::raise_python_error();
    return answer == 1;
}

std::string describe(const Shape& shape) {
    std::string result = "(";
    size_t index = 0;
    for (const Axis& axis : shape) {
        if (index++) result += ", ";
        result += axis.label ? axis.label : std::to_string(axis.length);
    }
    return result + (shape.size() == 1 ? ",)" : ")");
}

bool fits(const Py_buffer& buffer, const Shape& shape) {
    if (static_cast<size_t>(buffer.ndim) != shape.size()) return false;
    int index = 0;
    for (const Axis& axis : shape) {
        const int64_t length = buffer.shape[index++];
        if (axis.length >= 0 && length != axis.length) return false;
        if (axis.length == kBatchAxis && (length < 1 || length > kMaxBatch)) return false;
        if (axis.length == kTokenAxis && length < 1) return false;
    }
    return true;
}

[[noreturn]] void raise_type(const std::string& message) { throw nb::type_error(message.c_str()); }

// Arrays of no bytes may claim any shape: sizes computed from it overflow, and loops over it never end.
constexpr int64_t kMaxEmpty = 1 << 24;

// Product of all axes but the empty ones, or more than kMaxEmpty.
int64_t outer_elements(const Py_buffer& buffer) {
    int64_t product = 1;
    for (int axis = 0; axis < buffer.ndim; ++axis) {
        if (buffer.shape[axis] > kMaxEmpty) return buffer.shape[axis];
        if (buffer.shape[axis] > 0 && product <= kMaxEmpty) product *= buffer.shape[axis];
    }
    return product;
}

Numbers numbers_of(const Array& array, int64_t count) {
    return Numbers(array.data<int64_t>(), array.data<int64_t>() + count);
}

void check_indices(const char* verb, const char* name, const int64_t* values, int64_t count, int64_t limit,
                   bool ascending) {
    bool good = true;
    for (int64_t i = 0; i < count; ++i)
        good &= (values[i] >= 0) & (values[i] < limit) & (!ascending || i == 0 || values[i] > values[i - 1]);
    for (int64_t i = 0; !good && i < count; ++i) {
        const std::string what = std::string(verb) + ": " + name + " is " + std::to_string(values[i]) + " at " +
                                 std::to_string(i) + ", expected ";
        if (values[i] < 0 || values[i] >= limit) raise_value(what + "0.." + std::to_string(limit - 1));
        if (ascending && i > 0 && values[i] <= values[i - 1])
            raise_value(what + "more than " + std::to_string(values[i - 1]));
    }
}

}  // namespace

NoGil::~NoGil() {
    try {
        PyEval_RestoreThread(state_);
    } catch (...) {
        for (;;) pause();
    }
}

void import_numpy() {
    const nb::module_ numpy = nb::module_::import_("numpy");
    g_ndarray = nb::object(numpy.attr("ndarray")).release();
    g_empty = nb::object(numpy.attr("empty")).release();
}

nb::object new_array(Type type, std::initializer_list<int64_t> shape, void** data) {
    nb::list lengths;
    for (const int64_t length : shape) lengths.append(length);
    const char* dtype = "";
    for (const TypeName& entry : kTypes)
        if (entry.type == type) dtype = entry.numpy;
    nb::object fresh = nb::borrow(g_empty)(lengths, dtype);
    *data = Array("numpy", "empty", fresh, {type}, nullptr, Access::write).data<void>();
    return fresh;
}

nb::object flagged(const uint8_t* flags, int64_t count, const int64_t* values) {
    int64_t total = 0;
    for (int64_t i = 0; i < count; ++i) total += flags[i];
    void* data = nullptr;
    nb::object result = new_array(Type::i64, {total}, &data);
    int64_t* to = static_cast<int64_t*>(data);
    // Without a branch on the flags: nobody can foresee them.
    for (int64_t i = 0, found = 0; found < total; ++i) {
        to[found] = values ? values[i] : i;
        found += flags[i];
    }
    return result;
}

std::string text(nb::handle value) { return nb::cast<std::string>(nb::str(value)); }

[[noreturn]] void raise_value(const std::string& message) { throw nb::value_error(message.c_str()); }

Array::Array() = default;

Array::Array(const char* verb, const char* name, nb::handle value, Types types, const Shape* shape, Access access) {
    const std::string what = std::string(verb) + ": " + name;
    if (!is_array(value))
        raise_type(what + " is " + Py_TYPE(value.ptr())->tp_name + ", expected a NumPy array");
    if (PyObject_GetBuffer(value.ptr(), &buffer_, PyBUF_FULL_RO) != 0) {
        PyErr_Clear();  // NumPy exports no buffer of dates and the like
        buffer_ = Py_buffer{};
    }
    try {
        check(verb, name, value, types, shape, access);
    } catch (...) {
        PyBuffer_Release(&buffer_);
        throw;
    }
}

Array Array::optional(const char* verb, const char* name, nb::handle value, Types types, const Shape& shape,
                      Access access) {
    return value.is_none() ? Array() : Array(verb, name, value, types, &shape, access);
}

Array::~Array() { PyBuffer_Release(&buffer_); }

Array::Array(Array&& other) noexcept : buffer_(other.buffer_), type_(other.type_) { other.buffer_ = Py_buffer{}; }

void Array::check(const char* verb, const char* name, nb::handle value, Types types, const Shape* shape,
                  Access access) {
    bool known = false;
    std::string expected;
    const char* format = buffer_.format ? buffer_.format : "";
    if (format[0] == '=' || format[0] == '^' || format[0] == '<') ++format;  // NumPy's mark of unaligned data
    for (const Type type : types)
        for (const TypeName& entry : kTypes) {
            if (entry.type != type) continue;
            // int64 is C's long or its long long.
            const char letter = type == Type::i64 && format[0] == 'q' ? 'l' : format[0];
            if (letter == entry.format && format[1] == '\0') {
                type_ = type;
                known = true;
            }
        }
    const std::string what = std::string(verb) + ": " + name;
    if (!known) {
        for (const Type type : types)
            for (const TypeName& entry : kTypes)
                if (entry.type == type) expected += (expected.empty() ? "" : " or ") + std::string(entry.numpy);
        raise_type(what + " has dtype " + text(value.attr("dtype")) + ", expected " + expected);
    }
    if (shape && !fits(buffer_, *shape))
        raise_value(what + " has shape " + text(value.attr("shape")) + ", expected " + describe(*shape));
    if (buffer_.len == 0 && outer_elements(buffer_) > kMaxEmpty)
        raise_value(what + " has shape " + text(value.attr("shape")) + ", expected at most " +
                    std::to_string(kMaxEmpty) + " rows of nothing");
    if (!PyBuffer_IsContiguous(&buffer_, 'C'))
        raise_value(what + " is not C-contiguous; pass numpy.ascontiguousarray(" + name + ")");
    if (reinterpret_cast<uintptr_t>(buffer_.buf) % static_cast<uintptr_t>(buffer_.itemsize))
        raise_value(what + " is not aligned to " + std::to_string(buffer_.itemsize) + " bytes; pass " + name +
                    ".copy()");
    if (access == Access::write && buffer_.readonly)
        raise_value(what + " is read-only, expected a writeable array");
}

bool Array::same_shape(const Array& other) const {
    if (buffer_.ndim != other.buffer_.ndim) return false;
    for (int axis = 0; axis < buffer_.ndim; ++axis)
        if (buffer_.shape[axis] != other.buffer_.shape[axis]) return false;
    return true;
}

void one_of(const char* verb, const char* name, const std::string& value, std::initializer_list<const char*> known) {
    std::string list;
    for (const char* candidate : known) {
        if (value == candidate) return;
        list += (list.empty() ? "" : " or ") + std::string(candidate);
    }
    raise_value(std::string(verb) + ": " + name + " is '" + value + "', expected " + list);
}

Type weight_type(const char* verb, const std::string& name) {
    one_of(verb, "dtype", name, {"f32", "f16", "bf16"});
    return name == "f32" ? Type::f32 : name == "f16" ? Type::f16 : Type::bf16;
}

Activation activation_named(const char* verb, const std::string& name) {
    one_of(verb, "activation", name, {"relu", "relu2", "silu", "gelu", "gelu_tanh"});
    if (name == "relu") return Activation::relu;
    if (name == "relu2") return Activation::relu2;
    if (name == "silu") return Activation::silu;
    return name == "gelu" ? Activation::gelu : Activation::gelu_tanh;
}

int64_t item_bytes(Type type) {
    switch (type) {
        case Type::i64: return 8;
        case Type::f32:
        case Type::i32:
        case Type::u32: return 4;
        case Type::u8:
        case Type::boolean: return 1;
        default: return 2;
    }
}

std::string number(double value) { return nb::cast<std::string>(nb::repr(nb::float_(value))); }

Array neuron_rows(const char* verb, nb::handle rows, const std::string& dtype, int64_t d, bool gated, RowArgs& args) {
    args.type = weight_type(verb, dtype);
    if (d < 1) raise_value(std::string(verb) + ": d is " + std::to_string(d) + ", expected at least 1");
    const Shape shape{"n", "stride"};
    Array checked(verb, "rows", rows, {Type::u8}, &shape);
    const int64_t item = item_bytes(args.type);
    const int64_t parts = gated ? 3 : 2;
    const int64_t stride = checked.size(1);
    // Divided, because d times the item size may overflow.
    if (d > stride / item / parts || stride % item) {
        const nb::object need = nb::int_(d) * nb::int_(parts * item);
        raise_value(std::string(verb) + ": rows have a stride of " + std::to_string(stride) +
                    " bytes, expected at least " + text(need) + " and a multiple of " + std::to_string(item));
    }
    if (reinterpret_cast<uintptr_t>(checked.data<uint8_t>()) % static_cast<uintptr_t>(item))
        raise_value(std::string(verb) + ": rows is not aligned to " + std::to_string(item) +
                    " bytes; pass rows.copy()");
    args.rows = checked.data<uint8_t>();
    args.n = checked.size(0);
    args.stride_bytes = stride;
    args.d = d;
    args.gated = gated;
    return checked;
}

Numbers row_index(const char* verb, nb::handle index, RowArgs& args) {
    const Array given = Array::optional(verb, "index", index, {Type::i64}, {"m"});
    args.count = args.n;
    if (index.is_none()) return {};
    args.count = given.size(0);
    Numbers rows = numbers_of(given, args.count);
    check_indices(verb, "index", rows.data(), args.count, args.n, false);
    args.index = rows.data();
    return rows;
}

Numbers numbers_below(const char* verb, const char* name, const Array& given, int64_t limit, bool ascending) {
    Numbers values = numbers_of(given, given.size(0));
    check_indices(verb, name, values.data(), given.size(0), limit, ascending);
    return values;
}

Numbers column_slots(const char* verb, const Array& slots, int64_t limit) {
    Numbers columns = numbers_of(slots, slots.size(0));
    check_indices(verb, "slots", columns.data(), slots.size(0), limit, true);
    return columns;
}

}  // namespace flashd
