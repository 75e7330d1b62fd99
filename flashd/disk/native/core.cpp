#include "core.hpp"

#include <pthread.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>
#include <system_error>

namespace flashd::disk {
namespace {

// Bytes that nobody wants land here; longer gaps use it several times.
constexpr int64_t kTrashBytes = 64 << 10;

// Reading threads run for some microseconds at a time, between kernels that take every CPU for milliseconds.
// Who asks for short slices (Linux 6.12) gets the CPU sooner after it has woken, and no more of it.
constexpr uint64_t kSliceNs = 100'000;

// Null without memory.
uint8_t* aligned(int64_t alignment, int64_t nbytes) {
    void* memory = nullptr;
    const size_t to = static_cast<size_t>(std::max<int64_t>(alignment, 4096));
    if (posix_memalign(&memory, to, static_cast<size_t>((nbytes + 4095) / 4096 * 4096)) != 0) return nullptr;
    return static_cast<uint8_t*>(memory);
}

}  // namespace

Core::Core(int64_t alignment, int64_t n_files, int64_t scratch_bytes, int max_scratch, int depth)
    : alignment_(alignment),
      fds_(static_cast<size_t>(n_files), -1),
      scratch_bytes_(scratch_bytes),
      max_scratch_(max_scratch),
      pid_(getpid()) {
    // Whoever reads should not have to ask for memory. These are all the reads there can be: as many
    // prefetches as were in flight may wait for another try while demand reads take their place.
    for (int i = 0; i < 2 * depth; ++i) {
        ops_.push_back(std::make_unique<Op>());
        ops_.back()->iov.reserve(1);
        free_ops_.push_back(ops_.back().get());
    }
    free_scratch_.reserve(static_cast<size_t>(max_scratch));
    trash_ = aligned(alignment, kTrashBytes);
    if (!trash_) throw std::bad_alloc();
    event_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (event_fd_ < 0) {
        const int error = errno;
        std::free(trash_);
        throw std::system_error(error, std::generic_category(), "eventfd");
    }
}

Core::~Core() {
    for (uint8_t* memory : free_scratch_) std::free(memory);
    std::free(trash_);
    if (event_fd_ >= 0) ::close(event_fd_);
}

void Core::close() {
    if (getpid() != pid_) {
        if (!joined_) abandon();
        joined_ = true;
        return;
    }
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (joined_) return;
        joined_ = true;
        closing_ = true;
        std::vector<Batch*> open;
        for (auto& entry : batches_) open.push_back(entry.second.get());
        for (Batch* batch : open) drop_rest(batch);
    }
    const nb::gil_scoped_release no_gil;
    wake(INT64_MAX);
    join();
    std::lock_guard<std::mutex> lock(mutex_);
    ::close(event_fd_);
    event_fd_ = -1;
}

void Core::set_file(int64_t index, int fd) {
    std::lock_guard<std::mutex> lock(mutex_);
    fds_.at(static_cast<size_t>(index)) = fd;
}

Stats Core::stats() {
    std::lock_guard<std::mutex> lock(mutex_);
    return stats_;
}

uint64_t Core::submit(std::unique_ptr<Batch> batch) {
    Batch* raw = batch.get();
    const int64_t reads = raw->count;
    uint64_t id;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        raw->id = next_id_++;
        raw->submitted = std::chrono::steady_clock::now();
        if (batches_.empty()) busy_since_ = raw->submitted;
        tickets_ += raw->ticket;
        queue_[raw->prefetch].push_back(raw);
        batches_.emplace(raw->id, std::move(batch));
        id = raw->id;
        if (closing_) {
            drop_rest(raw);
            return id;
        }
    }
    wake(reads);
    return id;
}

void Core::cancel(uint64_t id) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = batches_.find(id);
    if (found != batches_.end()) drop_rest(found->second.get());
}

std::vector<Done> Core::completed() {
    std::vector<std::unique_ptr<Batch>> ended;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        uint64_t count;
        while (event_fd_ >= 0 && ::read(event_fd_, &count, sizeof count) < 0 && errno == EINTR) {
        }
        ended.swap(done_);
    }
    std::vector<Done> result;
    for (const auto& b : ended)
        result.push_back({b->id, b->end, b->error, b->error_file, b->error_offset, b->error_length, b->checked});
    return result;  // `ended` drops the references to memory here, where the GIL is held
}

bool Core::needs_scratch(const Batch& batch) const { return !batch.in_place[batch.next]; }

