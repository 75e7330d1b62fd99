// The verbs find_rows, request_rows, least_rows, take_rows and drop_rows: tables of which neuron has which row.
#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "verbs.hpp"

namespace flashd {
namespace {

constexpr uint8_t kHere = 0, kComing = 1, kMissing = 2;
// Every so many keys are looked at first to find the least ones; so many more than expected are taken.
constexpr int64_t kSample = 32, kMargin = 4;
constexpr int32_t kStays = INT32_MAX, kGuessed = INT32_MIN;

// Places i with kinds[i] == kind, in order.
nb::object places(const std::vector<uint8_t>& kinds, uint8_t kind, int64_t count) {
    void* data = nullptr;
    nb::object result = new_array(Type::i64, {count}, &data);
    int64_t* to = static_cast<int64_t*>(data);
    for (int64_t i = 0, found = 0; found < count; ++i) {
        to[found] = i;
        found += kinds[static_cast<size_t>(i)] == kind;
    }
    return result;
}

// Rows of some neurons, and the places of those that are here, coming and missing.
nb::tuple look_up(const Numbers& ids, const int32_t* row_of, const uint8_t* in_flight) {
    const int64_t m = static_cast<int64_t>(ids.size());
    void* data = nullptr;
    nb::object rows = new_array(Type::i64, {m}, &data);
    int64_t* to = static_cast<int64_t*>(data);
    std::vector<uint8_t> kinds(ids.size());
    int64_t counts[3] = {};
    for (int64_t i = 0; i < m; ++i) {
        const int64_t id = ids[static_cast<size_t>(i)];
        to[i] = row_of[id];
        const uint8_t kind = to[i] < 0 ? kMissing : in_flight[id] ? kComing : kHere;
        kinds[static_cast<size_t>(i)] = kind;
        ++counts[kind];
    }
    return nb::make_tuple(rows, places(kinds, kHere, counts[kHere]), places(kinds, kComing, counts[kComing]),
                          places(kinds, kMissing, counts[kMissing]));
}

nb::tuple find_rows(nb::handle ids_, nb::handle row_of_, nb::handle in_flight_) {
    const char* verb = "find_rows";
    const Shape some{"m"}, all{"n"};
    const Array ids(verb, "ids", ids_, {Type::i64}, &some);
    const Array row_of(verb, "row_of", row_of_, {Type::i32}, &all);
    const Shape each{row_of.size(0)};
    const Array in_flight(verb, "in_flight", in_flight_, {Type::boolean}, &each);
    return look_up(numbers_below(verb, "ids", ids, row_of.size(0)), row_of.data<int32_t>(),
                   in_flight.data<uint8_t>());
}

nb::tuple request_rows(nb::handle ids_, int64_t step, nb::handle last_, nb::handle guessed_, nb::handle row_of_,
                       nb::handle in_flight_, nb::handle count_, double credit) {
    const char* verb = "request_rows";
    const Shape some{"m"}, all{"n"};
    const Array ids(verb, "ids", ids_, {Type::i64}, &some);
    const Array last(verb, "last", last_, {Type::i32}, &all, Access::write);
    const int64_t n = last.size(0);
    const Shape each{n};
    const Array guessed(verb, "guessed", guessed_, {Type::boolean}, &each, Access::write);
    const Array row_of(verb, "row_of", row_of_, {Type::i32}, &each);
    const Array in_flight(verb, "in_flight", in_flight_, {Type::boolean}, &each);
    const Array count = Array::optional(verb, "count", count_, {Type::f32}, each, Access::write);
    const Numbers neurons = numbers_below(verb, "ids", ids, n);
    int64_t were_guessed = 0;
    for (const int64_t id : neurons) {
        last.data<int32_t>()[id] = static_cast<int32_t>(step);
        were_guessed += guessed.data<uint8_t>()[id];
        guessed.data<uint8_t>()[id] = 0;
        if (count.data<float>()) count.data<float>()[id] += static_cast<float>(credit);
    }
    const nb::tuple found = look_up(neurons, row_of.data<int32_t>(), in_flight.data<uint8_t>());
    return nb::make_tuple(were_guessed, found[0], found[1], found[2], found[3]);
}

int32_t key_of(int32_t value) { return value; }

// In the order of the numbers; NaN highest.
int32_t key_of(float value) {
    value += 0.0f;  // -0 becomes 0
    int32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    bits ^= (bits >> 31) & kStays;  // of negative numbers, those with the larger bits are less
    return value == value ? bits : kStays;
}

// Without branches: nobody can foresee who has a row. The keys of guesses and of what stays are taken from
// the ends: the two highest values are one, and so are the two least.
template <class T>
void fill_keys(const int32_t* row_of, const uint8_t* in_flight, const int32_t* last, int32_t step, const T* value,
               const uint8_t* guessed, int64_t n, int32_t* keys) {
    for (int64_t i = 0; i < n; ++i) {
        const int32_t worth = std::min(std::max(key_of(value[i]), kGuessed + 1), kStays - 1);
        const int32_t key = guessed[i] ? kGuessed : worth;
        const bool goes = (row_of[i] >= 0) & (last[i] != step) & !in_flight[i];
        keys[i] = goes ? key : kStays;
    }
}

// Keys that are at most `bound`, which is less than kStays, with their numbers, and in their order.
int64_t up_to(const int32_t* keys, int64_t n, int32_t bound, uint64_t* found) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; ++i) {
        found[count] = uint64_t{static_cast<uint32_t>(keys[i]) ^ 0x80000000u} << 32 | static_cast<uint64_t>(i);
        count += keys[i] <= bound;
    }
    return count;
}

