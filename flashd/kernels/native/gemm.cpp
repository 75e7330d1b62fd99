// The verb gemm.
#include "panels.hpp"
#include "verbs.hpp"

namespace flashd {
namespace {

void gemm(nb::handle w_, nb::handle x_, nb::handle out_, nb::handle bias_) {
    const Shape w_shape{"n", "k"};
    const Array w("gemm", "w", w_, {Type::f32, Type::f16, Type::bf16}, &w_shape);
    const Shape x_shape{Axis::tokens(), w.size(1)};
    const Array x("gemm", "x", x_, {Type::f32}, &x_shape);
    const Shape out_shape{x.size(0), w.size(0)};
    const Array out("gemm", "out", out_, {Type::f32}, &out_shape, Access::write);
    const Array bias = Array::optional("gemm", "bias", bias_, {Type::f32}, {w.size(0)});
    const GemmArgs args{w.data<void>(),     w.type(),  x.data<float>(), out.data<float>(),
                        bias.data<float>(), w.size(0), w.size(1),       x.size(0)};
    const NoGil no_gil;
    const PanelVerbs& verbs = level().panels;
    const Product product{args.x, nullptr, args.k, args.tokens, args.k, args.n, kPanelOutputs};
    run_product(verbs, product, [&](int64_t t, const PanelPlan& plan, int64_t first, int64_t last, float* scratch) {
        GemmArgs slice = args;
        slice.out += t * args.n;
        verbs.gemm(slice, plan, first, last, scratch);
    });
}

}  // namespace

void bind_gemm(nb::module_& module) {
    using nb::arg;
    module.def("gemm", &gemm, arg("w").none(), arg("x").none(), arg("out").none(), arg("bias").none() = nb::none());
}

}  // namespace flashd
