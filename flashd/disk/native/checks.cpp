// Rows are compared with their checksums by the thread that has read them, before anybody is told that they are
// there: the thread that needs them computes meanwhile.
#include <ctime>

#include "../../kernels/native/level.hpp"
#include "core.hpp"

namespace flashd::disk {
namespace {

constexpr int64_t kBlock = 96;  // rows summed at a time: a multiple of the three that run interleaved

int64_t cpu_ns() {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

// Rows to be summed: where they are in dest, and their numbers in the file.
class Block {
public:
    Block(const Batch& batch, Checked& result) : batch_(batch), result_(result) {}

    void add(int64_t row, int64_t id) {
        rows_[count_] = row;
        ids_[count_++] = id;
        if (count_ == kBlock) flush();
    }

    void flush() {
        static const bool hardware = has_crc32c_instruction();
        const RowCheck& check = batch_.check;
        crc32c_rows(batch_.dest, check.stride, rows_, 0, count_, sums_, hardware);
        for (int64_t i = 0; i < count_; ++i) {
            const bool right = sums_[i] == check.sums[ids_[i]];
            result_.untrusted += !check.trusted[ids_[i]];
            check.trusted[ids_[i]] = right;
            if (right) continue;
            if (!result_.wrong++ || ids_[i] < result_.first_wrong) result_.first_wrong = ids_[i];
        }
        result_.rows += count_;
        count_ = 0;
    }

private:
    const Batch& batch_;
    Checked& result_;
    int64_t rows_[kBlock], ids_[kBlock];
    uint32_t sums_[kBlock];
    int64_t count_ = 0;
};

}  // namespace

void Checked::add(const Checked& more) {
    rows += more.rows;
    untrusted += more.untrusted;
    if (more.wrong && (!wrong || more.first_wrong < first_wrong)) first_wrong = more.first_wrong;
    wrong += more.wrong;
    time_ns += more.time_ns;
}

void check_rows(Op& op) {
    const Batch& batch = *op.batch;
    const RowCheck& check = batch.check;
    if (!check.sums) return;
    const int64_t began_ns = cpu_ns();
    const auto sampled = [&](int64_t ordinal) {
        const int64_t behind = ordinal - check.start;
        return (behind < 0 ? behind + check.rows : behind) < check.count;
    };
    Block block(batch, op.checked);
    int64_t id = (batch.offset[op.piece] - check.offset) / check.stride;
    for (int64_t p = batch.first[op.piece]; p < batch.first[op.piece + 1]; ++p) {
        const int64_t n = batch.length[p] / check.stride;
        if (batch.at[p] != kSkip)
            for (int64_t i = 0; i < n; ++i)
                if (!check.trusted[id + i] || sampled(batch.ordinal[p] + i)) block.add(batch.at[p] / check.stride + i, id + i);
        id += n;
    }
    block.flush();
    op.checked.time_ns = cpu_ns() - began_ns;
}

}  // namespace flashd::disk
