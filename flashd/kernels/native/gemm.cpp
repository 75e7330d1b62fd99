// The verb gemm.
#include "panels.hpp"
#include "pool.hpp"
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
    const nb::gil_scoped_release no_gil;
    const PanelVerbs& verbs = level().panels;
    const int workers = thread_count();
    PanelPlan plan = panel_plan(verbs, args.tokens, args.k, args.n, kPanelOutputs, workers);
    const int64_t share = panel_scratch(verbs.width * verbs.vectors);
    const Scratch scratch(workers * share), packed(packed_floats(plan));
    panel_pack(verbs, {args.x, nullptr, args.k, packed.data()}, plan, workers);
    const auto items = [&](int64_t first, int64_t last, int worker) {
        verbs.gemm(args, plan, first, last, scratch.data() + worker * share);
    };
    parallel_for(items, plan.items, 1, workers);
}

}  // namespace

void bind_gemm(nb::module_& module) {
    using nb::arg;
    module.def("gemm", &gemm, arg("w").none(), arg("x").none(), arg("out").none(), arg("bias").none() = nb::none());
}

}  // namespace flashd
