// The verbs of one SIMD level, written over `Vec`. Included by simd_*.cpp inside an unnamed namespace.
//
// A dot product is summed in one order, whatever rows and sequences share its tile: one vector
// accumulator from the first element to the last, then across the lanes. That keeps results
// bit-identical for every batch size, thread count and slicing; speed comes from a tile's many
// accumulators. Vec::kBatchTile sequences times kRowTile rows fill the registers.

constexpr int64_t W = Vec::kWidth;
constexpr int kRowTile = 4;
constexpr int64_t kMaxBatch = 16;

template <class T>
inline Vec::F load_part(const T* from, int64_t count) {
    T padded[W] = {};
    __builtin_memcpy(padded, from, static_cast<size_t>(count) * sizeof(T));
    return Vec::load(padded);
}

inline void store_part(float* to, Vec::F value, int64_t count) {
    float padded[W];
    Vec::store(padded, value);
    __builtin_memcpy(to, padded, static_cast<size_t>(count) * sizeof(float));
}

template <class T>
inline const T* at_byte(const T* from, int64_t bytes) {
    return reinterpret_cast<const T*>(reinterpret_cast<const char*>(from) + bytes);
}

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

template <class T>
void gemv_rows(const GemvArgs& a, int64_t first, int64_t last) {
    const int64_t stride_bytes = a.k * static_cast<int64_t>(sizeof(T));
    for_each_row(static_cast<const T*>(a.w), stride_bytes, a.x, a.k, a.batch, first, last,
                 [&](int64_t r, const float* sums) {
                     for (int64_t b = 0; b < a.batch; ++b)
                         a.out[b * a.n + r] = a.bias ? sums[b] + a.bias[r] : sums[b];
                 });
}

inline float activate(Activation activation, float x) {
    switch (activation) {
        case Activation::relu:
            return x <= 0.0f ? 0.0f : x;  // written so that NaN stays NaN
        case Activation::silu:
            return x / (1.0f + __builtin_expf(-x));
        case Activation::gelu:  // erfc keeps the left tail, where 1 + erf would cancel to nothing
            return 0.5f * x * __builtin_erfcf(-x * 0.70710678118654752440f);
        default:
            return 0.5f * x * (1.0f + __builtin_tanhf(0.79788456080286535588f * (x + 0.044715f * x * x * x)));
    }
}

