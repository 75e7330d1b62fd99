// flashd.kernels._native: the verbs of flashd/kernels/twin.py, which documents them.
#include <nanobind/nanobind.h>

#include <atomic>
#include <memory>
#include <vector>

#include "arguments.hpp"
#include "level.hpp"
#include "pool.hpp"

namespace flashd {
namespace {

// What one thread takes at a time: some microseconds of memory traffic, so that a thread which lost
// its core to I/O holds up nobody for long.
constexpr int64_t kChunkBytes = 32 << 10;
constexpr int64_t kMinDownColumns = 256;

std::vector<const Level*> levels() {
    std::vector<const Level*> result;
    for (const Level* level : {avx512_level(), avx2_level(), neon_level(), portable_level()})
        if (level) result.push_back(level);
    return result;
}

std::atomic<const Level*> g_level{levels().front()};

const Level& level() { return *g_level.load(std::memory_order_relaxed); }

int64_t chunk_of(int64_t bytes_per_item) {
    return bytes_per_item > 0 && bytes_per_item < kChunkBytes ? kChunkBytes / bytes_per_item : 1;
}

void gemv(nb::handle w_, nb::handle x_, nb::handle out_, nb::handle bias_) {
    const Shape w_shape{"n", "k"};
    const Array w("gemv", "w", w_, {Type::f32, Type::f16, Type::bf16}, &w_shape);
    const Shape x_shape{Axis::batch(), w.size(1)};
    const Array x("gemv", "x", x_, {Type::f32}, &x_shape);
    const Shape out_shape{x.size(0), w.size(0)};
    const Array out("gemv", "out", out_, {Type::f32}, &out_shape, Access::write);
    const Array bias = Array::optional("gemv", "bias", bias_, {Type::f32}, {w.size(0)});
    const GemvArgs args{w.data<void>(),     w.type(),  x.data<float>(), out.data<float>(),
                        bias.data<float>(), w.size(0), w.size(1),       x.size(0)};
    const nb::gil_scoped_release no_gil;
    const Level& at = level();
    parallel_for([&](int64_t first, int64_t last, int) { at.gemv(args, first, last); }, args.n,
                 chunk_of(args.k * item_bytes(args.type)));
}

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
    parallel_for([&](int64_t first, int64_t last, int) { at.ffn_dots(args, first, last); }, args.n,
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
    parallel_for([&](int64_t first, int64_t last, int) { at.ffn_down(args, first, last); }, d,
                 share > kMinDownColumns ? share : kMinDownColumns, workers);
}

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
        at.attention(args, first, last, scores.get() + worker * scratch);
    };
    parallel_for(heads_of, heads, chunk, workers);
}

// Less is summed before other threads have woken up; they had better go on computing.
constexpr int64_t kSerialCrcBytes = 1 << 20;

void crc32c(nb::handle rows_, nb::handle out_) {
    const Shape rows_shape{"n", "stride"};
    const Array rows("crc32c", "rows", rows_, {Type::u8}, &rows_shape);
    const Shape out_shape{rows.size(0)};
    const Array out("crc32c", "out", out_, {Type::u32}, &out_shape, Access::write);
    const int64_t stride = rows.size(1);
    const nb::gil_scoped_release no_gil;
    const bool hardware = level().hardware_crc && has_crc32c_instruction();
    // A multiple of the three rows that run interleaved.
    parallel_for(
        [&](int64_t first, int64_t last, int) {
            crc32c_rows(rows.data<uint8_t>() + first * stride, stride, last - first, out.data<uint32_t>() + first,
                        hardware);
        },
        rows.size(0), (chunk_of(stride) + 2) / 3 * 3, rows.size(0) * stride < kSerialCrcBytes ? 1 : thread_count());
}

// Elements behind which a conversion is worth a second thread.
constexpr int64_t kConvertChunk = 16 << 10;

void check_same_shape(const char* verb, const Array& out, const Array& src) {
    if (!out.same_shape(src))
        raise_value(std::string(verb) + ": out has shape " + text(out.object().attr("shape")) + ", expected " +
                    text(src.object().attr("shape")));
}

void to_f32(nb::handle src_, nb::handle out_) {
    const Array src("to_f32", "src", src_, {Type::f32, Type::f16, Type::bf16}, nullptr);
    const Array out("to_f32", "out", out_, {Type::f32}, nullptr, Access::write);
    check_same_shape("to_f32", out, src);
    const ConvertArgs args{src.data<void>(), out.data<void>(), src.type()};
    const nb::gil_scoped_release no_gil;
    const Level& at = level();
    parallel_for([&](int64_t first, int64_t last, int) { at.to_f32(args, first, last); }, src.elements(),
                 kConvertChunk);
}

void from_f32(nb::handle src_, nb::handle out_) {
    const Array src("from_f32", "src", src_, {Type::f32}, nullptr);
    const Array out("from_f32", "out", out_, {Type::f32, Type::f16, Type::bf16}, nullptr, Access::write);
    check_same_shape("from_f32", out, src);
    const ConvertArgs args{src.data<void>(), out.data<void>(), out.type()};
    const nb::gil_scoped_release no_gil;
    const Level& at = level();
    parallel_for([&](int64_t first, int64_t last, int) { at.from_f32(args, first, last); }, src.elements(),
                 kConvertChunk);
}

void set_threads(int64_t n) {
    if (n < 1 || n > kMaxThreads)
        raise_value("set_threads: n is " + std::to_string(n) + ", expected 1.." + std::to_string(kMaxThreads));
    set_thread_count(static_cast<int>(n));
}

nb::tuple available_simd() {
    nb::list names;
    for (const Level* candidate : levels()) names.append(candidate->name);
    return nb::tuple(names);
}

void set_simd(const std::string& name) {
    std::string known;
    for (const Level* candidate : levels()) {
        if (name == candidate->name) {
            g_level.store(candidate);
            return;
        }
        known += (known.empty() ? "" : " or ") + std::string(candidate->name);
    }
    raise_value("SIMD level '" + name + "' is unknown, or this processor lacks it; expected " + known);
}

}  // namespace
}  // namespace flashd

NB_MODULE(_native, module) {
    using namespace flashd;
    using nb::arg;
    import_numpy();
    module.doc() = "Native kernels; flashd.kernels documents them.";
    module.def("gemv", &gemv, arg("w").none(), arg("x").none(), arg("out").none(), arg("bias").none() = nb::none());
    module.def("ffn_dots", &ffn_dots, arg("rows").none(), arg("dtype"), arg("d"), arg("gated"), arg("activation"),
               arg("x").none(), arg("out").none(), arg("up_bias").none() = nb::none(),
               arg("gate_bias").none() = nb::none());
    module.def("ffn_down", &ffn_down, arg("rows").none(), arg("dtype"), arg("d"), arg("gated"), arg("h").none(),
               arg("acc").none());
    module.def("attention", &attention, arg("q").none(), arg("k").none(), arg("v").none(), arg("length"),
               arg("scale"), arg("out").none());
    module.def("crc32c", &crc32c, arg("rows").none(), arg("out").none());
    module.def("to_f32", &to_f32, arg("src").none(), arg("out").none());
    module.def("from_f32", &from_f32, arg("src").none(), arg("out").none());
    module.def("set_threads", &set_threads, arg("n"));
    module.def("threads", &thread_count);
    module.def("simd_level", [] { return level().name; });
    module.def("available_simd", &available_simd);
    module.def("set_simd", &set_simd, arg("level"));
}
