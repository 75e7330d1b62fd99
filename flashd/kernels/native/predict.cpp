// The verbs predict and topk_union.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "inputs.hpp"
#include "pool.hpp"
#include "verbs.hpp"

namespace flashd {
namespace {

// (ids, mask) of `active` [batch, n]: the columns that any sequence uses, and who uses them.
nb::tuple union_of(const uint8_t* active, int64_t batch, int64_t n) {
    std::vector<uint8_t> any(active, active + n);
    for (int64_t b = 1; b < batch; ++b)
        for (int64_t i = 0; i < n; ++i) any[static_cast<size_t>(i)] |= active[b * n + i];
    const nb::object ids = flagged(any.data(), n, nullptr);
    const Array chosen("predict", "ids", ids, {Type::i64}, nullptr);
    const int64_t count = chosen.size(0);
    void* data = nullptr;
    const nb::object mask = new_array(Type::boolean, {batch, count}, &data);
    uint8_t* to = static_cast<uint8_t*>(data);
    for (int64_t b = 0; b < batch; ++b)
        for (int64_t i = 0; i < count; ++i) *to++ = active[b * n + chosen.data<int64_t>()[i]];
    return nb::make_tuple(ids, mask);
}

void run_predict(PredictArgs args) {
    const Level& at = level();
    const Inputs inputs(at.rows, args.x, args.d, args.batch);
    const int64_t floats = packed_inputs_floats(at.rows, args.rank, args.batch);
    const Scratch hidden(floats);
    std::fill_n(hidden.data(), floats, 0.0f);
    args.x = inputs.data();
    args.hidden = hidden.data();
    parallel_for([&](int64_t first, int64_t last, int) { at.rows.predict_hidden(args, first, last); }, args.rank,
                 row_chunk(args.d * item_bytes(args.type1)));
    parallel_for([&](int64_t first, int64_t last, int) { at.rows.predict_scores(args, first, last); }, args.n,
                 row_chunk(args.rank * item_bytes(args.type2)));
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
    const std::unique_ptr<uint8_t[]> active(new uint8_t[static_cast<size_t>(batch * n)]);
    PredictArgs args{w1.data<void>(),  w2.data<void>(),   w1.type(),        w2.type(),
                     batch,            x.size(1),         rank,             n,
                     x.data<float>(),  b1.data<float>(),  b2.data<float>(), static_cast<float>(threshold),
                     nullptr,          scores.data<float>(), active.get()};
    {
        const NoGil no_gil;
        run_predict(args);
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

// active[i] = whether scores[i] is among the k highest; of equal ones the first win. keys, candidates: [n].
void mark_highest(const float* scores, int64_t n, int64_t k, uint32_t* keys, uint32_t* candidates, uint8_t* active) {
    // Scores crowd into few leading digits: two counters each, so that one need not wait for the other.
    constexpr int kShift = 21;
    int64_t counts[2][1 << (32 - kShift)] = {};
    for (int64_t i = 0; i < n; ++i) keys[i] = sort_key(scores[i]);
    for (int64_t i = 0; i < n; ++i) ++counts[i & 1][keys[i] >> kShift];
    int64_t wanted = k;  // keys still to find among those with that digit
    uint32_t digit = (1u << (32 - kShift)) - 1;
    for (; counts[0][digit] + counts[1][digit] < wanted; --digit) wanted -= counts[0][digit] + counts[1][digit];
    int64_t count = 0;
    for (int64_t i = 0; i < n; ++i) {
        candidates[count] = keys[i];
        count += keys[i] >> kShift == digit;
    }
    std::nth_element(candidates, candidates + wanted - 1, candidates + count, std::greater<uint32_t>());
    const uint32_t lowest = candidates[wanted - 1];
    int64_t ties = k;  // of the lowest key, so many have a place
    for (int64_t i = 0; i < n; ++i) {
        active[i] = keys[i] > lowest;
        ties -= active[i];
    }
    for (int64_t i = 0; ties > 0; ++i)
        if (keys[i] == lowest) {
            active[i] = 1;
            --ties;
        }
}

nb::tuple topk_union(nb::handle scores_, int64_t k) {
    const Shape shape{Axis::tokens(), "n"};
    const Array scores("topk_union", "scores", scores_, {Type::f32}, &shape);
    const int64_t batch = scores.size(0), n = scores.size(1);
    if (k < 1 || k > n)
        raise_value("topk_union: k is " + std::to_string(k) + ", expected 1.." + std::to_string(n));
    const std::unique_ptr<uint8_t[]> active(new uint8_t[static_cast<size_t>(batch * n)]);
    const std::unique_ptr<uint32_t[]> keys(new uint32_t[static_cast<size_t>(2 * batch * n)]);
    const auto sequences = [&](int64_t first, int64_t last, int) {
        for (int64_t b = first; b < last; ++b)
            mark_highest(scores.data<float>() + b * n, n, k, keys.get() + 2 * b * n, keys.get() + (2 * b + 1) * n,
                         active.get() + b * n);
    };
    {
        const NoGil no_gil;
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
