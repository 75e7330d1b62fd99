// The verb gemv.
#include "inputs.hpp"
#include "pool.hpp"
#include "verbs.hpp"

namespace flashd {
namespace {

void gemv(nb::handle w_, nb::handle x_, nb::handle out_, nb::handle bias_) {
    const Shape w_shape{"n", "k"};
    const Array w("gemv", "w", w_, {Type::f32, Type::f16, Type::bf16}, &w_shape);
    const Shape x_shape{Axis::batch(), w.size(1)};
    const Array x("gemv", "x", x_, {Type::f32}, &x_shape);
    const Shape out_shape{x.size(0), w.size(0)};
    const Array out("gemv", "out", out_, {Type::f32}, &out_shape, Access::write);
    const Array bias = Array::optional("gemv", "bias", bias_, {Type::f32}, {w.size(0)});
    const NoGil no_gil;
    const Level& at = level();
    const Inputs inputs(at.rows, x.data<float>(), w.size(1), x.size(0));
    const GemvArgs args{w.data<void>(),     w.type(),  inputs.data(), out.data<float>(),
                        bias.data<float>(), w.size(0), w.size(1),     x.size(0)};
    parallel_for([&](int64_t first, int64_t last, int) { at.rows.gemv(args, first, last); }, args.n,
                 row_chunk(args.k * item_bytes(args.type)));
}

}  // namespace

void bind_gemv(nb::module_& module) {
    using nb::arg;
    module.def("gemv", &gemv, arg("w").none(), arg("x").none(), arg("out").none(), arg("bias").none() = nb::none());
}

}  // namespace flashd
