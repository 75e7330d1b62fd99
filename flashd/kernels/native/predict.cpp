// The verbs predict and topk_union.
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "pool.hpp"
#include "verbs.hpp"

namespace flashd {
namespace {

// (ids, mask) of `active` [batch, n]: the columns that any sequence uses, and who uses them.
nb::tuple union_of(const uint8_t* active, int64_t batch, int64_t n) {
    std::vector<int64_t> found(static_cast<size_t>(n) + 1);
    int64_t count = 0;
    {
        const nb::gil_scoped_release no_gil;
        std::vector<uint8_t> any(active, active + n);
        for (int64_t b = 1; b < batch; ++b)
            for (int64_t i = 0; i < n; ++i) any[static_cast<size_t>(i)] |= active[b * n + i];
        for (int64_t i = 0; i < n; ++i) {  // without a branch: which neurons fire can't be foreseen
            found[static_cast<size_t>(count)] = i;
            count += any[static_cast<size_t>(i)];
        }
    }
    void *ids_data = nullptr, *mask_data = nullptr;
    const nb::object ids = new_array(Type::i64, {count}, &ids_data);
    const nb::object mask = new_array(Type::boolean, {batch, count}, &mask_data);
    if (count) std::memcpy(ids_data, found.data(), static_cast<size_t>(count) * sizeof(int64_t));
    uint8_t* to = static_cast<uint8_t*>(mask_data);
    for (int64_t b = 0; b < batch; ++b)
        for (int64_t i = 0; i < count; ++i) *to++ = active[b * n + found[static_cast<size_t>(i)]];
    return nb::make_tuple(ids, mask);
}

nb::tuple predict(nb::handle w1_, nb::handle w2_, nb::handle x_, double threshold, nb::handle b1_, nb::handle b2_,
                  nb::handle scores_) {
    const char* verb = "predict";
    const Shape w1_shape{"r", "d"};
    const Array w1(verb, "w1", w1_, {Type::f32, Type::f16, Type::bf16}, &w1_shape);
    const Shape w2_shape{"n", w1.size(0)};
    const Array w2(verb, "w2", w2_, {Type::f32, Type::f16, Type::bf16}, &w2_shape);
    const Shape x_shape{Axis::batch(), w1.size(1)};
    const Array x(verb, "x", x_, {Type::f32}, &x_shape);
    if (std::isnan(threshold)) raise_value("predict: threshold is nan, expected a number");
    const int64_t batch = x.size(0), rank = w1.size(0), n = w2.size(0);
    const Array b1 = Array::optional(verb, "b1", b1_, {Type::f32}, {rank});
    const Array b2 = Array::optional(verb, "b2", b2_, {Type::f32}, {n});
    const Array scores = Array::optional(verb, "scores", scores_, {Type::f32}, {batch, n}, Access::write);
    const std::unique_ptr<float[]> hidden(new float[static_cast<size_t>(batch * rank)]);
    const std::unique_ptr<uint8_t[]> active(new uint8_t[static_cast<size_t>(batch * n)]);
    const PredictArgs args{w1.data<void>(), w2.data<void>(), w1.type(),       w2.type(),        batch,
                           x.size(1),       rank,            n,               x.data<float>(),  b1.data<float>(),
                           b2.data<float>(), static_cast<float>(threshold),   hidden.get(),     scores.data<float>(),
                           active.get()};
    {
        const nb::gil_scoped_release no_gil;
        const Level& at = level();
        parallel_for([&](int64_t first, int64_t last, int) { at.rows.predict_hidden(args, first, last); }, rank,
                     chunk_of(args.d * item_bytes(args.type1)));
        parallel_for([&](int64_t first, int64_t last, int) { at.rows.predict_scores(args, first, last); }, n,
                     chunk_of(rank * item_bytes(args.type2)));
    }
    return union_of(active.get(), batch, n);
}

// Unsigned numbers in the order of the scores: NaN highest, the zeros equal.
uint32_t sort_key(float score) {
    if (score != score) return 0xFFFFFFFFu;
    score += 0.0f;  // -0 becomes 0
    uint32_t bits;
    std::memcpy(&bits, &score, sizeof bits);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// active[i] = whether scores[i] is among the k highest; of equal ones the first win.
void mark_highest(const float* scores, int64_t n, int64_t k, uint8_t* active) {
    // The k-th highest key, from its top digits to its last: count the digits among keys that agree so far.
    constexpr int kDigitBits[] = {11, 11, 10};
    uint32_t prefix = 0, mask = 0;
    int64_t wanted = k;  // keys still to find among those that agree
    int shift = 32;
    for (const int bits : kDigitBits) {
        shift -= bits;
        int64_t counts[1 << 11] = {};
        const uint32_t digits = (1u << bits) - 1;
        for (int64_t i = 0; i < n; ++i) {
            const uint32_t key = sort_key(scores[i]);
            counts[(key >> shift) & digits] += (key & mask) == prefix;
        }
        uint32_t digit = digits;
        for (; counts[digit] < wanted; --digit) wanted -= counts[digit];
        prefix |= digit << shift;
        mask |= digits << shift;
    }
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t key = sort_key(scores[i]);
        const bool last_place = key == prefix && wanted > 0;
        wanted -= last_place;
        active[i] = key > prefix || last_place;
    }
}

nb::tuple topk_union(nb::handle scores_, int64_t k) {
    const Shape shape{Axis::tokens(), "n"};
    const Array scores("topk_union", "scores", scores_, {Type::f32}, &shape);
    const int64_t batch = scores.size(0), n = scores.size(1);
    if (k < 1 || k > n)
        raise_value("topk_union: k is " + std::to_string(k) + ", expected 1.." + std::to_string(n));
    const std::unique_ptr<uint8_t[]> active(new uint8_t[static_cast<size_t>(batch * n)]);
    const auto sequences = [&](int64_t first, int64_t last, int) {
        for (int64_t b = first; b < last; ++b)
            mark_highest(scores.data<float>() + b * n, n, k, active.get() + b * n);
    };
    {
        const nb::gil_scoped_release no_gil;
        parallel_for(sequences, batch, 1);
    }
    return union_of(active.get(), batch, n);
}

}  // namespace

void bind_predict(nb::module_& module) {
    using nb::arg;
    module.def("predict", &predict, arg("w1").none(), arg("w2").none(), arg("x").none(), arg("threshold"),
               arg("b1").none() = nb::none(), arg("b2").none() = nb::none(), arg("scores").none() = nb::none());
    module.def("topk_union", &topk_union, arg("scores").none(), arg("k"));
}

}  // namespace flashd
