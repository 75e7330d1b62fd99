// flashd.disk._native: read engines; flashd/disk/native_engine.py documents and wraps them.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>

#include "fake.hpp"
#include "rows.hpp"
#include "threads.hpp"
#include "uring.hpp"

namespace flashd::disk {
namespace {

using Ints = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Flags = nb::ndarray<const bool, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstBytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

using AnyBytes = nb::ndarray<uint8_t, nb::c_contig, nb::device::cpu>;
using Sums = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Trusted = nb::ndarray<bool, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr double kMaxWaitSeconds = 1e9;
constexpr int64_t kMaxPiece = int64_t{1} << 30;  // the kernel's own limit is just below 2 GiB

int64_t size_of(const Ints& array) { return static_cast<int64_t>(array.shape(0)); }

// What pieces.py promises is checked again: a mistake there must not become a write into foreign memory.
void check(const Core& core, const Ints& file, const Ints& offset, const Ints& first, const Ints& length,
           const Ints& at, const Flags& in_place, const Bytes& dest) {
    const int64_t n = size_of(offset), m = size_of(length), room = static_cast<int64_t>(dest.shape(0));
    if (n < 1 || size_of(file) != n || size_of(first) != n + 1 || static_cast<int64_t>(in_place.shape(0)) != n ||
        size_of(at) != m)
        throw std::invalid_argument("submit: arrays of different length, or no piece");
    if (first(0) != 0 || first(n) != m) throw std::invalid_argument("submit: first does not cover the places");
    for (int64_t p = 0; p < m; ++p)
        if (length(p) < 1 || length(p) > kMaxPiece || at(p) < kSkip ||
            (at(p) != kSkip && at(p) > room - length(p)))
            throw std::invalid_argument("submit: a piece leaves its destination");
    for (int64_t i = 0; i < n; ++i) {
        if (first(i + 1) <= first(i) || offset(i) < 0 || file(i) < 0 || file(i) >= core.n_files())
            throw std::invalid_argument("submit: a piece without places, or of no file");
        int64_t bytes = 0;
        for (int64_t p = first(i); p < first(i + 1); ++p) bytes += length(p);
        if (bytes > (in_place(i) ? kMaxPiece : core.scratch_limit()))
            throw std::invalid_argument("submit: a piece is too long");
    }
}

uint64_t submit(Core& core, Ints file, Ints offset, Ints first, Ints length, Ints at,
                Flags in_place, Bytes dest, bool prefetch, bool ticket) {
    check(core, file, offset, first, length, at, in_place, dest);
    auto batch = std::make_unique<Batch>();
    batch->prefetch = prefetch;
    batch->ticket = ticket;
    batch->count = size_of(offset);
    batch->file = file.data();
    batch->offset = offset.data();
    batch->first = first.data();
    batch->length = length.data();
    batch->at = at.data();
    batch->in_place = reinterpret_cast<const uint8_t*>(in_place.data());
    batch->dest = dest.data();
    batch->owners = nb::make_tuple(file, offset, first, length, at, in_place, dest);
    return core.submit(std::move(batch));
}

uint64_t submit_rows(Core& core, int64_t file, int64_t offset, int64_t stride, Ints ids, Ints rows, AnyBytes dest,
                     int64_t limit, int64_t max_gap, int64_t max_run, bool prefetch, bool ticket,
                     std::optional<Sums> sums, std::optional<Trusted> trusted, int64_t check_start,
                     int64_t check_count) {
    if (file < 0 || file >= core.n_files() || size_of(ids) != size_of(rows) || size_of(ids) < 1)
        throw std::invalid_argument("submit_rows: no such file, or not one row for each id");
    RowRequest want;
    want.ids = ids.data();
    want.rows = rows.data();
    want.count = size_of(ids);
    want.limit = limit;
    want.file = file;
    want.offset = offset;
    want.stride = stride;
    want.max_gap = max_gap;
    want.max_run = max_run;
    want.dest = dest.data();
    want.dest_rows = stride < 1 ? 0 : static_cast<int64_t>(dest.size()) / stride;
    if (sums && trusted) {
        if (static_cast<int64_t>(sums->shape(0)) < limit || static_cast<int64_t>(trusted->shape(0)) < limit ||
            check_start < 0 || check_count < 0)
            throw std::invalid_argument("submit_rows: not one checksum for each row, or no sample");
        want.check.sums = sums->data();
        want.check.trusted = reinterpret_cast<uint8_t*>(trusted->data());
        want.check.start = check_start;
        want.check.count = check_count;
    }
    auto batch = plan_rows(want);
    batch->prefetch = prefetch;
    batch->ticket = ticket;
    batch->owners = nb::make_tuple(dest, sums, trusted);
    return core.submit(std::move(batch));
}

nb::tuple told(const Done& done) {
    const char* end = done.end == End::failed      ? "failed"
                      : done.end == End::truncated ? "truncated"
                      : done.end == End::dropped   ? "dropped"
                                                   : "ok";
    return nb::make_tuple(done.id, end, done.error, done.file, done.offset, done.length);
}

nb::list completed(Core& core) {
    nb::list result;
    for (const Done& done : core.completed()) result.append(told(done));
    return result;
}

nb::object wait(Core& core, uint64_t batch, double timeout_s) {
    Done done{};
    const auto timeout_ns = static_cast<int64_t>(std::clamp(timeout_s, 0.0, kMaxWaitSeconds) * 1e9);
    if (!core.wait(batch, timeout_ns, &done)) return nb::none();
    const Checked& c = done.checked;
    return nb::make_tuple(told(done), nb::make_tuple(c.rows, c.untrusted, c.wrong, c.first_wrong, c.time_ns));
}

nb::dict stats(Core& core) {
    const Stats s = core.stats();
    nb::dict result;
    result["reads"] = s.reads;
    result["bytes_read"] = s.bytes_read;
    result["scratch_reads"] = s.scratch_reads;
    result["registered_reads"] = s.registered_reads;
    result["continued"] = s.continued;
    result["retried"] = s.retried;
    result["dropped"] = s.dropped;
    return result;
}

}  // namespace
}  // namespace flashd::disk

