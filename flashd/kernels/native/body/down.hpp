// Second half of the sparse FFN: acc += h[0] * down[0], then += h[1] * down[1], ... for every column.
//
// Strictly sequential in the rows, so that slices, threads (which split the columns) and the batch
// change no bit. A sequence does not touch a row whose h is exactly zero: 0 * Inf would.

constexpr int64_t kListedRows = 512;  // rows looked for before any is added: a list on the stack
constexpr int64_t kFarRows = 32;      // of these, what is fetched into the L2 cache lies so far ahead

template <class T>
inline const T* down_row(const DownArgs& a, int64_t j) {
    const T* row = at_byte(reinterpret_cast<const T*>(a.rows), listed_row(a, j) * a.stride_bytes);
    return row + (a.gated ? 2 : 1) * a.d;
}

// Rows of one sequence; meanwhile the same columns of the `next` rows are fetched into the L1 cache, and those of
// `far` ones into the L2 cache.
template <int kRows, class T>
inline void add_rows(const T* const* rows, const T* const* next, const T* const* far, const float* h, int64_t at,
                     int64_t count, float* acc) {
    constexpr int64_t kLine = 64 / sizeof(T);
    Vec::F factor[kRows];
    const T *row[kRows], *ahead[kRows], *beyond[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
        factor[r] = Vec::set(h[r]);
        row[r] = rows[r] + at;
        ahead[r] = next[r] + at;
        beyond[r] = far[r] + at;
    }
    const auto step = [&](int64_t i) {
        Vec::F sum = Vec::load(acc + i);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) sum = Vec::fma(factor[r], Vec::load(row[r] + i), sum);
        Vec::store(acc + i, sum);
    };
    int64_t i = 0;
    for (; i + kLine <= count; i += kLine) {
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
            __builtin_prefetch(ahead[r] + i);
            __builtin_prefetch(beyond[r] + i, 0, 2);
        }
#pragma GCC unroll 8
        for (int64_t v = 0; v < kLine; v += W) step(i + v);
    }
    for (; i + W <= count; i += W) step(i);
    if (i < count) {
        Vec::F sum = load_part(acc + i, count - i);
        for (int r = 0; r < kRows; ++r) sum = Vec::fma(factor[r], load_part(row[r] + i, count - i), sum);
        store_part(acc + i, sum, count - i);
    }
}

template <class T>
void down_of_one(const DownArgs& a, int64_t first, int64_t last) {
    const T* rows[kListedRows];
    float h[kListedRows];
    float* acc = a.acc + first;
    int64_t count = 0;
    for (int64_t j = 0; j < a.count;) {
        for (; j < a.count && count < kListedRows; ++j) {
            rows[count] = down_row<T>(a, j);
            h[count] = a.h[j];
            count += !(a.h[j] == 0.0f);
        }
        int64_t r = 0;
        for (; r + 4 <= count; r += 4)
            add_rows<4>(rows + r, rows + (r + 8 <= count ? r + 4 : r),
                        rows + (r + kFarRows + 4 <= count ? r + kFarRows : r), h + r, first, last - first, acc);
        if (j == a.count)
            for (; r < count; ++r) add_rows<1>(rows + r, rows + r, rows + r, h + r, first, last - first, acc);
        // What is no four yet goes with the next rows.
        for (int64_t i = r; i < count; ++i) {
            rows[i - r] = rows[i];
            h[i - r] = h[i];
        }
        count -= r;
    }
}

// Rows that any sequence uses, and for each sequence which of them, in ascending order.
constexpr int kSharedRows = 16;
constexpr int64_t kSharedColumns = 256;

template <class T>
struct SharedRows {
    const T* rows[kSharedRows];
    int64_t count;
    float h[kMaxBatch][kSharedRows];
    int which[kMaxBatch][kSharedRows];
    int used[kMaxBatch];

