// The verbs ffn_dots and ffn_down.
#include "pool.hpp"
#include "verbs.hpp"

namespace flashd {
namespace {

constexpr int64_t kMinDownColumns = 256;

void ffn_dots(nb::handle rows_, const std::string& dtype, int64_t d, bool gated, const std::string& activation,
              nb::handle x_, nb::handle out_, nb::handle up_bias_, nb::handle gate_bias_) {
    const char* verb = "ffn_dots";
    DotsArgs args{};
    const Array rows = neuron_rows(verb, rows_, dtype, d, gated, args);
    args.activation = activation_named(verb, activation);
    const Shape x_shape{Axis::batch(), d};
    const Array x(verb, "x", x_, {Type::f32}, &x_shape);
    const Shape out_shape{x.size(0), args.n};
    const Array out(verb, "out", out_, {Type::f32}, &out_shape, Access::write);
    const Array up_bias = Array::optional(verb, "up_bias", up_bias_, {Type::f32}, {args.n});
    const Array gate_bias = Array::optional(verb, "gate_bias", gate_bias_, {Type::f32}, {args.n});
    if (!gate_bias_.is_none() && !gated)
        raise_value(std::string(verb) + ": gate_bias is given, expected None for ungated rows");
    args.batch = x.size(0);
    args.x = x.data<float>();
    args.out = out.data<float>();
    args.up_bias = up_bias.data<float>();
    args.gate_bias = gate_bias.data<float>();
    const nb::gil_scoped_release no_gil;
    const Level& at = level();
    parallel_for([&](int64_t first, int64_t last, int) { at.rows.ffn_dots(args, first, last); }, args.n,
                 chunk_of((gated ? 2 : 1) * d * item_bytes(args.type)));
}

void ffn_down(nb::handle rows_, const std::string& dtype, int64_t d, bool gated, nb::handle h_, nb::handle acc_) {
    const char* verb = "ffn_down";
    DownArgs args{};
    const Array rows = neuron_rows(verb, rows_, dtype, d, gated, args);
    const Shape h_shape{Axis::batch(), args.n};
    const Array h(verb, "h", h_, {Type::f32}, &h_shape);
    const Shape acc_shape{h.size(0), d};
    const Array acc(verb, "acc", acc_, {Type::f32}, &acc_shape, Access::write);
    args.batch = h.size(0);
    args.h = h.data<float>();
    args.acc = acc.data<float>();
    // Two chunks of columns a thread: wide pieces of rows, yet something left to share.
    const int workers = thread_count();
    const int64_t share = (d / (2 * workers) + 63) / 64 * 64;
    const nb::gil_scoped_release no_gil;
    const Level& at = level();
    parallel_for([&](int64_t first, int64_t last, int) { at.rows.ffn_down(args, first, last); }, d,
                 share > kMinDownColumns ? share : kMinDownColumns, workers);
}

}  // namespace

void bind_ffn(nb::module_& module) {
    using nb::arg;
    module.def("ffn_dots", &ffn_dots, arg("rows").none(), arg("dtype"), arg("d"), arg("gated"), arg("activation"),
               arg("x").none(), arg("out").none(), arg("up_bias").none() = nb::none(),
               arg("gate_bias").none() = nb::none());
    module.def("ffn_down", &ffn_down, arg("rows").none(), arg("dtype"), arg("d"), arg("gated"), arg("h").none(),
               arg("acc").none());
}

}  // namespace flashd
