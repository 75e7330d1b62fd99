#include "threads.hpp"

#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

namespace flashd::disk {

Threads::Threads(int64_t alignment, int64_t n_files, int64_t scratch_bytes, int n_threads)
    : Core(alignment, n_files, scratch_bytes, n_threads, n_threads), n_threads_(n_threads) {
    start();  // at least one, or there is no use in going on
}

Threads::~Threads() { close(); }

void Threads::wake(int64_t reads) {
    // The others start with the first batch: a tool that only opens a file needs none.
    std::lock_guard<std::mutex> lock(mutex_);
    while (!closing_ && static_cast<int>(threads_.size()) < n_threads_) {
        try {
            start();
        } catch (const std::system_error&) {
            // A process limit: fewer do it too, and the rest of the program needs some.
            n_threads_ = static_cast<int>(threads_.size());
            retiring_ = std::min(8, n_threads_ - 1);
        }
    }
    if (reads >= n_threads_) {
        work_->notify_all();
    } else {
        for (int64_t read = 0; read < reads; ++read) work_->notify_one();
    }
}

void Threads::start() {
    const QuietStart quiet;
    threads_.emplace_back([this] { work(); });
}

void Threads::join() {
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
}

void Threads::abandon() {
    for (std::thread& thread : threads_) leak(thread);
    threads_.clear();
    work_.leak();
}

void Threads::work() {
    begin_thread("flashd-read");
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        Op* op = take();
        if (!op) {
            if (closing_ && !waiting()) return;
            if (retiring_ > 0) {
                --retiring_;
                return;
            }
            work_->wait(lock);
            continue;
        }
        if (!fill_iov(op)) {
            complete(op, -ENOMEM);
            continue;
        }
        const int fd = fds_[static_cast<size_t>(op->batch->file[op->piece])];
        lock.unlock();
        ssize_t got;
        do {
            got = preadv(fd, op->iov.data(), static_cast<int>(op->iov.size()),
                         static_cast<off_t>(op->offset + op->resume));
        } while (got < 0 && errno == EINTR);
        const int64_t result = got < 0 ? -errno : got;
        deliver(*op, result);
        lock.lock();
        complete(op, result);
    }
}

}  // namespace flashd::disk
