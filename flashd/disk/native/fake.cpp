#include "fake.hpp"

#include <sys/prctl.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

namespace flashd::disk {

Fake::Fake(int64_t alignment, const uint8_t* content, int64_t size, nb::object owner, int64_t scratch_bytes,
           int depth, const Faults& faults, const Pace& pace)
    : Core(alignment, 1, scratch_bytes, std::min(depth, 32), depth),
      content_(content),
      size_(size),
      owner_(std::move(owner)),
      depth_(depth),
      faults_(faults),
      pace_(pace),
      random_(faults.seed),
      free_since_(static_cast<size_t>(depth)) {
    const QuietStart quiet;
    thread_ = std::thread([this] { pace_.bytes_per_s > 0 ? run_in_time() : run(); });
}

Fake::~Fake() { close(); }

int Fake::max_in_flight() {
    std::lock_guard<std::mutex> lock(mutex_);
    return max_in_flight_;
}

void Fake::wake(int64_t) {
    std::lock_guard<std::mutex> lock(mutex_);
    work_->notify_all();
}

void Fake::join() {
    if (thread_.joinable()) thread_.join();
}

void Fake::run() {
    begin_thread("flashd-fake");
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        while (static_cast<int>(in_flight_.size()) < depth_) {
            Op* op = take();
            if (!op) break;
            in_flight_.push_back(op);
        }
        max_in_flight_ = std::max(max_in_flight_, static_cast<int>(in_flight_.size()));
        if (in_flight_.empty()) {
            if (closing_ && !waiting()) return;
            work_->wait(lock);
            continue;
        }
        const size_t which = faults_.reorder ? random_() % in_flight_.size() : 0;
        Op* op = in_flight_[which];
        in_flight_.erase(in_flight_.begin() + static_cast<std::ptrdiff_t>(which));
        if (faults_.latency_us > 0) {
            const auto pause = std::chrono::microseconds(random_() % static_cast<uint64_t>(faults_.latency_us + 1));
            lock.unlock();
            std::this_thread::sleep_for(pause);
            lock.lock();
        }
        if (!fill_iov(op)) {
            complete(op, -ENOMEM);
            continue;
        }
        lock.unlock();
        const int64_t result = serve(*op);
        deliver(*op, result);
        lock.lock();
        complete(op, result);
    }
}

// Times are computed, not measured: a thread that wakes up late ends a read late, but no later read starts
// late for it. Between reads it sleeps.
void Fake::run_in_time() {
    begin_thread("flashd-fake");
    prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL);  // else every sleep is 50 us too long
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        start_in_time();
        max_in_flight_ = std::max(max_in_flight_, static_cast<int>(timed_.size()));
        if (timed_.empty()) {
            if (closing_ && !waiting()) return;
            work_->wait(lock);
        } else if (timed_.front().end > std::chrono::steady_clock::now()) {
            work_->wait_until(lock, timed_.front().end);
        } else {
            end_in_time(lock);
        }
    }
}

// Takes what the queue has room for.
void Fake::start_in_time() {
    while (!free_since_.empty()) {
        Op* op = take();
        if (!op) return;
        if (!fill_iov(op)) {
            complete(op, -ENOMEM);
            continue;
        }
        const Time begin = std::max(op->batch->submitted, free_since_.front());
        free_since_.pop_front();
        const double transfer_ns = 1e9 * static_cast<double>(op->length - op->resume) / pace_.bytes_per_s;
        last_byte_ = std::max(begin + std::chrono::nanoseconds(pace_.latency_ns), last_byte_) +
                     std::chrono::nanoseconds(static_cast<int64_t>(transfer_ns));
        timed_.push_back({op, last_byte_});
    }
}

// Ends the read whose time has come.
void Fake::end_in_time(std::unique_lock<std::mutex>& lock) {
    const Timed read = timed_.front();
    timed_.pop_front();
    free_since_.push_back(read.end);
    lock.unlock();
    const int64_t result = serve(*read.op);
    deliver(*read.op, result);
    lock.lock();
    complete(read.op, result);
}

// What a file with O_DIRECT would answer.
int64_t Fake::serve(const Op& op) {
    const int64_t from = op.offset + op.resume;
    if (faults_.einval_first > 0) {
        --faults_.einval_first;
        return -EINVAL;
    }
    int64_t length = 0;
    for (const iovec& place : op.iov) {
        const auto address = reinterpret_cast<uintptr_t>(place.iov_base);
        if ((address | place.iov_len | static_cast<uint64_t>(from)) & static_cast<uint64_t>(alignment_ - 1))
            return -EINVAL;
        length += static_cast<int64_t>(place.iov_len);
    }
    if (chance() < faults_.eio_share) return -EIO;
    int64_t got = std::clamp<int64_t>(size_ - from, 0, length);
    if (got == length && length > alignment_ && chance() < faults_.short_share) {
        const auto blocks = static_cast<uint64_t>((length - 1) / alignment_);
        got = static_cast<int64_t>(1 + random_() % blocks) * alignment_;
    }
    int64_t done = 0;
    for (const iovec& place : op.iov) {
        const int64_t some = std::min(got - done, static_cast<int64_t>(place.iov_len));
        if (some <= 0) break;
        std::memcpy(place.iov_base, content_ + from + done, static_cast<size_t>(some));
        done += some;
    }
    return got;
}

}  // namespace flashd::disk