Op* Core::take() {
    for (int level = 0; level < 2; ++level) {
        for (auto it = again_.begin(); it != again_.end(); ++it)
            if ((*it)->batch->prefetch == (level == 1)) {
                Op* op = *it;
                again_.erase(it);
                return op;
            }
        std::deque<Batch*>& queue = queue_[level];
        if (queue.empty()) continue;
        Batch* batch = queue.front();
        // A read in flight, or one that is to be tried again, will give its scratch back.
        if (needs_scratch(*batch) && !have_scratch(batch)) {
            if (!queue.empty() && queue.front() != batch) --level;  // that one has ended, for want of memory
            continue;
        }
        Op* op = make(batch);
        if (batch->next == batch->count) queue.pop_front();
        return op;
    }
    return nullptr;
}

// One free block at least; without memory for a first one the batch ends.
bool Core::have_scratch(Batch* batch) {
    if (!free_scratch_.empty()) return true;
    if (n_scratch_ == max_scratch_) return false;
    uint8_t* block = aligned(alignment_, scratch_bytes_);
    if (block) {
        free_scratch_.push_back(block);
        ++n_scratch_;
        return true;
    }
    if (n_scratch_ == 0) end_with(batch, batch->next, End::failed, ENOMEM);
    return false;
}

Op* Core::make(Batch* batch) {
    Op* op = free_ops_.back();
    uint8_t* scratch = nullptr;
    const bool through_scratch = needs_scratch(*batch);
    if (through_scratch) {
        scratch = free_scratch_.back();
        free_scratch_.pop_back();
        ++stats_.scratch_reads;
    }
    free_ops_.pop_back();
    const int64_t piece = batch->next++;
    ++batch->outstanding;
    int64_t length = 0;
    for (int64_t p = batch->first[piece]; p < batch->first[piece + 1]; ++p) length += batch->length[p];
    op->batch = batch;
    op->piece = piece;
    op->offset = batch->offset[piece];
    op->length = op->need = length;
    op->reached = op->resume = op->lead = 0;
    op->scratch = scratch;
    op->retried = false;
    op->slot = -1;
    op->checked = Checked{};
    if (through_scratch) {
        op->lead = op->offset % alignment_;
        op->offset -= op->lead;
        op->need = op->lead + length;
        op->length = (op->need + alignment_ - 1) / alignment_ * alignment_;
    }
    return op;
}

bool Core::fill_iov(Op* op) try {
    op->iov.clear();
    if (op->scratch) {
        op->iov.push_back({op->scratch + op->resume, static_cast<size_t>(op->length - op->resume)});
        return true;
    }
    const Batch& batch = *op->batch;
    int64_t skip = op->resume;
    for (int64_t p = batch.first[op->piece]; p < batch.first[op->piece + 1]; ++p) {
        int64_t length = batch.length[p];
        if (skip >= length) {
            skip -= length;
            continue;
        }
        length -= skip;
        if (batch.at[p] != kSkip) {
            op->iov.push_back({batch.dest + batch.at[p] + skip, static_cast<size_t>(length)});
        } else {
            // More than IOV_MAX places are asked for in several reads, as if they came short.
            for (; length > 0; length -= kTrashBytes)
                op->iov.push_back({trash_, static_cast<size_t>(std::min(length, kTrashBytes))});
        }
        skip = 0;
    }
    if (op->iov.size() > 1024) op->iov.resize(1024);
    return true;
} catch (const std::bad_alloc&) {
    return false;
}

void Core::complete(Op* op, int64_t result) {
    Batch* batch = op->batch;
    ++stats_.reads;
    if (op->slot >= 0) ++stats_.registered_reads;
    if (result < 0) {
        const int error = static_cast<int>(-result);
        const bool busy = error == EINTR || error == EAGAIN;
        if (busy || (error == EIO && !op->retried)) {
            if (batch->stopped) return finish(op);
            if (!busy) {
                op->retried = true;
                ++stats_.retried;
            }
            again_.push_back(op);
            return;
        }
        return fail(op, End::failed, error);
    }
    stats_.bytes_read += result;
    const int64_t reached = op->resume + result;
    if (reached >= op->need) return finish(op);
    // O_DIRECT goes on from an aligned offset only: the end of a ragged short read comes again.
    if (reached <= op->reached) return fail(op, End::truncated, 0);
    op->reached = reached;
    op->resume = reached - reached % alignment_;
    if (batch->stopped) return finish(op);
    ++stats_.continued;
    again_.push_back(op);
}

