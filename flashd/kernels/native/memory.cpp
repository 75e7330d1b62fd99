// The verb read_all.
#include <atomic>
#include <cstring>

#include "pool.hpp"
#include "verbs.hpp"

namespace flashd {
namespace {

uint64_t read_all(nb::handle memory_) {
    const Shape shape{"n"};
    const Array memory("read_all", "memory", memory_, {Type::u8}, &shape);
    const uint8_t* bytes = memory.data<uint8_t>();
    const int64_t n = memory.size(0);
    const NoGil no_gil;
    // Words start where the memory does, aligned or not: their values depend on it.
    uint64_t tail = 0;
    if (n % 8) std::memcpy(&tail, bytes + n / 8 * 8, static_cast<size_t>(n % 8));
    std::atomic<uint64_t> total{tail};
    const Level& at = level();
    const auto words = [&](int64_t first, int64_t last, int) {
        total.fetch_xor(at.rows.xor_words(bytes, first, last), std::memory_order_relaxed);
    };
    parallel_for(words, n / 8, kChunkBytes / 8);
    return total.load();
}

}  // namespace

void bind_memory(nb::module_& module) {
    using nb::arg;
    module.def("read_all", &read_all, arg("memory").none());
}

}  // namespace flashd
