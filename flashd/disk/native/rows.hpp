// Reads of scattered rows of a file: a whole plan in one call, because a decoder asks for hundreds of rows
// some hundred times a second. layout/coalesce.py says what the plan is.
#pragma once

#include <memory>

#include "core.hpp"

namespace flashd::disk {

struct RowRequest {
    const int64_t* ids = nullptr;   // [count], any order, repeats allowed
    const int64_t* rows = nullptr;  // [count], where in dest each goes
    int64_t count = 0;
    int64_t limit = 0;  // of ids
    int64_t file = 0;
    int64_t offset = 0;  // in the file, of row 0
    int64_t stride = 0;  // of rows, in the file and in dest
    int64_t max_gap = 0;
    int64_t max_run = 0;
    uint8_t* dest = nullptr;
    int64_t dest_rows = 0;
    RowCheck check;
};

// Raises std::invalid_argument for what would read or write elsewhere.
std::unique_ptr<Batch> plan_rows(const RowRequest& request);

}  // namespace flashd::disk
