// The sparse FFN of up to 16 sequences over neuron rows.

inline float activate(Activation activation, float x) {
    switch (activation) {
        case Activation::relu:
            return x <= 0.0f ? 0.0f : x;  // written so that NaN stays NaN
        case Activation::relu2:
            return x <= 0.0f ? 0.0f : x * x;
        case Activation::silu:
            return x / (1.0f + __builtin_expf(-x));
        case Activation::gelu:  // erfc keeps the left tail, where 1 + erf would cancel to nothing
            return 0.5f * x * __builtin_erfcf(-x * 0.70710678118654752440f);
        default:
            return 0.5f * x * (1.0f + __builtin_tanhf(0.79788456080286535588f * (x + 0.044715f * x * x * x)));
    }
}

// The hidden unit of one neuron from its dot products, biases added. NaN compares false and stays NaN.
inline float hidden_unit(const DotsArgs& a, float up, float gate) {
    const float value = activate(a.activation, a.gated ? gate : up);
    const float kept = __builtin_fabsf(value) <= a.threshold ? 0.0f : value;
    return a.gated ? kept * up : kept;
}

// One listed row's part of `out`, from its sums for every sequence.
inline void finish_row(const DotsArgs& a, int64_t listed, const float* ups, const float* gates) {
    const int64_t r = a.index ? a.index[listed] : listed;
    const int64_t column = a.slots ? a.slots[listed] : listed;
    for (int64_t b = 0; b < a.batch; ++b) {
        const float up = a.up_bias ? ups[b] + a.up_bias[r] : ups[b];
        const float gate = a.gate_bias ? gates[b] + a.gate_bias[r] : gates[b];
        const int64_t at = b * a.columns + column;
        a.out[at] = a.mask && !a.mask[at] ? 0.0f : hidden_unit(a, up, gate);
    }
}

template <int kRows, class T>
inline void dots_tile(const DotsArgs& a, int64_t first) {
    float ups[kRows * kMaxBatch], gates[kRows * kMaxBatch];
    const T* rows[kRows];
    for (int i = 0; i < kRows; ++i) {
        const int64_t r = a.index ? a.index[first + i] : first + i;
        rows[i] = at_byte(reinterpret_cast<const T*>(a.rows), r * a.stride_bytes);
    }
    batch_dots<kRows>(rows, a.x, a.d, a.batch, ups);
    if (a.gated) {
        for (int i = 0; i < kRows; ++i) rows[i] += a.d;
        batch_dots<kRows>(rows, a.x, a.d, a.batch, gates);
    }
    for (int i = 0; i < kRows; ++i) finish_row(a, first + i, ups + i * kMaxBatch, gates + i * kMaxBatch);
}

template <class T>
void ffn_dots_rows(const DotsArgs& a, int64_t first, int64_t last) {
    int64_t i = first;
    for (; i + kRowTile <= last; i += kRowTile) dots_tile<kRowTile, T>(a, i);
    for (; i < last; ++i) dots_tile<1, T>(a, i);
}

// acc += h[0] * rows[0], then += h[1] * rows[1], ...: sequential for every column from `at` on.
template <int kRows, class T>
inline void add_rows(const T* const* rows, const float* h, int64_t at, int64_t count, float* acc) {
    Vec::F factor[kRows];
    const T* row[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
        factor[r] = Vec::set(h[r]);
        row[r] = rows[r] + at;
    }
    int64_t i = 0;
    for (; i + W <= count; i += W) {
        Vec::F sum = Vec::load(acc + i);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) sum = Vec::fma(factor[r], Vec::load(row[r] + i), sum);
        Vec::store(acc + i, sum);
    }
    if (i < count) {
        Vec::F sum = load_part(acc + i, count - i);
        for (int r = 0; r < kRows; ++r) sum = Vec::fma(factor[r], load_part(row[r] + i, count - i), sum);
        store_part(acc + i, sum, count - i);
    }
}

// The hardware follows a row only after its first misses, and the next row starts elsewhere.
template <class T>
inline void prefetch_row(const T* row, int64_t count) {
    const char* from = reinterpret_cast<const char*>(row);
    const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + at);
}

// The rows of a block that one sequence uses, in ascending order.
template <class T, int64_t kSlots>
struct Fired {
    const T* rows[kSlots];
    float h[kSlots];
    int64_t count;

    void add_to(float* acc, int64_t at, int64_t columns, bool prefetch) const {
        int64_t r = 0;
        for (; r + 8 <= count; r += 8) {
            for (int64_t next = r + 8; prefetch && next < r + 16 && next < count; ++next)
                prefetch_row(rows[next] + at, columns);
            add_rows<8>(rows + r, h + r, at, columns, acc);
        }
        for (; r + 4 <= count; r += 4) add_rows<4>(rows + r, h + r, at, columns, acc);
        for (; r < count; ++r) add_rows<1>(rows + r, h + r, at, columns, acc);
    }
};

// Blocks of rows and tiles of columns, so that all sequences find a tile in the L1 cache. One
// sequence reads everything once anyway: its tile is the whole range.
template <int64_t kSequences, class T>
void down_columns(const DownArgs& a, int64_t first, int64_t last) {
    constexpr int64_t kBlock = 512 / kSequences;
    const int64_t tile = kSequences == 1 ? last - first : 512;
    const T* down = reinterpret_cast<const T*>(a.rows) + (a.gated ? 2 : 1) * a.d;
    Fired<T, kBlock> fired[kSequences];
    for (int64_t start = 0; start < a.count; start += kBlock) {
        const int64_t stop = start + kBlock < a.count ? start + kBlock : a.count;
        for (int64_t b = 0; b < a.batch; ++b) {
            int64_t count = 0;
            for (int64_t j = start; j < stop; ++j) {
                const float value = a.h[b * a.count + j];
                fired[b].rows[count] = at_byte(down, (a.index ? a.index[j] : j) * a.stride_bytes);
                fired[b].h[count] = value;
                count += !(value == 0.0f);
            }
            fired[b].count = count;
        }
        for (int64_t c = first; c < last; c += tile)
            for (int64_t b = 0; b < a.batch; ++b)
                fired[b].add_to(a.acc + b * a.d + c, c, c + tile < last ? tile : last - c, b == 0);
    }
}

template <class T>
void ffn_down_columns(const DownArgs& a, int64_t first, int64_t last) {
    if (a.batch == 1)
        down_columns<1, T>(a, first, last);
    else
        down_columns<kMaxBatch, T>(a, first, last);
}

void ffn_dots(const DotsArgs& a, int64_t first, int64_t last) {
    FLASHD_BY_TYPE(ffn_dots_rows, a.type, a, first, last);
}

void ffn_down(const DownArgs& a, int64_t first, int64_t last) {
    FLASHD_BY_TYPE(ffn_down_columns, a.type, a, first, last);
}