// Fewer candidates for the k least than all: a sample tells nearly how small they are.
int64_t candidates(const int32_t* keys, int64_t n, int64_t k, uint64_t* found) {
    std::vector<int32_t> sample;
    sample.reserve(static_cast<size_t>(n / kSample + 1));
    for (int64_t i = 0; i < n; i += kSample) sample.push_back(keys[i]);
    const size_t rank = static_cast<size_t>(2 * (std::min(k, n) / kSample) + kMargin);
    if (rank < sample.size()) {
        std::nth_element(sample.begin(), sample.begin() + static_cast<ptrdiff_t>(rank), sample.end());
        if (sample[rank] < kStays) {
            const int64_t count = up_to(keys, n, sample[rank], found);
            if (count >= k) return count;
        }
    }
    return up_to(keys, n, kStays - 1, found);
}

nb::object least_rows(nb::handle row_of_, nb::handle in_flight_, nb::handle last_, int64_t step, nb::handle value_,
                      nb::handle guessed_, int64_t k) {
    const char* verb = "least_rows";
    const Shape all{"n"};
    const Array row_of(verb, "row_of", row_of_, {Type::i32}, &all);
    const int64_t n = row_of.size(0);
    const Shape each{n};
    const Array in_flight(verb, "in_flight", in_flight_, {Type::boolean}, &each);
    const Array last(verb, "last", last_, {Type::i32}, &each);
    const Array value(verb, "value", value_, {Type::f32, Type::i32}, &each);
    const Array guessed(verb, "guessed", guessed_, {Type::boolean}, &each);
    if (k < 0) raise_value("least_rows: k is " + std::to_string(k) + ", expected at least 0");
    const std::unique_ptr<int32_t[]> keys(new int32_t[static_cast<size_t>(n)]);
    const auto fill = [&](const auto* values) {
        fill_keys(row_of.data<int32_t>(), in_flight.data<uint8_t>(), last.data<int32_t>(),
                  static_cast<int32_t>(step), values, guessed.data<uint8_t>(), n, keys.get());
    };
    value.type() == Type::f32 ? fill(value.data<float>()) : fill(value.data<int32_t>());
    // One more than there are keys: `up_to` writes before it knows.
    const std::unique_ptr<uint64_t[]> found(new uint64_t[static_cast<size_t>(n) + 1]);
    const int64_t count = candidates(keys.get(), n, k, found.get()), least = std::min(k, count);
    if (least < count) std::nth_element(found.get(), found.get() + least, found.get() + count);
    void* data = nullptr;
    nb::object result = new_array(Type::i64, {least}, &data);
    int64_t* to = static_cast<int64_t*>(data);
    for (int64_t i = 0; i < least; ++i) to[i] = static_cast<int64_t>(found[i] & 0xFFFFFFFFu);
    std::sort(to, to + least);
    return result;
}

