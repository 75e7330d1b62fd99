#include "uring.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

namespace flashd::disk {
namespace {

constexpr uint64_t kWakeup = 0;  // user_data of the wake-up poll; reads carry their address
// Registered regions at most: slabs of 4 MiB for 16 GiB.
constexpr int kSlots = 4096;

uint32_t acquire(const uint32_t* at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
void publish(uint32_t* at, uint32_t value) { __atomic_store_n(at, value, __ATOMIC_RELEASE); }

template <class T>
T* at(void* base, uint32_t offset) {
    return reinterpret_cast<T*>(static_cast<uint8_t*>(base) + offset);
}

long register_call(int fd, unsigned what, const void* argument, unsigned count) {
    return syscall(abi::kRegister, fd, what, argument, count);
}

}  // namespace

Uring::Uring(int64_t alignment, int64_t n_files, int64_t scratch_bytes, int depth)
    : Core(alignment, n_files, scratch_bytes, std::min(depth, 32), depth), depth_(depth) {
    wake_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wake_fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
    std::unique_lock<std::mutex> lock(mutex_);
    try {
        const QuietStart quiet;
        thread_ = std::thread([this] { run(); });
    } catch (...) {
        ::close(wake_fd_);
        throw;
    }
    // The ring belongs to the thread that made it, and only that one may use it.
    command_done_->wait(lock, [this] { return ready_; });
    if (setup_error_ != 0) {
        lock.unlock();
        thread_.join();
        ::close(wake_fd_);
        throw std::system_error(setup_error_, std::generic_category(), "io_uring_setup");
    }
}

Uring::~Uring() { close(); }

void Uring::wake(int64_t) {
    const uint64_t one = 1;
    while (::write(wake_fd_, &one, sizeof one) < 0 && errno == EINTR) {
    }
}

void Uring::join() {
    if (thread_.joinable()) thread_.join();
    ::close(wake_fd_);
}

void Uring::set_file(int64_t index, int fd) {
    Core::set_file(index, fd);
    if (n_files() == 1) call({Command::Kind::set_file, fd});
}

int Uring::register_memory(uint8_t* start, size_t size) {
    return call({Command::Kind::add_memory, -1, start, size});
}

int Uring::unregister_memory(uint8_t* start, size_t size) {
    return call({Command::Kind::remove_memory, -1, start, size});
}

int Uring::call(Command command) {
    const nb::gil_scoped_release no_gil;
    std::unique_lock<std::mutex> lock(mutex_);
    if (!alive_) return ESHUTDOWN;
    commands_.push_back(&command);
    wake(0);
    command_done_->wait(lock, [&] { return command.done; });
    return command.result;
}

// Everything below runs on the ring's thread.

void Uring::run() {
    begin_thread("flashd-uring");
    const int error = setup();
    {
        std::lock_guard<std::mutex> lock(mutex_);
        setup_error_ = error;
        ready_ = true;
        alive_ = error == 0;
    }
    command_done_->notify_all();
    while (error == 0) {
        bool full = false;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            for (Command* command : commands_) {
                command->result = execute(*command);
                command->done = true;
            }
            if (!commands_.empty()) command_done_->notify_all();
            commands_.clear();
            while (in_flight_ < depth_) {
                Op* op = take();
                if (!op) break;
                prepare(op);
            }
            full = in_flight_ == depth_;
            if (closing_ && in_flight_ == 0) {
                alive_ = false;
                break;
            }
        }
        if (!wakeup_armed_) prepare_wakeup();
        // A full ring has time: several completions for one wake-up of this thread.
        enter(full ? static_cast<unsigned>(std::max(1, depth_ / 8)) : 1);
        reap();
    }
    unmap();
}

int Uring::setup() {
    int error = EINVAL;
    // Newest first; older kernels refuse what they don't know.
    for (const uint32_t flags : {abi::kSingleIssuer | abi::kDeferTaskrun, abi::kCoopTaskrun, 0u}) {
        error = setup_ring(flags);
        if (error == 0) {
            setup_tables();
            return 0;
        }
        if (error != EINVAL) break;
    }
    return error;
}

int Uring::setup_ring(uint32_t flags) {
    params_ = abi::Params{};
    params_.flags = flags;
    // One more than reads: the wake-up.
    ring_fd_ = static_cast<int>(syscall(abi::kSetup, static_cast<unsigned>(depth_ + 1), &params_));
    if (ring_fd_ < 0) return errno;
    sq_size_ = params_.sq_off.array + params_.sq_entries * sizeof(uint32_t);
    cq_size_ = params_.cq_off.cqes + params_.cq_entries * sizeof(abi::Cqe);
    sqes_size_ = params_.sq_entries * sizeof(abi::Sqe);
    const bool single = params_.features & abi::kFeatSingleMmap;
    if (single) sq_size_ = cq_size_ = std::max(sq_size_, cq_size_);
    const auto map = [&](size_t size, uint64_t what) {
        void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring_fd_,
                            static_cast<off_t>(what));
        return memory == MAP_FAILED ? nullptr : memory;
    };
    sq_memory_ = map(sq_size_, abi::kOffSqRing);
    cq_memory_ = single ? sq_memory_ : map(cq_size_, abi::kOffCqRing);
    sqes_ = static_cast<abi::Sqe*>(map(sqes_size_, abi::kOffSqes));
    if (!sq_memory_ || !cq_memory_ || !sqes_) {
        const int error = errno;
        unmap();
        return error;
    }
    sq_tail_ = at<uint32_t>(sq_memory_, params_.sq_off.tail);
    sq_array_ = at<uint32_t>(sq_memory_, params_.sq_off.array);
    sq_mask_ = *at<uint32_t>(sq_memory_, params_.sq_off.ring_mask);
    cq_head_ = at<uint32_t>(cq_memory_, params_.cq_off.head);
    cq_tail_ = at<uint32_t>(cq_memory_, params_.cq_off.tail);
    cq_mask_ = *at<uint32_t>(cq_memory_, params_.cq_off.ring_mask);
    cqes_ = at<abi::Cqe>(cq_memory_, params_.cq_off.cqes);
    return 0;
}

