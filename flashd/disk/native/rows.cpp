#include "rows.hpp"

#include <algorithm>
#include <stdexcept>
#include <vector>

namespace flashd::disk {
namespace {

constexpr int64_t kMaxPlaces = 1024;  // the kernel's IOV_MAX
constexpr int64_t kMaxReadBytes = int64_t{1} << 30;
constexpr int64_t kMaxOffset = int64_t{1} << 62;

struct Wanted {
    int64_t id, row;
};

void check(const RowRequest& want) {
    if (want.stride < 1 || want.offset < 0 || want.max_gap < 0 || want.max_run < 1 || want.max_run > kMaxPlaces ||
        want.max_run > kMaxReadBytes / want.stride)
        throw std::invalid_argument("submit_rows: stride, offset or limits out of range");
    const int64_t last = std::min(want.limit - 1, (kMaxOffset - want.offset) / want.stride - 1);
    for (int64_t i = 0; i < want.count; ++i) {
        if (want.ids[i] < 0 || want.ids[i] > last) throw std::invalid_argument("submit_rows: an id is no row");
        if (want.rows[i] < 0 || want.rows[i] >= want.dest_rows)
            throw std::invalid_argument("submit_rows: a row leaves its destination");
    }
}

// By id, repeats in the order given; mostly they come so.
std::vector<Wanted> ordered(const RowRequest& want) {
    std::vector<Wanted> all(static_cast<size_t>(want.count));
    for (int64_t i = 0; i < want.count; ++i) all[static_cast<size_t>(i)] = {want.ids[i], want.rows[i]};
    const auto less = [](const Wanted& a, const Wanted& b) { return a.id < b.id; };
    if (!std::is_sorted(all.begin(), all.end(), less)) std::stable_sort(all.begin(), all.end(), less);
    return all;
}

struct Columns {
    std::vector<int64_t> offset, first{0}, length, at, ordinal;

    // One read of all[begin..end-1], over the gaps between them.
    void add(const RowRequest& want, const std::vector<Wanted>& all, size_t begin, size_t end) {
        offset.push_back(want.offset + all[begin].id * want.stride);
        for (size_t i = begin; i < end; ++i) {
            const int64_t step = i == begin ? 0 : all[i].id - all[i - 1].id;
            if (step == 1 && all[i].row == all[i - 1].row + 1) {
                length.back() += want.stride;
                continue;
            }
            if (step > 1) {
                length.push_back((step - 1) * want.stride);
                at.push_back(kSkip);
                ordinal.push_back(static_cast<int64_t>(i));
            }
            length.push_back(want.stride);
            at.push_back(all[i].row * want.stride);
            ordinal.push_back(static_cast<int64_t>(i));
        }
        first.push_back(static_cast<int64_t>(length.size()));
    }
};

// all[begin..end-1] follow each other without a gap that is too long: one read, or the fewest of even
// length that are not too long.
void add_run(Columns& columns, const RowRequest& want, const std::vector<Wanted>& all, size_t begin, size_t end) {
    const int64_t span = all[end - 1].id - all[begin].id + 1;
    const int64_t parts = (span + want.max_run - 1) / want.max_run;
    const int64_t cell = (span + parts - 1) / parts;
    size_t start = begin;
    for (size_t i = begin + 1; i <= end; ++i)
        if (i == end || (all[i].id - all[begin].id) / cell != (all[i - 1].id - all[begin].id) / cell) {
            columns.add(want, all, start, i);
            start = i;
        }
}

}  // namespace

std::unique_ptr<Batch> plan_rows(const RowRequest& want) {
    check(want);
    const std::vector<Wanted> all = ordered(want);
    Columns columns;
    size_t start = 0;
    for (size_t i = 1; i <= all.size(); ++i) {
        const int64_t step = i < all.size() ? all[i].id - all[i - 1].id : 0;
        if (step > 0 && step <= want.max_gap + 1) continue;
        add_run(columns, want, all, start, i);
        start = i;
    }
    auto batch = std::make_unique<Batch>();
    const size_t n = columns.offset.size(), m = columns.length.size();
    // One piece of memory for all columns, which the batch keeps: file, offset, first, length, at, ordinal.
    std::vector<int64_t>& owned = batch->owned;
    owned.reserve(3 * n + 3 * m + 1);
    owned.assign(n, want.file);
    owned.insert(owned.end(), columns.offset.begin(), columns.offset.end());
    owned.insert(owned.end(), columns.first.begin(), columns.first.end());
    owned.insert(owned.end(), columns.length.begin(), columns.length.end());
    owned.insert(owned.end(), columns.at.begin(), columns.at.end());
    owned.insert(owned.end(), columns.ordinal.begin(), columns.ordinal.end());
    batch->owned_in_place.assign(n, 1);
    batch->count = static_cast<int64_t>(n);
    batch->file = owned.data();
    batch->offset = batch->file + n;
    batch->first = batch->offset + n;
    batch->length = batch->first + n + 1;
    batch->at = batch->length + m;
    batch->in_place = batch->owned_in_place.data();
    batch->ordinal = batch->at + m;
    batch->dest = want.dest;
    batch->check = want.check;
    batch->check.rows = want.count;
    batch->check.offset = want.offset;
    batch->check.stride = want.stride;
    return batch;
}

}  // namespace flashd::disk
