// Batches that a thread waits for by itself, without the event loop.
#include <stdexcept>

#include "core.hpp"

namespace flashd::disk {

bool Core::wait(uint64_t id, int64_t timeout_ns, Done* done) {
    std::unique_ptr<Batch> batch;  // gone where the GIL is held: it refers to memory
    {
        const nb::gil_scoped_release no_gil;
        std::unique_lock<std::mutex> lock(mutex_);
        const auto open = batches_.find(id);
        if (open != batches_.end() && open->second->ticket) {
            if (timeout_ns <= 0) return false;
            open->second->awaited = true;
            const auto over = [&] { return done_tickets_.count(id) > 0; };
            if (!ticket_done_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), over)) return false;
        }
        const auto found = done_tickets_.find(id);
        if (found == done_tickets_.end()) throw std::invalid_argument("wait: no such ticket");
        batch = std::move(found->second);
        done_tickets_.erase(found);
    }
    *done = {batch->id, batch->end, batch->error, batch->error_file, batch->error_offset, batch->error_length, batch->checked};
    return true;
}

int64_t Core::tickets() {
    std::lock_guard<std::mutex> lock(mutex_);
    return tickets_;
}

int64_t Core::busy_ns() {
    std::lock_guard<std::mutex> lock(mutex_);
    auto busy = busy_;
    if (!batches_.empty()) busy += std::chrono::steady_clock::now() - busy_since_;
    return busy.count();
}

}  // namespace flashd::disk
