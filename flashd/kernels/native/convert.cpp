// The verbs to_f32, from_f32 and crc32c.
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

}  // namespace

void bind_convert(nb::module_& module) {
    using nb::arg;
    module.def("crc32c", &crc32c, arg("rows").none(), arg("out").none(), arg("index").none() = nb::none());
    module.def("to_f32", &to_f32, arg("src").none(), arg("out").none());
    module.def("from_f32", &from_f32, arg("src").none(), arg("out").none());
}

}  // namespace flashd
