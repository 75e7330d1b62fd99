#include "pool.hpp"

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace flashd {
namespace {

// Long enough to bridge the Python code between two verbs, short enough to leave the cores to I/O.
constexpr auto kSpin = std::chrono::microseconds(40);
constexpr int64_t kMostChunks = 8;  // that a thread takes at once

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// True as soon as `ready()` is, false after kSpin.
template <class Ready>
bool spin_until(Ready ready) {
    const auto end = std::chrono::steady_clock::now() + kSpin;
    do {
        for (int i = 0; i < 64; ++i) {
            if (ready()) return true;
            relax();
        }
    } while (std::chrono::steady_clock::now() < end);
    return false;
}

// How the processor rounds and whether it flushes denormal numbers: a thread has the mode that its creator
// had then, and results must not depend on which thread computes them.
#if defined(__x86_64__)
using FloatMode = unsigned;
inline FloatMode float_mode() { return __builtin_ia32_stmxcsr(); }
inline void set_float_mode(FloatMode mode) { __builtin_ia32_ldmxcsr(mode); }
#elif defined(__aarch64__)
using FloatMode = uint64_t;
inline FloatMode float_mode() {
    FloatMode mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
}
inline void set_float_mode(FloatMode mode) { asm volatile("msr fpcr, %0" : : "r"(mode)); }
#else
using FloatMode = int;
inline FloatMode float_mode() { return 0; }
inline void set_float_mode(FloatMode) {}
#endif

struct Job {
    Task task = nullptr;
    const void* context = nullptr;
    int64_t count = 0;
    int64_t chunk = 1;
    int threads = 1;
    FloatMode mode = float_mode();
};

// What a thread takes next of what is left: much at first, because every start costs the hardware's
// prefetchers a few misses, and single chunks towards the end, so that all threads end together.
inline int64_t next_piece(const Job& job, int64_t left) {
    const int64_t share = left / job.chunk / (4 * job.threads);
    return job.chunk * (share < 1 ? 1 : share < kMostChunks ? share : kMostChunks);
}

// The caller publishes a job, works on it too, closes it, and waits for the workers that joined. A
// worker that wakes late finds the job closed: nobody ever waits for a sleeping thread to wake up.
class Pool {
public:
    void run(const Job& job, int threads) {
        std::unique_lock<std::mutex> owner(owner_, std::try_to_lock);
        if (!owner.owns_lock()) {  // another thread's verb is on the pool
            job.task(job.context, 0, job.count, 0);
            return;
        }
        resize(threads - 1);
        {
            std::lock_guard<std::mutex> lock(mutex_);
            job_ = job;
            next_.store(0, std::memory_order_relaxed);
            open_ = true;
            generation_.fetch_add(1, std::memory_order_release);
        }
        wake_.notify_all();
        work(job, 0);
        std::unique_lock<std::mutex> lock(mutex_);
        open_ = false;
        lock.unlock();
        if (spin_until([&] { return active_.load(std::memory_order_acquire) == 0; })) return;
        lock.lock();
        idle_.wait(lock, [&] { return active_.load(std::memory_order_acquire) == 0; });
    }

    void rest() { rests_.fetch_add(1, std::memory_order_relaxed); }

private:
    void work(const Job& job, int worker) {
        for (;;) {
            int64_t first = next_.load(std::memory_order_relaxed), last;
            do {
                if (first >= job.count) return;
                last = first + next_piece(job, job.count - first);
            } while (!next_.compare_exchange_weak(first, last, std::memory_order_relaxed));
            job.task(job.context, first, last < job.count ? last : job.count, worker);
        }
    }

    void serve(int worker, uint64_t seen) {
        pthread_setname_np(pthread_self(), "flashd-kernel");
        for (;;) {
            const uint64_t rests = rests_.load(std::memory_order_relaxed);
            spin_until([&] {
                return generation_.load(std::memory_order_acquire) != seen ||
                       rests_.load(std::memory_order_relaxed) != rests;
            });
            std::unique_lock<std::mutex> lock(mutex_);
            wake_.wait(lock, [&] { return generation_.load(std::memory_order_relaxed) != seen; });
            seen = generation_.load(std::memory_order_relaxed);
            if (stop_) return;
            if (!open_) continue;
            const Job job = job_;
            active_.fetch_add(1, std::memory_order_relaxed);
            lock.unlock();
            set_float_mode(job.mode);
            work(job, worker);
            // Under the lock, so that the notification cannot fall between the owner's test and its wait.
            lock.lock();
            if (active_.fetch_sub(1, std::memory_order_release) == 1) idle_.notify_one();
        }
    }

    // Only the owner calls this, so no job is running.
    void resize(int workers) {
        if (workers == wanted_) return;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stop_ = true;
            generation_.fetch_add(1, std::memory_order_release);
        }
        wake_.notify_all();
        for (std::thread& thread : threads_) thread.join();
        threads_.clear();
        stop_ = false;
        wanted_ = workers;
        // Signals belong to Python's main thread.
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        try {
            threads_.reserve(static_cast<size_t>(workers));
            for (int i = 0; i < workers; ++i)
                threads_.emplace_back(&Pool::serve, this, i + 1, generation_.load(std::memory_order_relaxed));
        } catch (const std::exception&) {
            // No more threads to be had here: fewer do the same work.
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    std::mutex owner_;
    std::mutex mutex_;
    std::condition_variable wake_, idle_;
    std::vector<std::thread> threads_;
    int wanted_ = 0;
    Job job_;
    bool open_ = false, stop_ = false;
    std::atomic<uint64_t> generation_{0}, rests_{0};
    std::atomic<int64_t> next_{0};
    std::atomic<int> active_{0};
};

std::atomic<int> g_threads{1};
// Never destroyed: at exit the workers may sleep in it until the process is gone.
std::atomic<Pool*> g_pool{nullptr};

// Threads do not survive a fork, and a mutex may have been held: the child starts over.
const int g_fork_handler = pthread_atfork(nullptr, nullptr, [] { g_pool.store(nullptr); });

Pool& pool() {
    Pool* current = g_pool.load(std::memory_order_acquire);
    if (current) return *current;
    Pool* fresh = new Pool;
    if (g_pool.compare_exchange_strong(current, fresh)) return *fresh;
    delete fresh;
    return *current;
}

}  // namespace

int thread_count() { return g_threads.load(); }

void set_thread_count(int count) { g_threads.store(count); }

void rest() {
    if (Pool* current = g_pool.load(std::memory_order_acquire)) current->rest();
}

void parallel_for(Task task, const void* context, int64_t count, int64_t chunk, int workers) {
    if (count <= 0) return;
    if (workers <= 1 || count <= chunk) {
        task(context, 0, count, 0);
        return;
    }
    pool().run(Job{task, context, count, chunk, workers}, workers);
}

}  // namespace flashd
