// Reads with preadv on threads: for kernels and containers without io_uring.
#pragma once

#include <thread>
#include <vector>

#include "core.hpp"

namespace flashd::disk {

class Threads final : public Core {
public:
    Threads(int64_t alignment, int64_t n_files, int64_t scratch_bytes, int n_threads);
    ~Threads() override;

protected:
    void wake(int64_t reads) override;
    void join() override;
    void abandon() override;

private:
    void start();
    void work();

    int n_threads_;
    int retiring_ = 0;
    Condition work_;
    std::vector<std::thread> threads_;
};

}  // namespace flashd::disk