    // Takes the rows from column j of h on; returns the first column that is left.
    int64_t fill(const DownArgs& a, int64_t j) {
        count = 0;
        for (int64_t b = 0; b < a.batch; ++b) used[b] = 0;
        for (; j < a.count && count < kSharedRows; ++j) {
            bool any = false;
            for (int64_t b = 0; b < a.batch; ++b) {
                const float value = a.h[b * a.count + j];
                const bool fires = !(value == 0.0f);
                any |= fires;
                h[b][used[b]] = value;  // without a branch: which rows fire can't be foreseen
                which[b][used[b]] = static_cast<int>(count);
                used[b] += fires;
            }
            rows[count] = down_row<T>(a, j);
            count += any;
        }
        return j;
    }
};

// kVectors vectors of one sequence's columns stay in registers for all its rows.
template <int kVectors>
inline void add_shared(const float* wide, const float* h, const int* which, int used, float* acc) {
    Vec::F sums[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sums[v] = Vec::load(acc + v * W);
    for (int i = 0; i < used; ++i) {
        const Vec::F factor = Vec::set(h[i]);
        const float* row = wide + which[i] * kSharedColumns;
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sums[v] = Vec::fma(factor, Vec::load(row + v * W), sums[v]);
    }
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) Vec::store(acc + v * W, sums[v]);
}

// `count` columns of one sequence from their float32 rows in `wide`.
inline void add_columns(const float* wide, const float* h, const int* which, int used, int64_t count, float* acc) {
    int64_t c = 0;
    for (; c + 8 * W <= count; c += 8 * W) add_shared<8>(wide + c, h, which, used, acc + c);
    for (; c + W <= count; c += W) add_shared<1>(wide + c, h, which, used, acc + c);
    if (c < count) {
        float padded[W];
        Vec::store(padded, load_part(acc + c, count - c));
        add_shared<1>(wide + c, h, which, used, padded);
        __builtin_memcpy(acc + c, padded, static_cast<size_t>(count - c) * sizeof(float));
    }
}

// Rows become float32 once for all sequences, in the L1 cache; meanwhile the same columns of the next are fetched.
template <class T>
void down_of_many(const DownArgs& a, int64_t first, int64_t last) {
    constexpr int64_t kLine = 64 / sizeof(T);
    alignas(64) float wide[kSharedRows * kSharedColumns];
    SharedRows<T> blocks[2];
    int64_t j = blocks[0].fill(a, 0);
    for (int turn = 0; blocks[turn].count; turn ^= 1) {
        const SharedRows<T>& now = blocks[turn];
        SharedRows<T>& next = blocks[turn ^ 1];
        j = next.fill(a, j);
        for (int64_t c = first; c < last; c += kSharedColumns) {
            const int64_t count = c + kSharedColumns < last ? kSharedColumns : last - c;
            for (int64_t r = 0; r < now.count; ++r) {
                const T* row = now.rows[r] + c;
                const T* ahead = r < next.count ? next.rows[r] + c : row;
                float* to = wide + r * kSharedColumns;
                for (int64_t i = 0; i < count; i += kLine) __builtin_prefetch(ahead + i);
                int64_t i = 0;
                for (; i + W <= count; i += W) Vec::store(to + i, Vec::load(row + i));
                if (i < count) Vec::store(to + i, load_part(row + i, count - i));
            }
            for (int64_t b = 0; b < a.batch; ++b)
                add_columns(wide, now.h[b], now.which[b], now.used[b], count, a.acc + b * a.d + c);
        }
    }
}

template <class T>
void ffn_down_columns(const DownArgs& a, int64_t first, int64_t last) {
    if (a.batch == 1)
        down_of_one<T>(a, first, last);
    else
        down_of_many<T>(a, first, last);
}

void ffn_down(const DownArgs& a, int64_t first, int64_t last) {
    FLASHD_BY_TYPE(ffn_down_columns, a.type, a, first, last);
}
