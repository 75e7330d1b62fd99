// The kernel's io_uring interface, as far as flashd uses it (see io_uring_setup(2) and its siblings).
// Written out here, because the headers of older distributions lack what newer kernels have, and
// liburing would be one more thing to install. These layouts are a stable ABI.
#pragma once

#include <cstdint>

namespace flashd::disk::abi {

struct Sqe {
    uint8_t opcode;
    uint8_t flags;
    uint16_t ioprio;
    int32_t fd;
    uint64_t off;
    uint64_t addr;
    uint32_t len;
    uint32_t op_flags;  // poll32_events for POLL_ADD
    uint64_t user_data;
    uint16_t buf_index;
    uint16_t personality;
    int32_t splice_fd_in;
    uint64_t addr3;
    uint64_t pad;
};
static_assert(sizeof(Sqe) == 64, "the kernel's layout");

struct Cqe {
    uint64_t user_data;
    int32_t res;
    uint32_t flags;
};
static_assert(sizeof(Cqe) == 16, "the kernel's layout");

struct SqOffsets {
    uint32_t head, tail, ring_mask, ring_entries, flags, dropped, array, resv1;
    uint64_t user_addr;
};

struct CqOffsets {
    uint32_t head, tail, ring_mask, ring_entries, overflow, cqes, flags, resv1;
    uint64_t user_addr;
};

struct Params {
    uint32_t sq_entries, cq_entries, flags, sq_thread_cpu, sq_thread_idle, features, wq_fd, resv[3];
    SqOffsets sq_off;
    CqOffsets cq_off;
};
static_assert(sizeof(Params) == 120, "the kernel's layout");

struct RsrcRegister {
    uint32_t nr, flags;
    uint64_t resv2, data, tags;
};

struct RsrcUpdate2 {
    uint32_t offset, resv;
    uint64_t data, tags;
    uint32_t nr, resv2;
};

// System calls: the same numbers on every architecture.
constexpr long kSetup = 425, kEnter = 426, kRegister = 427;

// Operations: READ needs Linux 5.6, the others less.
constexpr uint8_t kReadv = 1, kReadFixed = 4, kPollAdd = 6, kRead = 22;
constexpr uint8_t kFixedFile = 1 << 0;  // Sqe::flags

// Setup flags, from Linux 5.19 and 6.1 on.
constexpr uint32_t kCoopTaskrun = 1u << 8, kSingleIssuer = 1u << 12, kDeferTaskrun = 1u << 13;
constexpr uint32_t kFeatSingleMmap = 1u << 0;
constexpr uint32_t kEnterGetEvents = 1u << 0;

constexpr unsigned kUnregisterBuffers = 1, kRegisterFiles = 2, kUnregisterFiles = 3, kRegisterFilesUpdate = 6;
constexpr unsigned kRegisterBuffers2 = 15, kRegisterBuffersUpdate = 16;
constexpr uint32_t kRegisterSparse = 1u << 0;

constexpr uint64_t kOffSqRing = 0, kOffCqRing = 0x8000000, kOffSqes = 0x10000000;

}  // namespace flashd::disk::abi
