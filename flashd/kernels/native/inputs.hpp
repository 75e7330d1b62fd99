// What the memory-bound verbs share: the packed vectors of up to 16 sequences, and chunks of rows.
#pragma once

#include "panels.hpp"
#include "verbs.hpp"

namespace flashd {

// Rows of a chunk: whole tiles.
inline int64_t row_chunk(int64_t bytes_per_row) {
    return round_up(chunk_of(bytes_per_row), kRowTile);
}

inline int64_t packed_inputs_floats(const RowVerbs& verbs, int64_t k, int64_t batch) {
    return round_up(k, verbs.width) * batch;
}

class Inputs {
public:
    // x is [batch, k] and must outlive this.
    Inputs(const RowVerbs& verbs, const float* x, int64_t k, int64_t batch)
        : packed_(batch == 1 && k % verbs.width == 0 ? 0 : packed_inputs_floats(verbs, k, batch)), data_(x) {
        if (batch == 1 && k % verbs.width == 0) return;
        verbs.pack_inputs(x, k, batch, packed_.data());
        data_ = packed_.data();
    }

    const float* data() const { return data_; }

private:
    Scratch packed_;
    const float* data_;
};

}  // namespace flashd
