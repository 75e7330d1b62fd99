// What the native engines share: batches waiting, reads in flight, and what becomes of a read's result.
//
//   submit -> [demand queue]   -> take -> executor (io_uring, threads, fake) -> complete -> done, eventfd
//             [prefetch queue]             ^--- again: short, or EIO once <-------'
//
// A batch with a ticket is none of the event loop's business: its end goes to whoever waits for it.
//
// An executor takes reads while it has room, so its queue stays full across batches; a demand batch
// goes before every prefetch that is not taken yet.
#pragma once

#include <nanobind/nanobind.h>
#include <signal.h>
#include <sys/uio.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

namespace flashd::disk {

namespace nb = nanobind;

constexpr int64_t kSkip = -1;

// How a batch ended.
enum class End { ok, failed, truncated, dropped };

// Which rows of a batch are compared with their checksums as they arrive, and what came of it.
struct RowCheck {
    const uint32_t* sums = nullptr;  // CRC32C of every row of the file; null: nothing is checked
    uint8_t* trusted = nullptr;      // of every row: need not be checked; kept up to date
    int64_t start = 0, count = 0;    // of the wanted rows, in order and going on at 0, so many are checked anyway
    int64_t rows = 0;                // wanted
    int64_t offset = 0, stride = 0;  // in the file, of row 0; of a row
};

struct Checked {
    int64_t rows = 0, untrusted = 0, wrong = 0;
    int64_t first_wrong = -1;  // by number
    int64_t time_ns = 0;       // of the CPU

    void add(const Checked& more);
};

// One batch: pointers into the caller's arrays, which `owners` keeps alive, or into its own.
struct Batch {
    uint64_t id = 0;
    bool prefetch = false;
    bool ticket = false;   // waited for with `wait`; else told by `completed`
    bool awaited = false;  // somebody is in `wait` for it
    int64_t count = 0;  // pieces
    const int64_t* file = nullptr;
    const int64_t* offset = nullptr;
    const int64_t* first = nullptr;   // [count + 1]
    const int64_t* length = nullptr;  // of each place
    const int64_t* at = nullptr;      // of each place: offset in dest, or kSkip
    const uint8_t* in_place = nullptr;  // else through scratch
    uint8_t* dest = nullptr;
    nb::object owners;
    std::vector<int64_t> owned;
    std::vector<uint8_t> owned_in_place;
    std::chrono::steady_clock::time_point submitted;
    RowCheck check;
    const int64_t* ordinal = nullptr;  // of each place, where there is a check: its first row's among those wanted
    Checked checked;

    int64_t next = 0;         // first piece that was not taken yet
    int64_t outstanding = 0;  // taken, not finished
    bool stopped = false;     // cancelled or failed: what is left is dropped
    End end = End::ok;
    int error = 0;
    int64_t error_file = 0, error_offset = 0, error_length = 0;
};

// One read on its way. Bytes before `resume` have arrived.
struct Op {
    Batch* batch = nullptr;
    int64_t piece = 0;
    int64_t offset = 0;   // in the file
    int64_t length = 0;   // to ask for
    int64_t need = 0;     // that must arrive; less than `length` where scratch reaches behind the end
    int64_t reached = 0;  // how far it came
    int64_t resume = 0;   // `reached`, rounded down to the alignment
    int64_t lead = 0;     // scratch: bytes before the first that is wanted
    uint8_t* scratch = nullptr;
    bool retried = false;
    int slot = -1;  // registered memory that it reads into
    std::vector<iovec> iov;
    Checked checked;
};

struct Stats {
    int64_t reads = 0, bytes_read = 0, scratch_reads = 0, registered_reads = 0;
    int64_t continued = 0, retried = 0, dropped = 0;
};

// What `completed` tells of a batch.
struct Done {
    uint64_t id;
    End end;
    int error;
    int64_t file, offset, length;
    Checked checked;
};

class Core {
public:
    Core(int64_t alignment, int64_t n_files, int64_t scratch_bytes, int max_scratch, int depth);
    virtual ~Core();
    Core(const Core&) = delete;
    Core& operator=(const Core&) = delete;

