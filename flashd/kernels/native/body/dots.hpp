// Dot products of rows with up to 16 sequences' vectors.
//
// A dot product is summed in one order, whatever rows and sequences share its tile: one vector
// accumulator from the first element to the last, then across the lanes. That keeps results
// bit-identical for every batch size, thread count and slicing; speed comes from a tile's many
// accumulators. Vec::kBatchTile sequences times kRowTile rows fill the registers.

constexpr int kRowTile = 4;

// sums[r * kMaxBatch + b] = rows[r] . x[b], each row read once.
template <int kRows, int kBatch, class T>
inline void dots(const T* const* rows, const float* x, int64_t k, float* sums) {
    Vec::F acc[kRows][kBatch];
    const T* row[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
        row[r] = rows[r];
#pragma GCC unroll 4
        for (int b = 0; b < kBatch; ++b) acc[r][b] = Vec::zero();
    }
    int64_t i = 0;
    for (; i + W <= k; i += W) {
        Vec::F input[kBatch];
#pragma GCC unroll 4
        for (int b = 0; b < kBatch; ++b) input[b] = Vec::load(x + b * k + i);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
            const Vec::F weight = Vec::load(row[r] + i);
#pragma GCC unroll 4
            for (int b = 0; b < kBatch; ++b) acc[r][b] = Vec::fma(weight, input[b], acc[r][b]);
        }
    }
    if (i < k) {
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
            const Vec::F weight = load_part(row[r] + i, k - i);
#pragma GCC unroll 4
            for (int b = 0; b < kBatch; ++b)
                acc[r][b] = Vec::fma(weight, load_part(x + b * k + i, k - i), acc[r][b]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
        for (int b = 0; b < kBatch; ++b) sums[r * kMaxBatch + b] = Vec::sum(acc[r][b]);
}

// The same for any batch: the rows stay in the L1 cache between the tiles.
template <int kRows, class T>
inline void batch_dots(const T* const* rows, const float* x, int64_t k, int64_t batch, float* sums) {
    int64_t b = 0;
    for (; b + Vec::kBatchTile <= batch; b += Vec::kBatchTile)
        dots<kRows, Vec::kBatchTile>(rows, x + b * k, k, sums + b);
    if (Vec::kBatchTile > 2 && b + 2 <= batch) {
        dots<kRows, 2>(rows, x + b * k, k, sums + b);
        b += 2;
    }
    for (; b < batch; ++b) dots<kRows, 1>(rows, x + b * k, k, sums + b);
}

// Calls each(row, sums of that row) for rows [first, last), in order.
template <class T, class Each>
inline void for_each_row(const T* w, int64_t stride_bytes, const float* x, int64_t k, int64_t batch, int64_t first,
                         int64_t last, Each each) {
    float sums[kRowTile * kMaxBatch];
    const T* rows[kRowTile];
    int64_t r = first;
    for (; r + kRowTile <= last; r += kRowTile) {
        for (int i = 0; i < kRowTile; ++i) rows[i] = at_byte(w, (r + i) * stride_bytes);
        batch_dots<kRowTile>(rows, x, k, batch, sums);
        for (int i = 0; i < kRowTile; ++i) each(r + i, sums + i * kMaxBatch);
    }
    for (; r < last; ++r) {
        rows[0] = at_byte(w, r * stride_bytes);
        batch_dots<1>(rows, x, k, batch, sums);
        each(r, sums);
    }
}
