// Reads through io_uring: one thread owns the ring, keeps it full, and needs no GIL.
#pragma once

#include <memory>
#include <thread>
#include <vector>

#include "core.hpp"
#include "io_uring_abi.hpp"

namespace flashd::disk {

class Uring final : public Core {
public:
    // std::system_error where the kernel, a container or a limit forbids a ring.
    Uring(int64_t alignment, int64_t n_files, int64_t scratch_bytes, int depth);
    ~Uring() override;

    void set_file(int64_t index, int fd) override;
    // 0 or errno. The ring's thread pins the pages.
    int register_memory(uint8_t* start, size_t size);
    // 0 or errno. No batch may touch it.
    int unregister_memory(uint8_t* start, size_t size);

protected:
    void wake(int64_t reads) override;
    void join() override;
    void abandon() override {
        leak(thread_);
        command_done_.leak();
    }

private:
    struct Command {
        enum class Kind { set_file, add_memory, remove_memory } kind;
        int fd = -1;
        uint8_t* start = nullptr;
        size_t size = 0;
        bool done = false;
        int result = 0;
    };
    struct Region {
        uint8_t* start;
        size_t size;
        int slot;
    };

    void run();
    int setup();
    int setup_ring(uint32_t flags);
    void setup_tables();
    void unmap();
    int call(Command command);
    int execute(const Command& command);
    int add_memory(uint8_t* start, size_t size);
    int remove_memory(const uint8_t* start, size_t size);
    Region* region_of(const iovec& place);
    void prepare(Op* op);
    void prepare_wakeup();
    abi::Sqe* next_sqe();
    void enter(unsigned wait_for);
    void fail_unsubmitted(int error);
    void reap();

    const int depth_;
    int in_flight_ = 0;
    std::thread thread_;
    std::vector<Command*> commands_;
    Condition command_done_;
    bool ready_ = false, alive_ = false;
    int setup_error_ = 0;

    int ring_fd_ = -1, wake_fd_ = -1;
    bool wakeup_armed_ = false;
    abi::Params params_{};
    void *sq_memory_ = nullptr, *cq_memory_ = nullptr;
    size_t sq_size_ = 0, cq_size_ = 0, sqes_size_ = 0;
    abi::Sqe* sqes_ = nullptr;
    uint32_t *sq_tail_ = nullptr, *sq_array_ = nullptr, sq_mask_ = 0;
    uint32_t to_submit_ = 0, unsubmitted_ = 0;  // written, not published; published, not taken
    uint32_t *cq_head_ = nullptr, *cq_tail_ = nullptr, cq_mask_ = 0;
    abi::Cqe* cqes_ = nullptr;

    bool fixed_file_ = false;
    std::vector<Region> regions_;  // by start
    std::vector<int> free_slots_;
};

}  // namespace flashd::disk