nb::object take_rows(nb::handle ids_, int64_t first, nb::handle row_of_, nb::handle owner_, nb::handle free_,
                     int64_t n_free) {
    const char* verb = "take_rows";
    const Shape some{"m"}, all{"n"}, pool{"rows"};
    const Array ids(verb, "ids", ids_, {Type::i64}, &some);
    const Array row_of(verb, "row_of", row_of_, {Type::i32}, &all, Access::write);
    const Array owner(verb, "owner", owner_, {Type::i64}, &pool, Access::write);
    const Shape each{owner.size(0)};
    const Array free(verb, "free", free_, {Type::i64}, &each);
    const int64_t m = ids.size(0), n_rows = owner.size(0);
    if (n_free < m || n_free > n_rows)
        raise_value("take_rows: n_free is " + std::to_string(n_free) + ", expected " + std::to_string(m) + ".." +
                    std::to_string(n_rows));
    const Numbers neurons = numbers_below(verb, "ids", ids, row_of.size(0), true);
    void* data = nullptr;
    nb::object result = new_array(Type::i64, {m}, &data);
    int64_t* rows = static_cast<int64_t*>(data);
    std::copy_n(free.data<int64_t>() + n_free - m, m, rows);
    std::sort(rows, rows + m);
    if (m && (rows[0] < 0 || rows[m - 1] >= n_rows))
        raise_value("take_rows: free has " + std::to_string(rows[0] < 0 ? rows[0] : rows[m - 1]) + ", expected 0.." +
                    std::to_string(n_rows - 1));
    for (int64_t i = 0; i < m; ++i) {
        const int64_t id = neurons[static_cast<size_t>(i)];
        owner.data<int64_t>()[rows[i]] = first + id;
        row_of.data<int32_t>()[id] = static_cast<int32_t>(rows[i]);
    }
    return result;
}

void drop_rows(nb::handle ids_, nb::handle row_of_, nb::handle owner_, nb::handle free_, int64_t n_free) {
    const char* verb = "drop_rows";
    const Shape some{"m"}, all{"n"}, pool{"rows"};
    const Array ids(verb, "ids", ids_, {Type::i64}, &some);
    const Array row_of(verb, "row_of", row_of_, {Type::i32}, &all, Access::write);
    const Array owner(verb, "owner", owner_, {Type::i64}, &pool, Access::write);
    const Shape each{owner.size(0)};
    const Array free(verb, "free", free_, {Type::i64}, &each, Access::write);
    const int64_t m = ids.size(0), n_rows = owner.size(0);
    if (n_free < 0 || n_free > n_rows - m)
        raise_value("drop_rows: n_free is " + std::to_string(n_free) + ", expected 0.." + std::to_string(n_rows - m));
    const Numbers neurons = numbers_below(verb, "ids", ids, row_of.size(0), true);
    for (const int64_t id : neurons) {
        const int64_t row = row_of.data<int32_t>()[id];
        if (row < 0 || row >= n_rows)
            raise_value("drop_rows: row_of is " + std::to_string(row) + " at " + std::to_string(id) +
                        ", expected 0.." + std::to_string(n_rows - 1));
    }
    for (int64_t i = 0; i < m; ++i) {
        int32_t& row = row_of.data<int32_t>()[neurons[static_cast<size_t>(i)]];
        owner.data<int64_t>()[row] = -1;
        free.data<int64_t>()[n_free + i] = row;
        row = -1;
    }
}

}  // namespace

void bind_window(nb::module_& module) {
    using nb::arg;
    module.def("find_rows", &find_rows, arg("ids").none(), arg("row_of").none(), arg("in_flight").none());
    module.def("request_rows", &request_rows, arg("ids").none(), arg("step"), arg("last").none(),
               arg("guessed").none(), arg("row_of").none(), arg("in_flight").none(), arg("count").none() = nb::none(),
               arg("credit") = 0.0);
    module.def("least_rows", &least_rows, arg("row_of").none(), arg("in_flight").none(), arg("last").none(),
               arg("step"), arg("value").none(), arg("guessed").none(), arg("k"));
    module.def("take_rows", &take_rows, arg("ids").none(), arg("first"), arg("row_of").none(), arg("owner").none(),
               arg("free").none(), arg("n_free"));
    module.def("drop_rows", &drop_rows, arg("ids").none(), arg("row_of").none(), arg("owner").none(),
               arg("free").none(), arg("n_free"));
}

}  // namespace flashd