void Uring::setup_tables() {
    if (n_files() == 1) {
        const int none = -1;
        fixed_file_ = register_call(ring_fd_, abi::kRegisterFiles, &none, 1) == 0;
    }
    abi::RsrcRegister sparse{};
    sparse.nr = kSlots;
    sparse.flags = abi::kRegisterSparse;
    if (register_call(ring_fd_, abi::kRegisterBuffers2, &sparse, sizeof sparse) != 0) return;
    for (int slot = kSlots - 1; slot >= 0; --slot) free_slots_.push_back(slot);
}

void Uring::unmap() {
    if (ring_fd_ >= 0) {
        // The kernel takes a ring apart some time after its end; the file and the memory shall be free now.
        register_call(ring_fd_, abi::kUnregisterFiles, nullptr, 0);
        register_call(ring_fd_, abi::kUnregisterBuffers, nullptr, 0);
    }
    if (sqes_) munmap(sqes_, sqes_size_);
    if (cq_memory_ && cq_memory_ != sq_memory_) munmap(cq_memory_, cq_size_);
    if (sq_memory_) munmap(sq_memory_, sq_size_);
    sqes_ = nullptr;
    sq_memory_ = cq_memory_ = nullptr;
    if (ring_fd_ >= 0) ::close(ring_fd_);
    ring_fd_ = -1;
}

int Uring::execute(const Command& command) {
    if (command.kind == Command::Kind::add_memory) return add_memory(command.start, command.size);
    if (command.kind == Command::Kind::remove_memory) return remove_memory(command.start, command.size);
    struct {
        uint32_t offset, resv;
        uint64_t fds;
    } update{0, 0, reinterpret_cast<uint64_t>(&command.fd)};
    fixed_file_ = command.fd >= 0 && register_call(ring_fd_, abi::kRegisterFilesUpdate, &update, 1) == 1;
    return 0;
}

int Uring::add_memory(uint8_t* start, size_t size) {
    if (free_slots_.empty()) return regions_.empty() ? EOPNOTSUPP : ENOSPC;
    const auto after = std::upper_bound(regions_.begin(), regions_.end(), start,
                                        [](const uint8_t* value, const Region& r) { return value < r.start; });
    const bool hits_next = after != regions_.end() && start + size > after->start;
    const bool hits_last = after != regions_.begin() && (after - 1)->start + (after - 1)->size > start;
    if (hits_next || hits_last) return EEXIST;
    const iovec place{start, size};
    const int slot = free_slots_.back();
    const abi::RsrcUpdate2 update{static_cast<uint32_t>(slot), 0, reinterpret_cast<uint64_t>(&place), 0, 1, 0};
    if (register_call(ring_fd_, abi::kRegisterBuffersUpdate, &update, sizeof update) < 0) return errno;
    free_slots_.pop_back();
    regions_.insert(after, Region{start, size, slot});
    return 0;
}

int Uring::remove_memory(const uint8_t* start, size_t size) {
    const auto found = std::find_if(regions_.begin(), regions_.end(),
                                    [&](const Region& r) { return r.start == start && r.size == size; });
    if (found == regions_.end()) return 0;
    const iovec none{nullptr, 0};
    const abi::RsrcUpdate2 update{
        static_cast<uint32_t>(found->slot), 0, reinterpret_cast<uint64_t>(&none), 0, 1, 0};
    if (register_call(ring_fd_, abi::kRegisterBuffersUpdate, &update, sizeof update) < 0) return errno;
    free_slots_.push_back(found->slot);
    regions_.erase(found);
    return 0;
}

Uring::Region* Uring::region_of(const iovec& place) {
    if (regions_.empty()) return nullptr;
    auto* base = static_cast<uint8_t*>(place.iov_base);
    const auto after = std::upper_bound(regions_.begin(), regions_.end(), base,
                                        [](const uint8_t* value, const Region& r) { return value < r.start; });
    if (after == regions_.begin()) return nullptr;
    Region& region = *(after - 1);
    return base + place.iov_len <= region.start + region.size ? &region : nullptr;
}