void Core::deliver(Op& op, int64_t result) const {
    if (result < 0 || op.resume + result < op.need) return;
    if (!op.scratch) return check_rows(op);
    const Batch& batch = *op.batch;
    const uint8_t* from = op.scratch + op.lead;
    for (int64_t p = batch.first[op.piece]; p < batch.first[op.piece + 1]; ++p) {
        if (batch.at[p] != kSkip) std::memcpy(batch.dest + batch.at[p], from, static_cast<size_t>(batch.length[p]));
        from += batch.length[p];
    }
}

void Core::finish(Op* op) {
    if (op->scratch) free_scratch_.push_back(op->scratch);
    op->scratch = nullptr;
    free_ops_.push_back(op);
    op->batch->checked.add(op->checked);
    --op->batch->outstanding;
    end_if_done(op->batch);
}

void Core::fail(Op* op, End end, int error) {
    Batch* batch = op->batch;
    if (batch->end == End::ok || batch->end == End::dropped) {
        batch->end = end;
        batch->error = error;
        batch->error_file = batch->file[op->piece];
        batch->error_offset = op->offset + (end == End::truncated ? op->reached : op->resume);
        batch->error_length = end == End::truncated ? op->need - op->reached : op->length - op->resume;
    }
    drop_rest(batch);  // `op` is outstanding still: the batch cannot end in here
    finish(op);
}

// Ends a batch because of a piece that was never read.
void Core::end_with(Batch* batch, int64_t piece, End end, int error) {
    batch->end = end;
    batch->error = error;
    batch->error_file = batch->file[piece];
    batch->error_offset = batch->offset[piece];
    batch->error_length = batch->length[batch->first[piece]];
    drop_rest(batch);
}

bool Core::touches(const uint8_t* start, int64_t size) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& entry : batches_) {
        const Batch& batch = *entry.second;
        const int64_t at = start - batch.dest;
        for (int64_t p = 0; p < batch.first[batch.count]; ++p)
            if (batch.at[p] != kSkip && batch.at[p] < at + size && at < batch.at[p] + batch.length[p]) return true;
    }
    return false;
}

void Core::drop_rest(Batch* batch) {
    if (batch->stopped) return;
    batch->stopped = true;
    if (batch->end == End::ok) batch->end = End::dropped;
    if (batch->next < batch->count) {
        stats_.dropped += batch->count - batch->next;
        batch->next = batch->count;
        std::deque<Batch*>& queue = queue_[batch->prefetch];
        queue.erase(std::find(queue.begin(), queue.end(), batch));
    }
    ++batch->outstanding;  // so that it doesn't end before all of this is done
    for (auto it = again_.begin(); it != again_.end();) {
        Op* op = *it;
        if (op->batch != batch) {
            ++it;
            continue;
        }
        it = again_.erase(it);
        finish(op);
    }
    --batch->outstanding;
    end_if_done(batch);
}

void Core::end_if_done(Batch* batch) {
    if (batch->outstanding > 0 || batch->next < batch->count) return;
    const auto found = batches_.find(batch->id);
    std::unique_ptr<Batch> own = std::move(found->second);
    batches_.erase(found);
    if (batches_.empty()) busy_ += std::chrono::steady_clock::now() - busy_since_;
    if (own->ticket) {
        --tickets_;
        const bool awaited = own->awaited;
        done_tickets_.emplace(own->id, std::move(own));
        if (awaited) ticket_done_.notify_all();
        return;
    }
    done_.push_back(std::move(own));
    if (done_.size() == 1 && event_fd_ >= 0) {
        const uint64_t one = 1;
        while (::write(event_fd_, &one, sizeof one) < 0 && errno == EINTR) {
        }
    }
}

QuietStart::QuietStart() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old_);
}

QuietStart::~QuietStart() { pthread_sigmask(SIG_SETMASK, &old_, nullptr); }

void begin_thread(const char* name) {
    pthread_setname_np(pthread_self(), name);
    // Of struct sched_attr, what every kernel knows; newer ones have more behind it.
    struct {
        uint32_t size, policy;
        uint64_t flags;
        int32_t nice;
        uint32_t priority;
        uint64_t runtime, deadline, period;
    } attributes{};
    attributes.size = sizeof attributes;
    if (syscall(SYS_sched_getattr, 0, &attributes, sizeof attributes, 0) != 0 || attributes.policy > SCHED_BATCH) return;
    attributes.runtime = kSliceNs;
    syscall(SYS_sched_setattr, 0, &attributes, 0);
}

}  // namespace flashd::disk