template <class T>
void ffn_dots_rows(const DotsArgs& a, int64_t first, int64_t last) {
    float ups[kRowTile * kMaxBatch], gates[kRowTile * kMaxBatch];
    const auto finish = [&](int64_t r, const float* up, const float* gate) {
        for (int64_t b = 0; b < a.batch; ++b) {
            const float u = a.up_bias ? up[b] + a.up_bias[r] : up[b];
            const float g = a.gate_bias ? gate[b] + a.gate_bias[r] : gate[b];
            a.out[b * a.n + r] = a.gated ? activate(a.activation, g) * u : activate(a.activation, u);
        }
    };
    const T* w = reinterpret_cast<const T*>(a.rows);
    int64_t r = first;
    for (; r + kRowTile <= last; r += kRowTile) {
        const T* row = at_byte(w, r * a.stride_bytes);
        batch_dots<kRowTile>(row, a.stride_bytes, a.x, a.d, a.batch, ups);
        if (a.gated) batch_dots<kRowTile>(row + a.d, a.stride_bytes, a.x, a.d, a.batch, gates);
        for (int i = 0; i < kRowTile; ++i) finish(r + i, ups + i * kMaxBatch, gates + i * kMaxBatch);
    }
    for (; r < last; ++r) {
        const T* row = at_byte(w, r * a.stride_bytes);
        batch_dots<1>(row, a.stride_bytes, a.x, a.d, a.batch, ups);
        if (a.gated) batch_dots<1>(row + a.d, a.stride_bytes, a.x, a.d, a.batch, gates);
        finish(r, ups, gates);
    }
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
    for (int64_t start = 0; start < a.n; start += kBlock) {
        const int64_t stop = start + kBlock < a.n ? start + kBlock : a.n;
        for (int64_t b = 0; b < a.batch; ++b) {
            int64_t count = 0;
            for (int64_t r = start; r < stop; ++r) {
                const float value = a.h[b * a.n + r];
                fired[b].rows[count] = at_byte(down, r * a.stride_bytes);
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

// out[h] = sum over positions of p[h][t] * v[t], in ascending t; the values are read once.
template <int kHeads, int kTile, class T>
inline void mix_tile(const T* v, int64_t stride, const float* p, int64_t length, float* out, int64_t out_stride) {
    Vec::F acc[kHeads][kTile];
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; ++h)
#pragma GCC unroll 4
        for (int i = 0; i < kTile; ++i) acc[h][i] = Vec::zero();
    for (int64_t t = 0; t < length; ++t) {
#pragma GCC unroll 4
        for (int i = 0; i < kTile; ++i) {
            const Vec::F value = Vec::load(v + t * stride + i * W);
#pragma GCC unroll 4
            for (int h = 0; h < kHeads; ++h) acc[h][i] = Vec::fma(Vec::set(p[h * length + t]), value, acc[h][i]);
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; ++h)
#pragma GCC unroll 4
        for (int i = 0; i < kTile; ++i) Vec::store(out + h * out_stride + i * W, acc[h][i]);
}

template <int kHeads, class T>
inline void mix(const T* v, const float* p, int64_t length, int64_t width, float* out) {
    int64_t c = 0;
    for (; c + 4 * W <= width; c += 4 * W) mix_tile<kHeads, 4>(v + c, width, p, length, out + c, width);
    for (; c + W <= width; c += W) mix_tile<kHeads, 1>(v + c, width, p, length, out + c, width);
    for (int h = 0; c < width && h < kHeads; ++h) {
        Vec::F acc = Vec::zero();
        for (int64_t t = 0; t < length; ++t)
            acc = Vec::fma(Vec::set(p[h * length + t]), load_part(v + t * width + c, width - c), acc);
        store_part(out + h * width + c, acc, width - c);
    }
}

// Scores become exp(score - highest); returns their sum.
inline float soften(float* scores, int64_t length, float scale) {
    float top = -__builtin_inff();
    for (int64_t t = 0; t < length; ++t) {
        scores[t] *= scale;
        if (scores[t] > top) top = scores[t];  // NaN never wins, but stays in the scores
    }
    double total = 0.0;
    for (int64_t t = 0; t < length; ++t) {
        scores[t] = __builtin_expf(scores[t] - top);
        total += scores[t];
    }
    return static_cast<float>(total);
}

template <class T>
void attention_heads(const AttentionArgs& a, int64_t first, int64_t last, float* scores) {
    const int64_t group = a.heads / a.kv_heads;
    const int64_t head_elements = a.capacity * a.width;
    const int64_t stride_bytes = a.width * static_cast<int64_t>(sizeof(T));
    int64_t count;
    for (int64_t head = first; head < last; head += count) {
        // Heads that share keys and values go together, as many as the caller's range holds.
        const int64_t kv_head = head / group;
        count = (kv_head + 1) * group < last ? (kv_head + 1) * group - head : last - head;
        if (count > kMaxHeadsAtOnce) count = kMaxHeadsAtOnce;
        for_each_row(static_cast<const T*>(a.k) + kv_head * head_elements, stride_bytes, a.q + head * a.width,
                     a.width, count, 0, a.length, [&](int64_t t, const float* sums) {
                         for (int64_t h = 0; h < count; ++h) scores[h * a.length + t] = sums[h];
                     });
        const T* values = static_cast<const T*>(a.v) + kv_head * head_elements;
        float* out = a.out + head * a.width;
        float totals[kMaxHeadsAtOnce];
        for (int64_t h = 0; h < count; ++h) totals[h] = soften(scores + h * a.length, a.length, a.scale);
        int64_t h = 0;
        for (; h + Vec::kBatchTile <= count; h += Vec::kBatchTile)
            mix<Vec::kBatchTile>(values, scores + h * a.length, a.length, a.width, out + h * a.width);
        for (; h < count; ++h) mix<1>(values, scores + h * a.length, a.length, a.width, out + h * a.width);
        for (int64_t i = 0; i < count * a.width; ++i) out[i] /= totals[i / a.width];
    }
}

template <class T>
void widen(const ConvertArgs& a, int64_t first, int64_t last) {
    const T* from = static_cast<const T*>(a.from);
    float* to = static_cast<float*>(a.to);
    int64_t i = first;
    for (; i + W <= last; i += W) Vec::store(to + i, Vec::load(from + i));
    if (i < last) store_part(to + i, load_part(from + i, last - i), last - i);
}

template <class T>
void narrow(const ConvertArgs& a, int64_t first, int64_t last) {
    const float* from = static_cast<const float*>(a.from);
    T* to = static_cast<T*>(a.to);
    int64_t i = first;
    for (; i + W <= last; i += W) Vec::store(to + i, Vec::load(from + i));
    if (i < last) {
        T padded[W];
        Vec::store(padded, load_part(from + i, last - i));
        __builtin_memcpy(to + i, padded, static_cast<size_t>(last - i) * sizeof(T));
    }
}

// One verb for the three weight types.
#define FLASHD_BY_TYPE(function, type, ...)                                  \
    do {                                                                     \
        if ((type) == Type::f16)                                             \
            function<F16>(__VA_ARGS__);                                      \
        else if ((type) == Type::bf16)                                       \
            function<BF16>(__VA_ARGS__);                                     \
        else                                                                 \
            function<float>(__VA_ARGS__);                                    \
    } while (0)

void gemv(const GemvArgs& a, int64_t first, int64_t last) { FLASHD_BY_TYPE(gemv_rows, a.type, a, first, last); }

void ffn_dots(const DotsArgs& a, int64_t first, int64_t last) {
    FLASHD_BY_TYPE(ffn_dots_rows, a.type, a, first, last);
}

void ffn_down(const DownArgs& a, int64_t first, int64_t last) {
    FLASHD_BY_TYPE(ffn_down_columns, a.type, a, first, last);
}

void attention(const AttentionArgs& a, int64_t first, int64_t last, float* scores) {
    FLASHD_BY_TYPE(attention_heads, a.type, a, first, last, scores);
}

void to_f32(const ConvertArgs& a, int64_t first, int64_t last) { FLASHD_BY_TYPE(widen, a.type, a, first, last); }

void from_f32(const ConvertArgs& a, int64_t first, int64_t last) { FLASHD_BY_TYPE(narrow, a.type, a, first, last); }

#undef FLASHD_BY_TYPE

constexpr Level make_level(const char* name, bool hardware_crc) {
    return Level{name, hardware_crc, gemv, ffn_dots, ffn_down, attention, to_f32, from_f32};
}