abi::Sqe* Uring::next_sqe() {
    // Never full: there are depth + 1 entries or more, and at most so many are in use.
    const uint32_t index = (*sq_tail_ + to_submit_) & sq_mask_;
    sq_array_[index] = index;
    ++to_submit_;
    abi::Sqe* sqe = &sqes_[index];
    std::memset(sqe, 0, sizeof *sqe);
    return sqe;
}

void Uring::prepare(Op* op) {
    if (!fill_iov(op)) return complete(op, -ENOMEM);
    abi::Sqe* sqe = next_sqe();
    const int64_t file = op->batch->file[op->piece];
    if (fixed_file_) {
        sqe->flags = abi::kFixedFile;
        sqe->fd = 0;
    } else {
        sqe->fd = fds_[static_cast<size_t>(file)];
    }
    sqe->off = static_cast<uint64_t>(op->offset + op->resume);
    sqe->user_data = reinterpret_cast<uint64_t>(op);
    op->slot = -1;
    if (op->iov.size() == 1) {
        const iovec& place = op->iov.front();
        sqe->opcode = abi::kRead;
        sqe->addr = reinterpret_cast<uint64_t>(place.iov_base);
        sqe->len = static_cast<uint32_t>(place.iov_len);
        if (Region* region = region_of(place)) {
            sqe->opcode = abi::kReadFixed;
            sqe->buf_index = static_cast<uint16_t>(region->slot);
            op->slot = region->slot;
        }
    } else {
        sqe->opcode = abi::kReadv;
        sqe->addr = reinterpret_cast<uint64_t>(op->iov.data());
        sqe->len = static_cast<uint32_t>(op->iov.size());
    }
    ++in_flight_;
}

void Uring::prepare_wakeup() {
    abi::Sqe* sqe = next_sqe();
    sqe->opcode = abi::kPollAdd;
    sqe->fd = wake_fd_;
    uint32_t events = POLLIN;
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    events = events << 16 | events >> 16;
#endif
    sqe->op_flags = events;
    sqe->user_data = kWakeup;
    wakeup_armed_ = true;
}

void Uring::enter(unsigned wait_for) {
    // What next_sqe filled becomes visible to the kernel at once. The kernel may take fewer; the
    // rest stays in the ring and counts as to be submitted.
    publish(sq_tail_, *sq_tail_ + to_submit_);
    uint32_t pending = unsubmitted_ + to_submit_;
    to_submit_ = 0;
    for (;;) {
        const long taken =
            syscall(abi::kEnter, ring_fd_, pending, wait_for, abi::kEnterGetEvents, nullptr, size_t{0});
        if (taken >= 0) {
            pending -= static_cast<uint32_t>(taken);
            if (pending == 0 || acquire(cq_tail_) != *cq_head_) break;
            continue;
        }
        const int error = errno;
        if (error == EINTR) continue;
        // Out of memory or of room for completions: what is there is reaped first.
        if (acquire(cq_tail_) != *cq_head_) break;
        usleep(1000);
        if (error == EAGAIN || error == EBUSY || error == ENOMEM) continue;
        // Nothing that waiting could help: reads that the kernel does not have end with the error.
        unsubmitted_ = pending;
        fail_unsubmitted(error);
        return;
    }
    unsubmitted_ = pending;
}

void Uring::fail_unsubmitted(int error) {
    std::lock_guard<std::mutex> lock(mutex_);
    const uint32_t tail = *sq_tail_;
    for (uint32_t at = tail - unsubmitted_; at != tail; ++at) {
        const uint64_t owner = sqes_[at & sq_mask_].user_data;
        if (owner == kWakeup) {
            wakeup_armed_ = false;
            continue;
        }
        Op* op = reinterpret_cast<Op*>(owner);
        --in_flight_;
        complete(op, -error);
    }
    publish(sq_tail_, tail - unsubmitted_);
    unsubmitted_ = 0;
}

void Uring::reap() {
    const uint32_t first = *cq_head_, tail = acquire(cq_tail_);
    for (uint32_t head = first; head != tail; ++head) {
        const abi::Cqe& cqe = cqes_[head & cq_mask_];
        if (cqe.user_data != kWakeup) deliver(*reinterpret_cast<Op*>(cqe.user_data), cqe.res);
    }
    std::lock_guard<std::mutex> lock(mutex_);
    for (uint32_t head = first; head != tail; ++head) {
        const abi::Cqe& cqe = cqes_[head & cq_mask_];
        if (cqe.user_data == kWakeup) {
            uint64_t count;
            while (::read(wake_fd_, &count, sizeof count) < 0 && errno == EINTR) {
            }
            wakeup_armed_ = false;
            continue;
        }
        Op* op = reinterpret_cast<Op*>(cqe.user_data);
        --in_flight_;
        complete(op, cqe.res);
    }
    publish(cq_head_, tail);
}

}  // namespace flashd::disk
