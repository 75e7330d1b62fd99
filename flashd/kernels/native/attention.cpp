// The verb attention.
#include <memory>

#include "pool.hpp"
#include "verbs.hpp"

namespace flashd {
namespace {

void attention(nb::handle q_, nb::handle k_, nb::handle v_, int64_t length, float scale, nb::handle out_) {
    const char* verb = "attention";
    const Shape q_shape{"H", "hd"};
    const Array q(verb, "q", q_, {Type::f32}, &q_shape);
    const int64_t heads = q.size(0), width = q.size(1);
    const Shape k_shape{"n_kv", "capacity", width};
    const Array k(verb, "k", k_, {Type::f32, Type::f16}, &k_shape);
    const Shape v_shape{k.size(0), k.size(1), width};
    const Array v(verb, "v", v_, {k.type()}, &v_shape);
    const Shape out_shape{heads, width};
    const Array out(verb, "out", out_, {Type::f32}, &out_shape, Access::write);
    const int64_t kv_heads = k.size(0), capacity = k.size(1);
    if (kv_heads < 1 || heads % kv_heads)
        raise_value("attention: " + std::to_string(heads) + " query heads, expected a multiple of the " +
                    std::to_string(kv_heads) + " KV heads");
    if (length < 1 || length > capacity)
        raise_value("attention: length is " + std::to_string(length) + ", expected 1.." +
                    std::to_string(capacity));
    const AttentionArgs args{q.data<float>(), k.data<void>(), v.data<void>(), k.type(), heads, kv_heads,
                             capacity,        width,          length,         scale,    out.data<float>()};
    const nb::gil_scoped_release no_gil;
    const Level& at = level();
    // Read once, whoever changes the count meanwhile: every worker has its own scores.
    const int workers = thread_count();
    // The heads of a group share what they read, unless that leaves threads without work.
    const int64_t group = heads / kv_heads;
    const int64_t share = kv_heads >= 2 * workers ? group : 1;
    const int64_t chunk = share * chunk_of(2 * length * width * item_bytes(args.type));
    const int64_t scratch = (group < kMaxHeadsAtOnce ? group : kMaxHeadsAtOnce) * length;
    const std::unique_ptr<float[]> scores(new float[static_cast<size_t>(workers * scratch)]);
    const auto heads_of = [&](int64_t first, int64_t last, int worker) {
        at.attention.attend(args, first, last, scores.get() + worker * scratch);
    };
    parallel_for(heads_of, heads, chunk, workers);
}

}  // namespace

void bind_attention(nb::module_& module) {
    using nb::arg;
    module.def("attention", &attention, arg("q").none(), arg("k").none(), arg("v").none(), arg("length"),
               arg("scale"), arg("out").none());
}

}  // namespace flashd
