// The verbs to_f32, from_f32, append_kv and crc32c.
#include <algorithm>

#include "pool.hpp"
#include "verbs.hpp"

namespace flashd {
namespace {

// Less is summed before other threads have woken up; they had better go on computing.
constexpr int64_t kSerialCrcBytes = 1 << 20;

void crc32c(nb::handle rows_, nb::handle out_, nb::handle index_) {
    const Shape rows_shape{"n", "stride"};
    const Array rows("crc32c", "rows", rows_, {Type::u8}, &rows_shape);
    RowArgs args{};
    args.n = rows.size(0);
    const Numbers index = row_index("crc32c", index_, args);
    const Shape out_shape{args.count};
    const Array out("crc32c", "out", out_, {Type::u32}, &out_shape, Access::write);
    const int64_t stride = rows.size(1);
    const uint8_t* start = rows.data<uint8_t>();
    uint32_t* sums = out.data<uint32_t>();
    const NoGil no_gil;
    const bool hardware = level().hardware_crc && has_crc32c_instruction();
    // A multiple of the three rows that run interleaved.
    parallel_for(
        [&](int64_t first, int64_t last, int) {
            crc32c_rows(start, stride, args.index, first, last, sums, hardware);
        },
        args.count, (chunk_of(stride) + 2) / 3 * 3, args.count * stride < kSerialCrcBytes ? 1 : thread_count());
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
    const NoGil no_gil;
    const Level& at = level();
    parallel_for([&](int64_t first, int64_t last, int) { at.convert.to_f32(args, first, last); }, src.elements(),
                 kConvertChunk);
}

void from_f32(nb::handle src_, nb::handle out_) {
    const Array src("from_f32", "src", src_, {Type::f32}, nullptr);
    const Array out("from_f32", "out", out_, {Type::f32, Type::f16, Type::bf16}, nullptr, Access::write);
    check_same_shape("from_f32", out, src);
    const ConvertArgs args{src.data<void>(), out.data<void>(), out.type()};
    const NoGil no_gil;
    const Level& at = level();
    parallel_for([&](int64_t first, int64_t last, int) { at.convert.from_f32(args, first, last); }, src.elements(),
                 kConvertChunk);
}

void append_kv(nb::handle k_, nb::handle v_, nb::handle out_, int64_t position) {
    const Shape fresh{Axis::tokens(), "heads", "d_head"};
    const Array k("append_kv", "k", k_, {Type::f32}, &fresh);
    const int64_t tokens = k.size(0), heads = k.size(1), d_head = k.size(2);
    const Shape same{tokens, heads, d_head};
    const Array v("append_kv", "v", v_, {Type::f32}, &same);
    const Shape cache{2, heads, "capacity", d_head};
    const Array out("append_kv", "out", out_, {Type::f32, Type::f16}, &cache, Access::write);
    const int64_t capacity = out.size(2);
    if (position < 0 || position > capacity - tokens)
        raise_value("append_kv: position is " + std::to_string(position) + ", expected 0.." +
                    std::to_string(capacity - tokens));
    const int64_t item = item_bytes(out.type());
    const NoGil no_gil;
    const Level& at = level();
    const auto of_heads = [&](int64_t first, int64_t last, int) {
        for (int64_t h = first; h < last; ++h) {
            const float* from = h < heads ? k.data<float>() + h * d_head : v.data<float>() + (h - heads) * d_head;
            uint8_t* to = out.data<uint8_t>() + (h * capacity + position) * d_head * item;
            for (int64_t t = 0; t < tokens; ++t)
                at.convert.from_f32({from + t * heads * d_head, to + t * d_head * item, out.type()}, 0, d_head);
        }
    };
    parallel_for(of_heads, 2 * heads, std::max<int64_t>(1, kConvertChunk / std::max<int64_t>(1, tokens * d_head)));
}

}  // namespace

void bind_convert(nb::module_& module) {
    using nb::arg;
    module.def("crc32c", &crc32c, arg("rows").none(), arg("out").none(), arg("index").none() = nb::none());
    module.def("to_f32", &to_f32, arg("src").none(), arg("out").none());
    module.def("from_f32", &from_f32, arg("src").none(), arg("out").none());
    module.def("append_kv", &append_kv, arg("k").none(), arg("v").none(), arg("out").none(), arg("position"));
}

}  // namespace flashd
