// A device made of memory, that misbehaves on purpose or keeps exact time: what the code around it does
// with late, short, reordered and failing reads is the code of the real engines.
#pragma once

#include <chrono>
#include <deque>
#include <random>
#include <thread>
#include <vector>

#include "core.hpp"

namespace flashd::disk {

struct Faults {
    uint64_t seed = 0;
    double short_share = 0;    // reads that deliver less than asked for
    double eio_share = 0;      // reads that fail with EIO
    int einval_first = 0;      // so many reads fail with EINVAL before the first that works
    int64_t latency_us = 0;    // at most; each read takes some random part of it
    bool reorder = true;       // of the reads in flight any may end next
};

// A device that takes time as told: every read waits for `latency` beside the others in flight, then its bytes
// pass one after another. Off where `bytes_per_s` is 0.
struct Pace {
    int64_t latency_ns = 0;
    double bytes_per_s = 0;
};

class Fake final : public Core {
public:
    Fake(int64_t alignment, const uint8_t* content, int64_t size, nb::object owner, int64_t scratch_bytes,
         int depth, const Faults& faults, const Pace& pace);
    ~Fake() override;
    int max_in_flight();

protected:
    void wake(int64_t reads) override;
    void join() override;
    void abandon() override {
        leak(thread_);
        work_.leak();
    }

private:
    using Time = std::chrono::steady_clock::time_point;
    struct Timed {
        Op* op;
        Time end;
    };

    void run();
    void run_in_time();
    void start_in_time();
    void end_in_time(std::unique_lock<std::mutex>& lock);
    int64_t serve(const Op& op);
    double chance() { return std::uniform_real_distribution<>(0, 1)(random_); }

    const uint8_t* content_;
    const int64_t size_;
    nb::object owner_;
    const int depth_;
    Faults faults_;
    const Pace pace_;
    std::mt19937_64 random_;
    std::vector<Op*> in_flight_;
    std::deque<Timed> timed_;     // in flight, in the order in which they end
    std::deque<Time> free_since_;  // places of the queue that nothing is in, the longest free one first
    Time last_byte_{};             // of all reads so far
    int max_in_flight_ = 0;
    Condition work_;
    std::thread thread_;
};

}  // namespace flashd::disk
