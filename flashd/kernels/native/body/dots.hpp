// Dot products of rows with up to 16 sequences' vectors, at the speed of memory.
//
// A dot product is summed in one order, whatever rows and sequences share its tile: one vector
// accumulator from the first element to the last, then across the lanes. That keeps results
// bit-identical for every batch size, thread count and slicing; speed comes from a tile's many
// accumulators. Rows go in tiles of kRowTile and blocks of about kBlock elements:
//
//     row 0   [ block | block | ... ]     all sequences take a block in turn, so that it and their x
//     row 1   [ block | block | ... ]     stay in the L1 cache; meanwhile what is computed next is
//     row 2   [ block | block | ... ]     fetched, at a row's end the first block of the next tile:
//     row 3   [ block | block | ... ]     hardware loses track where rows end or lie far apart

constexpr int64_t kBlock = 512;

// x [batch, k] as the dot products read it: the sequences' vectors side by side, [k / W, batch, W], zeros
// behind each end. Rows of x that lie a power of two apart would share few lines of the L1 cache.
void pack_inputs(const float* x, int64_t k, int64_t batch, float* packed) {
    for (int64_t i = 0; i < k; i += W)
        for (int64_t b = 0; b < batch; ++b, packed += W) {
            const float* from = x + b * k + i;
            Vec::store(packed, i + W <= k ? Vec::load(from) : load_part(from, k - i));
        }
}

// acc[r * batch + b] += the products of `count` elements of row r and of sequence b, lane by lane; at the
// rows' start it is overwritten. `count` is a multiple of W. kFetch: fetch as many elements from `ahead`
// into the L1 cache, and for few sequences, which compute too little meanwhile, from `far` into the L2 cache.
template <int kRows, int kBatch, bool kFetch, class T>
inline void dot_block(const T* const* rows, const T* const* ahead, const T* const* far, const float* x, int64_t at,
                      int64_t count, int64_t batch, Vec::F* acc) {
    constexpr int64_t kLine = 64 / sizeof(T);
    Vec::F sums[kRows][kBatch];
    const T *row[kRows], *next[kRows], *beyond[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
        row[r] = rows[r] + at;
        next[r] = ahead[r];
        beyond[r] = far[r];
#pragma GCC unroll 8
        for (int b = 0; b < kBatch; ++b) sums[r][b] = at ? acc[r * batch + b] : Vec::zero();
    }
    const float* input = x + at * batch;
    const auto step = [&](int64_t i) {
        Vec::F weight[kRows];
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) weight[r] = Vec::load(row[r] + i);
#pragma GCC unroll 8
        for (int b = 0; b < kBatch; ++b) {
            const Vec::F value = Vec::load(input + b * W);
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) sums[r][b] = Vec::fma(weight[r], value, sums[r][b]);
        }
        input += batch * W;
    };
    int64_t i = 0;
    for (; i + kLine <= count; i += kLine) {
#pragma GCC unroll 8
        for (int r = 0; kFetch && r < kRows; ++r) {
            __builtin_prefetch(next[r] + i);
            if (kBatch <= 2) __builtin_prefetch(beyond[r] + i, 0, 2);
        }
#pragma GCC unroll 8
        for (int64_t v = 0; v < kLine; v += W) step(i + v);
    }
    for (; i < count; i += W) step(i);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
        for (int b = 0; b < kBatch; ++b) acc[r * batch + b] = sums[r][b];
}

// Sequences that the registers take together when `left` are left.
inline int64_t sequences_at_once(int64_t left) {
    return left >= Vec::kManyBatch ? Vec::kManyBatch : left >= 4 ? 4 : left >= 2 ? 2 : 1;
}

// A tile's rows, as many at a time as the registers hold with kBatch sequences.
template <int kBatch, bool kFetch, class T>
inline void dot_tile(const T* const* rows, const T* const* ahead, const T* const* far, const float* x, int64_t at,
                     int64_t count, int64_t batch, Vec::F* acc) {
    constexpr int kRows = kBatch <= Vec::kFewBatch ? 4 : 2;
    for (int r = 0; r < kRowTile; r += kRows)
        dot_block<kRows, kBatch, kFetch>(rows + r, ahead + r, far + r, x, at, count, batch, acc + r * batch);
}

template <bool kFetch, class T>
inline void dot_sequences(const T* const* rows, const T* const* ahead, const T* const* far, const float* x,
                          int64_t at, int64_t count, int64_t batch, int64_t at_once, Vec::F* acc) {
    if (at_once == Vec::kManyBatch)
        dot_tile<Vec::kManyBatch, kFetch>(rows, ahead, far, x, at, count, batch, acc);
    else if (at_once == 4)
        dot_tile<4, kFetch>(rows, ahead, far, x, at, count, batch, acc);
    else if (at_once == 2)
        dot_tile<2, kFetch>(rows, ahead, far, x, at, count, batch, acc);
    else
        dot_tile<1, kFetch>(rows, ahead, far, x, at, count, batch, acc);
}

// All sequences that use a tile's rows: `used` says which (null: all).
template <class T>
inline void dot_batch(const T* const* rows, const T* const* ahead, const T* const* far, const float* x, int64_t at,
                      int64_t count, int64_t batch, const bool* used, Vec::F* acc) {
    bool fetched = false;
    for (int64_t b = 0, at_once; b < batch; b += at_once) {
        at_once = sequences_at_once(batch - b);
        bool any = !used;
        for (int64_t i = b; !any && i < b + at_once; ++i) any = used[i];
        if (!any) continue;
        if (fetched)
            dot_sequences<false>(rows, ahead, far, x + b * W, at, count, batch, at_once, acc + b);
        else
            dot_sequences<true>(rows, ahead, far, x + b * W, at, count, batch, at_once, acc + b);
        fetched = true;
    }
}

