// The verbs ffn_dots and ffn_down.
#include <cmath>
#include <cstring>
#include <memory>

#include "inputs.hpp"
#include "pool.hpp"
#include "verbs.hpp"

namespace flashd {
namespace {

constexpr int64_t kMinDownColumns = 256;  // of a thread: narrower runs of memory read slowly
constexpr int64_t kFlagsChunk = 512;      // columns that a thread looks through at a time

// flags[i] = whether any sequence's value of listed row i is not zero; NaN counts.
void mark_fired(const DotsArgs& a, int64_t first, int64_t last, uint8_t* flags) {
    std::memset(flags + first, 0, static_cast<size_t>(last - first));
    for (int64_t b = 0; b < a.batch; ++b) {
        const float* out = a.out + b * a.columns;
        if (a.slots)
            for (int64_t i = first; i < last; ++i) flags[i] |= !(out[a.slots[i]] == 0.0f);
        else
            for (int64_t i = first; i < last; ++i) flags[i] |= !(out[i] == 0.0f);
    }
}

void run_dots(DotsArgs args, uint8_t* flags) {
    if (args.batch > kMaxBatch) {
        ffn_dots_prompt(args);
        const auto mark = [&](int64_t first, int64_t last, int) { mark_fired(args, first, last, flags); };
        return parallel_for(mark, args.count, kFlagsChunk);
    }
    const Level& at = level();
    const Inputs inputs(at.rows, args.x, args.d, args.batch);
    args.x = inputs.data();
    const auto rows = [&](int64_t first, int64_t last, int) {
        at.rows.ffn_dots(args, first, last);
        mark_fired(args, first, last, flags);
    };
    parallel_for(rows, args.count, row_chunk((args.gated ? 2 : 1) * args.d * item_bytes(args.type)));
}

nb::object ffn_dots(nb::handle rows_, const std::string& dtype, int64_t d, bool gated, const std::string& activation,
                    nb::handle x_, nb::handle out_, nb::handle up_bias_, nb::handle gate_bias_, nb::handle index_,
                    nb::handle slots_, nb::handle mask_, double threshold) {
    const char* verb = "ffn_dots";
    DotsArgs args{};
    const Array rows = neuron_rows(verb, rows_, dtype, d, gated, args);
    const Numbers index = row_index(verb, index_, args);
    args.activation = activation_named(verb, activation);
    args.threshold = static_cast<float>(threshold);
    if (!std::isfinite(args.threshold) || threshold < 0)
        raise_value(std::string(verb) + ": threshold is " + number(threshold) +
                    ", expected a finite float32 of at least 0");
    const Shape x_shape{Axis::tokens(), d};
    const Array x(verb, "x", x_, {Type::f32}, &x_shape);
    const Array slots = Array::optional(verb, "slots", slots_, {Type::i64}, {args.count});
    const Axis columns = slots_.is_none() ? Axis(args.count) : Axis("c");
    const Shape out_shape{x.size(0), columns};
    const Array out(verb, "out", out_, {Type::f32}, &out_shape, Access::write);
    const Array mask = Array::optional(verb, "mask", mask_, {Type::boolean}, {x.size(0), out.size(1)});
    const Array up_bias = Array::optional(verb, "up_bias", up_bias_, {Type::f32}, {args.n});
    const Array gate_bias = Array::optional(verb, "gate_bias", gate_bias_, {Type::f32}, {args.n});
    if (!gate_bias_.is_none() && !gated)
        raise_value(std::string(verb) + ": gate_bias is given, expected None for ungated rows");
    args.batch = x.size(0);
    args.x = x.data<float>();
    args.out = out.data<float>();
    args.mask = mask.data<uint8_t>();
    args.columns = out.size(1);
    args.up_bias = up_bias.data<float>();
    args.gate_bias = gate_bias.data<float>();
    Numbers columns_of;
    if (!slots_.is_none()) {
        columns_of = column_slots(verb, slots, args.columns);
        args.slots = columns_of.data();
    }

    const std::unique_ptr<uint8_t[]> flags(new uint8_t[static_cast<size_t>(args.count)]);
    {
        const NoGil no_gil;
        run_dots(args, flags.get());
    }
    return flagged(flags.get(), args.count, args.slots);
}

void run_down(const DownArgs& args) {
    if (args.batch > kMaxBatch) return ffn_down_prompt(args);
    // One piece of columns for each thread: the wider a piece, the longer are the runs of memory that it reads, and
    // in a batch every piece looks through all of h.
    const int workers = thread_count();
    const int64_t share = round_up(divide_up(args.d, workers), 64);
    const Level& at = level();
    parallel_for([&](int64_t first, int64_t last, int) { at.rows.ffn_down(args, first, last); }, args.d,
                 share > kMinDownColumns ? share : kMinDownColumns, workers);
}

void ffn_down(nb::handle rows_, const std::string& dtype, int64_t d, bool gated, nb::handle h_, nb::handle acc_,
              nb::handle index_) {
    const char* verb = "ffn_down";
    DownArgs args{};
    const Array rows = neuron_rows(verb, rows_, dtype, d, gated, args);
    const Numbers index = row_index(verb, index_, args);
    const Shape h_shape{Axis::tokens(), args.count};
    const Array h(verb, "h", h_, {Type::f32}, &h_shape);
    const Shape acc_shape{h.size(0), d};
    const Array acc(verb, "acc", acc_, {Type::f32}, &acc_shape, Access::write);
    args.batch = h.size(0);
    args.h = h.data<float>();
    args.acc = acc.data<float>();
    const NoGil no_gil;
    run_down(args);
}

}  // namespace

void bind_ffn(nb::module_& module) {
    using nb::arg;
    module.def("ffn_dots", &ffn_dots, arg("rows").none(), arg("dtype"), arg("d"), arg("gated"), arg("activation"),
               arg("x").none(), arg("out").none(), arg("up_bias").none() = nb::none(),
               arg("gate_bias").none() = nb::none(), nb::kw_only(), arg("index").none() = nb::none(),
               arg("slots").none() = nb::none(), arg("mask").none() = nb::none(), arg("threshold") = 0.0);
    module.def("ffn_down", &ffn_down, arg("rows").none(), arg("dtype"), arg("d"), arg("gated"), arg("h").none(),
               arg("acc").none(), arg("index").none() = nb::none());
}

}  // namespace flashd