NB_MODULE(_native, module) {
    using namespace flashd::disk;
    using nb::arg;
    // An engine that nobody closed before the interpreter ends is no error: its owner may be frozen
    // (gc.freeze), and the process takes the ring with it.
    nb::set_leak_warnings(false);
    module.doc() = "Native read engines; flashd.disk.native_engine documents them.";
    nb::register_exception_translator([](const std::exception_ptr& p, void*) {
        try {
            std::rethrow_exception(p);
        } catch (const std::system_error& error) {
            PyErr_SetObject(PyExc_OSError, nb::make_tuple(error.code().value(), error.code().message()).ptr());
        }
    });

    nb::class_<Core>(module, "Core")
        .def("submit", &submit, arg("file"), arg("offset"), arg("first"), arg("length"),
             arg("at"), arg("in_place"), arg("dest"), arg("prefetch"), arg("ticket"))
        .def("submit_rows", &submit_rows, arg("file"), arg("offset"), arg("stride"), arg("ids"), arg("rows"),
             arg("dest").noconvert(), arg("limit"), arg("max_gap"), arg("max_run"), arg("prefetch"), arg("ticket"),
             arg("sums").none() = nb::none(), arg("trusted").noconvert().none() = nb::none(), arg("check_start") = 0,
             arg("check_count") = 0)
        .def("cancel", &Core::cancel, arg("batch"))
        .def("completed", &completed)
        .def("wait", &wait, arg("batch"), arg("timeout_s"))
        .def("tickets", &Core::tickets)
        .def("busy_ns", &Core::busy_ns)
        .def("fileno", &Core::event_fd)
        .def("set_file", &Core::set_file, arg("index"), arg("fd"))
        .def("stats", &stats)
        .def("touches",
             [](Core& self, Bytes memory) { return self.touches(memory.data(), static_cast<int64_t>(memory.shape(0))); })
        .def("close", &Core::close);
    nb::class_<Uring, Core>(module, "Uring")
        .def(nb::init<int64_t, int64_t, int64_t, int>(), arg("alignment"), arg("n_files"), arg("scratch_bytes"),
             arg("depth"))
        .def("register_memory",
             [](Uring& self, Bytes memory) { return self.register_memory(memory.data(), memory.shape(0)); })
        .def("unregister_memory",
             [](Uring& self, Bytes memory) { return self.unregister_memory(memory.data(), memory.shape(0)); });
    nb::class_<Threads, Core>(module, "Threads")
        .def(nb::init<int64_t, int64_t, int64_t, int>(), arg("alignment"), arg("n_files"), arg("scratch_bytes"),
             arg("depth"));
    nb::class_<Fake, Core>(module, "Fake")
        .def(
            "__init__",
            [](Fake* self, int64_t alignment, ConstBytes content, int64_t scratch_bytes, int depth, uint64_t seed,
               double short_share, double eio_share, int einval_first, int64_t latency_us, bool reorder,
               int64_t fixed_latency_ns, double bytes_per_s) {
                new (self) Fake(alignment, content.data(), static_cast<int64_t>(content.shape(0)),
                                nb::cast(content), scratch_bytes, depth,
                                Faults{seed, short_share, eio_share, einval_first, latency_us, reorder},
                                Pace{fixed_latency_ns, bytes_per_s});
            },
            arg("alignment"), arg("content"), arg("scratch_bytes"), arg("depth"), arg("seed"), arg("short_share"),
            arg("eio_share"), arg("einval_first"), arg("latency_us"), arg("reorder"),
            arg("fixed_latency_ns"), arg("bytes_per_s"))
        .def("max_in_flight", &Fake::max_in_flight);
}
