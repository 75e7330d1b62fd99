// Which SIMD level and how many threads the verbs use.
#include <atomic>
#include <vector>

#include "pool.hpp"
#include "verbs.hpp"

namespace flashd {
namespace {

std::vector<const Level*> levels() {
    std::vector<const Level*> result;
    for (const Level* level : {avx512_level(), avx2_level(), neon_level(), portable_level()})
        if (level) result.push_back(level);
    return result;
}

std::atomic<const Level*> g_level{levels().front()};

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

const Level& level() { return *g_level.load(std::memory_order_relaxed); }

int64_t chunk_of(int64_t bytes_per_item) {
    return bytes_per_item > 0 && bytes_per_item < kChunkBytes ? kChunkBytes / bytes_per_item : 1;
}

void bind_level(nb::module_& module) {
    using nb::arg;
    module.def("set_threads", &set_threads, arg("n"));
    module.def("threads", &thread_count);
    module.def("rest", &rest);
    module.def("simd_level", [] { return level().name; });
    module.def("available_simd", &available_simd);
    module.def("set_simd", &set_simd, arg("level"));
}

}  // namespace flashd