    // From Python, with the GIL.
    uint64_t submit(std::unique_ptr<Batch> batch);
    void cancel(uint64_t id);
    std::vector<Done> completed();
    // How a batch with a ticket ended, once; false if it has not after so many ns. Releases the GIL.
    bool wait(uint64_t id, int64_t timeout_ns, Done* done);
    // Batches with a ticket that have not ended.
    int64_t tickets();
    // Time so far with at least one batch that has not ended.
    int64_t busy_ns();
    int event_fd() const { return event_fd_; }
    int64_t n_files() const { return static_cast<int64_t>(fds_.size()); }
    // The longest piece that goes through scratch.
    int64_t scratch_limit() const { return scratch_bytes_ - 2 * alignment_; }
    virtual void set_file(int64_t index, int fd);
    Stats stats();
    // Whether a batch that has not ended reads into some of this memory.
    bool touches(const uint8_t* start, int64_t size);
    // Ends the executor: what is in flight is waited for, the rest dropped. Releases the GIL.
    void close();

protected:
    // For executors. `mutex_` is held in all of them.
    Op* take();
    void complete(Op* op, int64_t result);  // bytes, or -errno
    // Before `complete`, without `mutex_`: copies what came through scratch to its places, and checks rows.
    void deliver(Op& op, int64_t result) const;
    bool waiting() const { return !queue_[0].empty() || !queue_[1].empty() || !again_.empty(); }
    // Where the rest of a read goes: into op->iov. False without memory for it.
    bool fill_iov(Op* op);

    virtual void wake(int64_t reads) = 0;  // so many more to take, or `closing_`
    virtual void join() = 0;               // without the GIL and the mutex
    virtual void abandon() = 0;            // in a forked child: the threads are not there, nor may anybody join them

    std::mutex mutex_;
    bool closing_ = false;
    const int64_t alignment_;
    std::vector<int> fds_;
    Stats stats_;

private:
    Op* make(Batch* batch);
    bool needs_scratch(const Batch& batch) const;
    bool have_scratch(Batch* batch);
    void end_with(Batch* batch, int64_t piece, End end, int error);
    void finish(Op* op);
    void fail(Op* op, End end, int error);
    void drop_rest(Batch* batch);
    void end_if_done(Batch* batch);

    std::deque<Batch*> queue_[2];  // demand, prefetch
    std::deque<Op*> again_;
    std::unordered_map<uint64_t, std::unique_ptr<Batch>> batches_;
    std::vector<std::unique_ptr<Batch>> done_;
    std::unordered_map<uint64_t, std::unique_ptr<Batch>> done_tickets_;
    int64_t tickets_ = 0;
    std::condition_variable ticket_done_;
    std::chrono::steady_clock::time_point busy_since_;
    std::chrono::nanoseconds busy_{0};
    std::vector<std::unique_ptr<Op>> ops_;
    std::vector<Op*> free_ops_;
    std::vector<uint8_t*> free_scratch_;
    int n_scratch_ = 0;
    const int64_t scratch_bytes_;
    const int max_scratch_;
    uint8_t* trash_ = nullptr;
    uint64_t next_id_ = 1;
    int event_fd_ = -1;
    const int pid_;
    bool joined_ = false;
};

// Blocks all signals for a thread that is about to start, and puts the caller's mask back.
class QuietStart {
public:
    QuietStart();
    ~QuietStart();

private:
    sigset_t old_;
};

void begin_thread(const char* name);

// Compares rows of a read that has all its bytes, where its batch asks for it.
void check_rows(Op& op);

// A forked child has the objects of its parent's threads, but not the threads: they are left alone.
inline void leak(std::thread& thread) { new std::thread(std::move(thread)); }

// A condition that a forked child can leave alone, too: the end of one waits for all who wait for it.
class Condition {
public:
    Condition() : condition_(new std::condition_variable) {}
    Condition(const Condition&) = delete;
    Condition& operator=(const Condition&) = delete;
    ~Condition() { delete condition_; }
    std::condition_variable* operator->() const { return condition_; }
    void leak() { condition_ = nullptr; }

private:
    std::condition_variable* condition_;
};

}  // namespace flashd::disk