// The elements behind the last whole vector.
template <class T>
inline void dot_rest(const T* const* rows, const float* x, int64_t at, int64_t count, int64_t batch, Vec::F* acc) {
    Vec::F weight[kRowTile];
    for (int r = 0; r < kRowTile; ++r) weight[r] = load_part(rows[r] + at, count);
    for (int64_t b = 0; b < batch; ++b) {
        const Vec::F value = Vec::load(x + at * batch + b * W);
        for (int r = 0; r < kRowTile; ++r) acc[r * batch + b] = Vec::fma(weight[r], value, acc[r * batch + b]);
    }
}

// Rows whose sums lie between blocks in the L1 cache, whole tiles of them: many if the inputs come from the L2
// cache, because there are many sequences, or if rows are short.
constexpr int64_t kGroupRows = 16;
constexpr int64_t kLeadBytes = 4096;  // so far ahead are short rows fetched

inline int64_t group_rows(int64_t k, int64_t batch) { return batch > 4 || k <= kBlock ? kGroupRows : kRowTile; }

// A group of rows, padded to whole tiles by repeating the last, and rows to come, padded with these.
template <class T>
struct Group {
    const T* rows[kGroupRows];
    const T* next[kGroupRows];
    int64_t count;  // without padding

    // Rows row(first), row(first + 1), ... of those up to `last`, and those `lead` rows further on.
    template <class Row>
    void fill(int64_t first, int64_t last, int64_t most, int64_t lead, Row row) {
        count = first + most < last ? most : last - first;
        for (int64_t i = 0; i < count; ++i) rows[i] = row(first + i);
        for (int64_t i = count; i % kRowTile; ++i) rows[i] = rows[count - 1];
        for (int64_t i = 0; i < count; ++i) next[i] = first + lead + i < last ? row(first + lead + i) : rows[i];
        for (int64_t i = count; i % kRowTile; ++i) next[i] = rows[i];
    }
};

// How a row of k elements is cut: whole vectors, in even blocks. Worked out once for many rows.
template <class T>
struct Blocks {
    int64_t k, whole, step;

    Blocks(int64_t k, int64_t batch) : k(k), whole(k / W * W) {
        constexpr int64_t kLine = 64 / sizeof(T);
        const int64_t most = batch > 4 ? kBlock / 2 : kBlock;
        const int64_t count = divide_up(whole, most);
        step = count > 1 ? round_up(divide_up(whole, count), kLine) : whole;
    }
};

// sums[r * batch + b] = rows[r] . x[b] for a group. used[r / kRowTile * batch + b] says which sequences use a
// tile (null: all); the others' sums may be anything. `next` is what is computed after this.
template <class T>
inline void group_dots(const T* const* rows, int64_t count, const T* const* next, const float* x,
                       const Blocks<T>& blocks, int64_t batch, const bool* used, float* sums) {
    Vec::F acc[kGroupRows * kMaxBatch];
    const int64_t padded = round_up(count, kRowTile);
    const int64_t whole = blocks.whole, step = blocks.step;
    for (int64_t j = 0; !whole && j < padded * batch; ++j) acc[j] = Vec::zero();
    for (int64_t at = 0; at < whole; at += step) {
        const int64_t left = whole - at;
        for (int64_t r = 0; r < padded; r += kRowTile) {
            const T *ahead[kRowTile], *far[kRowTile];
            for (int i = 0; i < kRowTile; ++i) {
                ahead[i] = left > step ? rows[r + i] + at + step : next[r + i];
                far[i] = next[r + i] + at;
            }
            dot_batch(rows + r, ahead, far, x, at, left < step ? left : step, batch,
                      used ? used + r / kRowTile * batch : nullptr, acc + r * batch);
        }
    }
    for (int64_t r = 0; whole < blocks.k && r < padded; r += kRowTile)
        dot_rest(rows + r, x, whole, blocks.k - whole, batch, acc + r * batch);
    for (int64_t j = 0; j < padded * batch; j += 4) Vec::sum4(acc + j, sums + j);
}

// Calls each(row, sums of that row) for rows [first, last), in order; x is packed.
template <class T, class Each>
inline void for_each_row(const T* w, int64_t stride_bytes, const float* x, int64_t k, int64_t batch, int64_t first,
                         int64_t last, Each each) {
    float sums[kGroupRows * kMaxBatch];
    Group<T> group;
    const Blocks<T> blocks(k, batch);
    const int64_t most = group_rows(k, batch);
    // Short rows are fetched earlier.
    const int64_t group_bytes = most * stride_bytes + 1;
    const int64_t lead = group_bytes < kLeadBytes ? kLeadBytes / group_bytes * most : most;
    for (int64_t r = first; r < last; r += most) {
        group.fill(r, last, most, lead, [&](int64_t row) { return at_byte(w, row * stride_bytes); });
        group_dots(group.rows, group.count, group.next, x, blocks, batch, nullptr, sums);
        for (int64_t i = 0; i < group.count; ++i) each(r + i, sums + i * batch);
    }
}
