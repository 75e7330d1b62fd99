// Dot products of rows with up to 16 sequences' vectors.
//
// A dot product is summed in one order, whatever rows and sequences share its tile: one vector
// accumulator from the first element to the last, then across the lanes. That keeps results
// bit-identical for every batch size, thread count and slicing; speed comes from a tile's many
// accumulators. Vec::kBatchTile sequences times kRowTile rows fill the registers.

constexpr int kRowTile = 4;

// sums[r * kMaxBatch + b] = row r . x[b], rows `stride_bytes` apart, each read once.
template <int kRows, int kBatch, class T>
inline void dots(const T* w, int64_t stride_bytes, const float* x, int64_t k, float* sums) {
    Vec::F acc[kRows][kBatch];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
        for (int b = 0; b < kBatch; ++b) acc[r][b] = Vec::zero();
    int64_t i = 0;
    for (; i + W <= k; i += W) {
        Vec::F input[kBatch];
#pragma GCC unroll 4
        for (int b = 0; b < kBatch; ++b) input[b] = Vec::load(x + b * k + i);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
            const Vec::F weight = Vec::load(at_byte(w, r * stride_bytes) + i);
#pragma GCC unroll 4
            for (int b = 0; b < kBatch; ++b) acc[r][b] = Vec::fma(weight, input[b], acc[r][b]);
        }
    }
    if (i < k) {
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
            const Vec::F weight = load_part(at_byte(w, r * stride_bytes) + i, k - i);
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
inline void batch_dots(const T* w, int64_t stride_bytes, const float* x, int64_t k, int64_t batch, float* sums) {
    int64_t b = 0;
    for (; b + Vec::kBatchTile <= batch; b += Vec::kBatchTile)
        dots<kRows, Vec::kBatchTile>(w, stride_bytes, x + b * k, k, sums + b);
    if (Vec::kBatchTile > 2 && b + 2 <= batch) {
        dots<kRows, 2>(w, stride_bytes, x + b * k, k, sums + b);
        b += 2;
    }
    for (; b < batch; ++b) dots<kRows, 1>(w, stride_bytes, x + b * k, k, sums + b);
}

// Calls each(row, sums of that row) for rows [first, last), in order.
template <class T, class Each>
inline void for_each_row(const T* w, int64_t stride_bytes, const float* x, int64_t k, int64_t batch, int64_t first,
                         int64_t last, Each each) {
    float sums[kRowTile * kMaxBatch];
    int64_t r = first;
    for (; r + kRowTile <= last; r += kRowTile) {
        batch_dots<kRowTile>(at_byte(w, r * stride_bytes), stride_bytes, x, k, batch, sums);
        for (int i = 0; i < kRowTile; ++i) each(r + i, sums + i * kMaxBatch);
    }
    for (; r < last; ++r) {
        batch_dots<1>(at_byte(w, r * stride_bytes), stride_bytes, x, k, batch, sums);
        each(r, sums);
    }
}
