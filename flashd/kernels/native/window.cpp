// The verbs find_rows, request_rows, evict_rows, take_rows and drop_rows: tables of which neuron has which row.
#include <algorithm>
#include <memory>
#include <vector>

#include "verbs.hpp"

namespace flashd {
namespace {

constexpr uint8_t kHere = 0, kComing = 1, kMissing = 2;
// Every so many keys are looked at first to find the least ones; so many more than expected are taken.
constexpr int64_t kSample = 32, kMargin = 4;

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

// Keys that are at most `bound`, which is less than kStays, with their numbers, and in their order. Most blocks
// have none, and one look at the least key of a block says so.
int64_t up_to(const int32_t* keys, const int32_t* least, int64_t n, int32_t bound, uint64_t* found) {
    int64_t count = 0;
    for (int64_t block = 0; block * kKeyBlock < n; ++block) {
        if (least[block] > bound) continue;
        const int64_t end = std::min(n, (block + 1) * kKeyBlock);
        for (int64_t i = block * kKeyBlock; i < end; ++i) {
            found[count] = uint64_t{static_cast<uint32_t>(keys[i]) ^ 0x80000000u} << 32 | static_cast<uint64_t>(i);
            count += keys[i] <= bound;
        }
    }
    return count;
}

// Fewer candidates for the k least than all: a sample tells nearly how small they are.
int64_t candidates(const int32_t* keys, const int32_t* least, int64_t n, int64_t k, uint64_t* found) {
    std::vector<int32_t> sample;
    sample.reserve(static_cast<size_t>(n / kSample + 1));
    for (int64_t i = 0; i < n; i += kSample) sample.push_back(keys[i]);
    const size_t rank = static_cast<size_t>(2 * (std::min(k, n) / kSample) + kMargin);
    if (rank < sample.size()) {
        std::nth_element(sample.begin(), sample.begin() + static_cast<ptrdiff_t>(rank), sample.end());
        if (sample[rank] < kKeyStays) {
            const int64_t count = up_to(keys, least, n, sample[rank], found);
            if (count >= k) return count;
        }
    }
    return up_to(keys, least, n, kKeyStays - 1, found);
}

// Takes the rows of ascending neurons away from them; raises before anything is changed.
void drop(const char* verb, const int64_t* ids, int64_t m, int32_t* row_of, int64_t* owner, int64_t n_rows,
          int64_t* free, int64_t n_free) {
    if (n_free < 0 || n_free > n_rows - m)
        raise_value(std::string(verb) + ": n_free is " + std::to_string(n_free) + ", expected 0.." +
                    std::to_string(n_rows - m));
    for (int64_t i = 0; i < m; ++i)
        if (row_of[ids[i]] < 0 || row_of[ids[i]] >= n_rows)
            raise_value(std::string(verb) + ": row_of is " + std::to_string(row_of[ids[i]]) + " at " +
                        std::to_string(ids[i]) + ", expected 0.." + std::to_string(n_rows - 1));
    for (int64_t i = 0; i < m; ++i) {
        int32_t& row = row_of[ids[i]];
        owner[row] = -1;
        free[n_free + i] = row;
        row = -1;
    }
}

nb::tuple evict_rows(nb::handle row_of_, nb::handle in_flight_, nb::handle last_, int64_t step, nb::handle value_,
                     nb::handle guessed_, int64_t k, nb::handle owner_, nb::handle free_, int64_t n_free) {
    const char* verb = "evict_rows";
    const Shape all{"n"}, pool{"rows"};
    const Array row_of(verb, "row_of", row_of_, {Type::i32}, &all, Access::write);
    const int64_t n = row_of.size(0);
    const Shape each{n};
    const Array in_flight(verb, "in_flight", in_flight_, {Type::boolean}, &each);
    const Array last(verb, "last", last_, {Type::i32}, &each);
    const Array value(verb, "value", value_, {Type::f32, Type::i32}, &each);
    const Array guessed(verb, "guessed", guessed_, {Type::boolean}, &each, Access::write);
    const Array owner(verb, "owner", owner_, {Type::i64}, &pool, Access::write);
    const Shape rows{owner.size(0)};
    const Array free(verb, "free", free_, {Type::i64}, &rows, Access::write);
    if (k < 0) raise_value("evict_rows: k is " + std::to_string(k) + ", expected at least 0");
    const int64_t blocks = divide_up(n, kKeyBlock);
    // Behind the keys the least one of each block.
    const std::unique_ptr<int32_t[]> keys(new int32_t[static_cast<size_t>(n + blocks)]);
    int32_t* const least = keys.get() + n;
    level().window.row_keys({row_of.data<int32_t>(), in_flight.data<uint8_t>(), last.data<int32_t>(),
                             static_cast<int32_t>(step), value.data<void>(), value.type(), guessed.data<uint8_t>(), n,
                             keys.get(), least});
    // One more than there are keys: `up_to` writes before it knows.
    const std::unique_ptr<uint64_t[]> found(new uint64_t[static_cast<size_t>(n) + 1]);
    const int64_t count = candidates(keys.get(), least, n, k, found.get()), m = std::min(k, count);
    if (m < count) std::nth_element(found.get(), found.get() + m, found.get() + count);
    int64_t* const ids = reinterpret_cast<int64_t*>(found.get());
    for (int64_t i = 0; i < m; ++i) ids[i] = static_cast<int64_t>(found[i] & 0xFFFFFFFFu);
    std::sort(ids, ids + m);
    drop(verb, ids, m, row_of.data<int32_t>(), owner.data<int64_t>(), owner.size(0), free.data<int64_t>(), n_free);
    int64_t were_guessed = 0;
    for (int64_t i = 0; i < m; ++i) {
        were_guessed += guessed.data<uint8_t>()[ids[i]];
        guessed.data<uint8_t>()[ids[i]] = 0;
    }
    return nb::make_tuple(m, were_guessed);
}

nb::tuple take_rows(nb::handle ids_, int64_t most, int64_t first, nb::handle row_of_, nb::handle in_flight_,
                    nb::handle owner_, nb::handle free_, int64_t n_free, nb::handle guessed_) {
    const char* verb = "take_rows";
    const Shape some{"m"}, all{"n"}, pool{"rows"};
    const Array ids(verb, "ids", ids_, {Type::i64}, &some);
    const Array row_of(verb, "row_of", row_of_, {Type::i32}, &all, Access::write);
    const int64_t n = row_of.size(0);
    const Shape each{n};
    const Array in_flight(verb, "in_flight", in_flight_, {Type::boolean}, &each, Access::write);
    const Array owner(verb, "owner", owner_, {Type::i64}, &pool, Access::write);
    const int64_t n_rows = owner.size(0);
    const Shape each_row{n_rows};
    const Array free(verb, "free", free_, {Type::i64}, &each_row);
    const Array guessed = Array::optional(verb, "guessed", guessed_, {Type::boolean}, {n}, Access::write);
    if (n_free < 0 || n_free > n_rows)
        raise_value("take_rows: n_free is " + std::to_string(n_free) + ", expected 0.." + std::to_string(n_rows));
    if (most < 0 || most > n_free)
        raise_value("take_rows: most is " + std::to_string(most) + ", expected 0.." + std::to_string(n_free));
    Numbers lacking = numbers_below(verb, "ids", ids, n, true);
    size_t kept = 0;
    for (const int64_t id : lacking) {
        if (kept == static_cast<size_t>(most)) break;
        lacking[kept] = id;
        kept += row_of.data<int32_t>()[id] < 0;
    }
    const int64_t m = static_cast<int64_t>(kept);
    void *ids_data = nullptr, *rows_data = nullptr;
    nb::object taken = new_array(Type::i64, {m}, &ids_data), result = new_array(Type::i64, {m}, &rows_data);
    int64_t* const rows = static_cast<int64_t*>(rows_data);
    std::copy_n(lacking.data(), m, static_cast<int64_t*>(ids_data));
    std::copy_n(free.data<int64_t>() + n_free - m, m, rows);
    std::sort(rows, rows + m);
    if (m && (rows[0] < 0 || rows[m - 1] >= n_rows))
        raise_value("take_rows: free has " + std::to_string(rows[0] < 0 ? rows[0] : rows[m - 1]) + ", expected 0.." +
                    std::to_string(n_rows - 1));
    for (int64_t i = 0; i < m; ++i) {
        const int64_t id = lacking[static_cast<size_t>(i)];
        owner.data<int64_t>()[rows[i]] = first + id;
        row_of.data<int32_t>()[id] = static_cast<int32_t>(rows[i]);
        in_flight.data<uint8_t>()[id] = 1;
        if (guessed.data<uint8_t>()) guessed.data<uint8_t>()[id] = 1;
    }
    return nb::make_tuple(taken, result);
}

void drop_rows(nb::handle ids_, nb::handle row_of_, nb::handle owner_, nb::handle free_, int64_t n_free) {
    const char* verb = "drop_rows";
    const Shape some{"m"}, all{"n"}, pool{"rows"};
    const Array ids(verb, "ids", ids_, {Type::i64}, &some);
    const Array row_of(verb, "row_of", row_of_, {Type::i32}, &all, Access::write);
    const Array owner(verb, "owner", owner_, {Type::i64}, &pool, Access::write);
    const Shape each{owner.size(0)};
    const Array free(verb, "free", free_, {Type::i64}, &each, Access::write);
    const Numbers neurons = numbers_below(verb, "ids", ids, row_of.size(0), true);
    drop(verb, neurons.data(), ids.size(0), row_of.data<int32_t>(), owner.data<int64_t>(), owner.size(0),
         free.data<int64_t>(), n_free);
}

}  // namespace

void bind_window(nb::module_& module) {
    using nb::arg;
    module.def("find_rows", &find_rows, arg("ids").none(), arg("row_of").none(), arg("in_flight").none());
    module.def("request_rows", &request_rows, arg("ids").none(), arg("step"), arg("last").none(),
               arg("guessed").none(), arg("row_of").none(), arg("in_flight").none(), arg("count").none() = nb::none(),
               arg("credit") = 0.0);
    module.def("evict_rows", &evict_rows, arg("row_of").none(), arg("in_flight").none(), arg("last").none(),
               arg("step"), arg("value").none(), arg("guessed").none(), arg("k"), arg("owner").none(),
               arg("free").none(), arg("n_free"));
    module.def("take_rows", &take_rows, arg("ids").none(), arg("most"), arg("first"), arg("row_of").none(),
               arg("in_flight").none(), arg("owner").none(), arg("free").none(), arg("n_free"),
               arg("guessed").none() = nb::none());
    module.def("drop_rows", &drop_rows, arg("ids").none(), arg("row_of").none(), arg("owner").none(),
               arg("free").none(), arg("n_free"));
}

}  // namespace flashd
