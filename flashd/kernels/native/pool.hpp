// The thread pool of the kernels: started on first use, shared by all verbs, safe to fork.
#pragma once

#include <cstdint>

namespace flashd {

constexpr int kMaxThreads = 256;

int thread_count();
void set_thread_count(int count);  // starts nothing; the next parallel_for applies it
void rest();  // threads that look out for work without sleeping go to sleep

// A task works on [first, last); `worker` is in [0, workers), different for concurrent calls.
using Task = void (*)(const void* context, int64_t first, int64_t last, int worker);

// Run `task` over [0, count) in pieces that `workers` threads take as they become free: whole chunks,
// several at once while there are many left. Chunks must be independent. Runs on the calling thread alone
// when there is one chunk, or when another thread is using the pool. Call it without the GIL.
void parallel_for(Task task, const void* context, int64_t count, int64_t chunk, int workers);

// The same for a callable: fn(first, last, worker).
template <class Function>
void parallel_for(const Function& fn, int64_t count, int64_t chunk, int workers = thread_count()) {
    const Task task = [](const void* context, int64_t first, int64_t last, int worker) {
        (*static_cast<const Function*>(context))(first, last, worker);
    };
    parallel_for(task, &fn, count, chunk, workers);
}

}  // namespace flashd
