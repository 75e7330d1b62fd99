// The verb attention.
#include <memory>

#include "pool.hpp"
#include "verbs.hpp"

namespace flashd {
namespace {

// Bytes of keys and values below which waking another thread costs more than it saves.
constexpr int64_t kAloneBytes = 128 << 10;

// A thread looks ahead within what it takes: some items, where they are many for every thread.
int64_t items_at_once(int64_t items) {
    const int64_t share = items / (8 * thread_count());
    return share < 1 ? 1 : share > 4 ? 4 : share;
}

void attention_few(const AttentionArgs& args) {
    if (args.heads * args.width == 0) return;  // `out` has no elements
    const int64_t chunks = divide_up(args.length, kAttentionChunk);
    const int64_t rows = args.tokens * args.heads, parts = rows * chunks;
    const std::unique_ptr<float[]> scratch(new float[static_cast<size_t>(parts * (args.width + 2))]);
    float* values = scratch.get();
    const AttentionParts scratch_parts{chunks, values, values + parts * args.width, values + parts * (args.width + 1)};
    const Level& at = level();
    const int64_t items = args.kv_heads * chunks;
    const int64_t bytes = 2 * args.kv_heads * args.length * args.width * item_bytes(args.type);
    // Every eighth row of a KV head costs about as much as reading its keys and values.
    const bool alone = bytes * (1 + rows / args.kv_heads / 8) <= kAloneBytes;
    parallel_for([&](int64_t first, int64_t last, int) { at.attention.attend(args, scratch_parts, first, last); },
                 items, alone ? items : items_at_once(items));
    const int64_t row_bytes = chunks * args.width * item_bytes(Type::f32);
    const int64_t few = kAloneBytes / (row_bytes > 0 ? row_bytes : 1) + 1;
    parallel_for([&](int64_t first, int64_t last, int) { at.attention.combine(args, scratch_parts, first, last); },
                 rows, rows <= few ? few : chunk_of(row_bytes));
}

void attention(nb::handle q_, nb::handle k_, nb::handle v_, int64_t length, float scale, nb::handle out_) {
    const char* verb = "attention";
    const Shape q_shape{Axis::tokens(), "H", "hd"};
    const Array q(verb, "q", q_, {Type::f32}, &q_shape);
    const int64_t tokens = q.size(0), heads = q.size(1), width = q.size(2);
    const Shape k_shape{"n_kv", "capacity", width};
    const Array k(verb, "k", k_, {Type::f32, Type::f16}, &k_shape);
    const Shape v_shape{k.size(0), k.size(1), width};
    const Array v(verb, "v", v_, {k.type()}, &v_shape);
    const Shape out_shape{tokens, heads, width};
    const Array out(verb, "out", out_, {Type::f32}, &out_shape, Access::write);
    const int64_t kv_heads = k.size(0), capacity = k.size(1);
    if (kv_heads < 1 || heads % kv_heads)
        raise_value("attention: " + std::to_string(heads) + " query heads, expected a multiple of the " +
                    std::to_string(kv_heads) + " KV heads");
    if (length < tokens || length > capacity)
        raise_value("attention: length is " + std::to_string(length) + ", expected " + std::to_string(tokens) +
                    ".." + std::to_string(capacity));
    const AttentionArgs args{q.data<float>(), k.data<void>(), v.data<void>(), k.type(), tokens, heads,
                             kv_heads,        capacity,       width,          length,   scale,  out.data<float>()};
    const NoGil no_gil;
    if (args.tokens > kMaxBatch)
        attention_prompt(args);
    else
        attention_few(args);
}

}  // namespace

void bind_attention(nb::module_& module) {
    using nb::arg;
    module.def("attention", &attention, arg("q").none(), arg("k").none(), arg("v").none(), arg("length"),
               arg("scale"), arg("out").none());
}

}  // namespace flashd
