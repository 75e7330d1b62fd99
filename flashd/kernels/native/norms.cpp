// The verbs rmsnorm, layernorm and rope.
#include "pool.hpp"
#include "verbs.hpp"

namespace flashd {
namespace {

// Tokens that one thread takes. The few tokens of decoding never wait for another thread: their
// microseconds of work lie in its caches.
int64_t tokens_of(int64_t elements_per_token) {
    const int64_t chunk = chunk_of(elements_per_token * item_bytes(Type::f32));
    return chunk > kMaxBatch ? chunk : kMaxBatch;
}

void share_tokens(void (*verb)(const NormArgs&, int64_t, int64_t), const NormArgs& args, int64_t tokens) {
    parallel_for([&](int64_t first, int64_t last, int) { verb(args, first, last); }, tokens, tokens_of(args.d));
}

void rmsnorm(nb::handle x_, nb::handle weight_, double eps, nb::handle out_) {
    const Shape x_shape{"T", "d"};
    const Array x("rmsnorm", "x", x_, {Type::f32}, &x_shape);
    const Shape weight_shape{x.size(1)};
    const Array weight("rmsnorm", "weight", weight_, {Type::f32}, &weight_shape);
    const Shape out_shape{x.size(0), x.size(1)};
    const Array out("rmsnorm", "out", out_, {Type::f32}, &out_shape, Access::write);
    const NormArgs args{x.data<float>(), weight.data<float>(), nullptr, out.data<float>(), x.size(1), eps};
    const NoGil no_gil;
    share_tokens(level().norms.rmsnorm, args, x.size(0));
}

void layernorm(nb::handle x_, nb::handle weight_, nb::handle bias_, double eps, nb::handle out_) {
    const Shape x_shape{"T", "d"};
    const Array x("layernorm", "x", x_, {Type::f32}, &x_shape);
    const Shape weight_shape{x.size(1)};
    const Array weight("layernorm", "weight", weight_, {Type::f32}, &weight_shape);
    const Array bias = Array::optional("layernorm", "bias", bias_, {Type::f32}, weight_shape);
    const Shape out_shape{x.size(0), x.size(1)};
    const Array out("layernorm", "out", out_, {Type::f32}, &out_shape, Access::write);
    const NormArgs args{x.data<float>(),   weight.data<float>(), bias.data<float>(),
                        out.data<float>(), x.size(1),            eps};
    const NoGil no_gil;
    share_tokens(level().norms.layernorm, args, x.size(0));
}

void rope(nb::handle x_, nb::handle cos_, nb::handle sin_) {
    const Shape x_shape{"T", "heads", "hd"};
    const Array x("rope", "x", x_, {Type::f32}, &x_shape, Access::write);
    const int64_t tokens = x.size(0), heads = x.size(1), width = x.size(2);
    if (width % 2)
        raise_value("rope: x has a head width of " + std::to_string(width) + ", expected an even number");
    const Shape angles{tokens, width / 2};
    const Array cos("rope", "cos", cos_, {Type::f32}, &angles);
    const Array sin("rope", "sin", sin_, {Type::f32}, &angles);
    const RopeArgs args{x.data<float>(), cos.data<float>(), sin.data<float>(), heads, width};
    const NoGil no_gil;
    const Level& at = level();
    parallel_for([&](int64_t first, int64_t last, int) { at.norms.rope(args, first, last); }, tokens,
                 tokens_of(heads * width));
}

}  // namespace

void bind_norms(nb::module_& module) {
    using nb::arg;
    module.def("rmsnorm", &rmsnorm, arg("x").none(), arg("weight").none(), arg("eps"), arg("out").none());
    module.def("layernorm", &layernorm, arg("x").none(), arg("weight").none(), arg("bias").none(), arg("eps"),
               arg("out").none());
    module.def("rope", &rope, arg("x").none(), arg("cos").none(), arg("sin").none());
}

}  // namespace flashd
