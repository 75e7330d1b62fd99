// Attention of few queries over a KV cache: decoding.
//
// An item is one KV head's chunk of positions. All query rows that read this head go through it while
// it lies in the caches: scores, weights exp(score - highest), weighted values. Every number is summed
// in one order, whatever shares its tile: a score over the lanes of one accumulator, a value over the
// positions of the chunk, a row over its chunks.

constexpr int64_t kRowBlock = 16;                // query rows at a time: their scores stay in the L1 cache
constexpr int64_t kMixBlock = 16;                // positions whose values stay there for all rows
constexpr int64_t kPositions = 4;                // of a tile of scores
constexpr int64_t kTileRows = W > 8 ? W / 4 : 2;  // query rows of a tile: the accumulators fill the registers

// The hardware follows a stream only after its first misses, and not across pages.
constexpr int64_t kAheadBytes = 2048;

// What a thread reads next: the rest of one array, then the start of another.
struct Stream {
    const char* from;
    int64_t bytes;
    const char* then;  // null: nothing more

    void prefetch(int64_t offset, int64_t count) const {
        offset += kAheadBytes;
        if (offset >= bytes && !then) return;
        const char* at = offset < bytes ? from + offset : then + (offset - bytes);
        for (int64_t i = 0; i < count; i += 64) __builtin_prefetch(at + i);
    }
};

// The query rows of a block, and their weights over a chunk.
struct QueryBlock {
    int64_t rows;
    const float* q[kRowBlock];
    int64_t part[kRowBlock];  // where its results of the chunk go
    float* values[kRowBlock];
    int64_t count[kRowBlock];  // positions of the chunk that the row sees
    float weights[kRowBlock * kAttentionChunk];
};

#if defined(__clang__)
#define FLASHD_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define FLASHD_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (typename Lanes<kLanes>::U{__VA_ARGS__}))
#endif

// Depends on a template parameter, so that only this level's width has to be valid.
template <int64_t kLanes>
struct Lanes {
    typedef uint32_t U __attribute__((vector_size(kLanes * 4)));
    typedef float F __attribute__((vector_size(kLanes * 4)));
};

// Sums of kLanes / 4 vectors to 4 lanes each, one after the other: lane i of a vector plus lane i + kLanes / 2, and on.
template <int64_t kLanes>
inline typename Lanes<kLanes>::F fold_to_four(const typename Lanes<kLanes>::F* a) {
    if constexpr (kLanes == 16) {
        const auto x = FLASHD_SHUFFLE(a[0], a[1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                       FLASHD_SHUFFLE(a[0], a[1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
        const auto y = FLASHD_SHUFFLE(a[2], a[3], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                       FLASHD_SHUFFLE(a[2], a[3], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
        return FLASHD_SHUFFLE(x, y, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
               FLASHD_SHUFFLE(x, y, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    } else if constexpr (kLanes == 8) {
        return FLASHD_SHUFFLE(a[0], a[1], 0, 1, 2, 3, 8, 9, 10, 11) +
               FLASHD_SHUFFLE(a[0], a[1], 4, 5, 6, 7, 12, 13, 14, 15);
    } else {
        static_assert(kLanes == 4, "vectors have 4, 8 or 16 lanes");
        return a[0];
    }
}

// Per group of 4 lanes: pairs[even] lanes plus pairs[odd] lanes of both.
template <int64_t kLanes>
inline typename Lanes<kLanes>::F fold_halves(typename Lanes<kLanes>::F a, typename Lanes<kLanes>::F b) {
    if constexpr (kLanes == 16)
        return FLASHD_SHUFFLE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
               FLASHD_SHUFFLE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    else if constexpr (kLanes == 8)
        return FLASHD_SHUFFLE(a, b, 0, 1, 8, 9, 4, 5, 12, 13) + FLASHD_SHUFFLE(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
    else
        return FLASHD_SHUFFLE(a, b, 0, 1, 4, 5) + FLASHD_SHUFFLE(a, b, 2, 3, 6, 7);
}

template <int64_t kLanes>
inline typename Lanes<kLanes>::F fold_pairs(typename Lanes<kLanes>::F a, typename Lanes<kLanes>::F b) {
    if constexpr (kLanes == 16)
        return FLASHD_SHUFFLE(a, b, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30) +
               FLASHD_SHUFFLE(a, b, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
    else if constexpr (kLanes == 8)
        return FLASHD_SHUFFLE(a, b, 0, 2, 8, 10, 4, 6, 12, 14) + FLASHD_SHUFFLE(a, b, 1, 3, 9, 11, 5, 7, 13, 15);
    else
        return FLASHD_SHUFFLE(a, b, 0, 2, 4, 6) + FLASHD_SHUFFLE(a, b, 1, 3, 5, 7);
}

#undef FLASHD_SHUFFLE

// Sums of 4 positions' accumulators for W / 4 rows: lane 4 * row + position.
inline Vec::F fold_tile(const Vec::F (*acc)[W / 4]) {
    using F = Lanes<W>::F;
    F fours[kPositions];
    for (int p = 0; p < kPositions; ++p) {
        F rows[W / 4];
        for (int r = 0; r < W / 4; ++r) rows[r] = reinterpret_cast<F>(acc[p][r]);
        fours[p] = fold_to_four<W>(rows);
    }
    const F low = fold_halves<W>(fours[0], fours[1]), high = fold_halves<W>(fours[2], fours[3]);
    return reinterpret_cast<Vec::F>(fold_pairs<W>(low, high));
}

// Scores of kRows rows with 4 positions; rows of weights are kAttentionChunk apart.
template <int kRows, class T>
inline void score_tile(const T* const* keys, const float* const* q, int64_t width, float scale, float* weights) {
    constexpr int kFolded = W / 4, kFolds = (kRows + kFolded - 1) / kFolded;
    Vec::F acc[kFolds][kPositions][kFolded];
#pragma GCC unroll 4
    for (int f = 0; f < kFolds; ++f)
#pragma GCC unroll 4
        for (int p = 0; p < kPositions; ++p)
#pragma GCC unroll 4
            for (int r = 0; r < kFolded; ++r) acc[f][p][r] = Vec::zero();
    int64_t i = 0;
    for (; i + W <= width; i += W) {
        Vec::F query[kRows];
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) query[r] = Vec::load(q[r] + i);
#pragma GCC unroll 4
        for (int p = 0; p < kPositions; ++p) {
            const Vec::F key = Vec::load(keys[p] + i);
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) {
                Vec::F& sum = acc[r / kFolded][p][r % kFolded];
                sum = Vec::fma(key, query[r], sum);
            }
        }
    }
    for (int p = 0; i < width && p < kPositions; ++p) {
        const Vec::F key = load_part(keys[p] + i, width - i);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
            Vec::F& sum = acc[r / kFolded][p][r % kFolded];
            sum = Vec::fma(key, load_part(q[r] + i, width - i), sum);
        }
    }
#pragma GCC unroll 4
    for (int f = 0; f < kFolds; ++f) {
        float sums[W];
        Vec::store(sums, fold_tile(acc[f]) * Vec::set(scale));
        for (int r = 0; r < kFolded && f * kFolded + r < kRows; ++r)
            __builtin_memcpy(weights + (f * kFolded + r) * kAttentionChunk, sums + 4 * r, 4 * sizeof(float));
    }
}

// Scores of a block's rows with the first `positions` of a chunk; those behind a row's count are not for use.
template <class T>
inline void score_block(const T* k, int64_t width, int64_t positions, float scale, const Stream& stream,
                        QueryBlock& block) {
    const int64_t row_bytes = width * static_cast<int64_t>(sizeof(T));
    for (int64_t at = 0; at < positions; at += kPositions) {
        const T* keys[kPositions];
        for (int64_t p = 0; p < kPositions; ++p) keys[p] = k + (at + p < positions ? at + p : positions - 1) * width;
        stream.prefetch(at * row_bytes, kPositions * row_bytes);
        float* to = block.weights + at;
        int64_t r = 0;
        for (; r + kTileRows <= block.rows; r += kTileRows)
            score_tile<kTileRows>(keys, block.q + r, width, scale, to + r * kAttentionChunk);
        if (kTileRows > 2 && r + 2 <= block.rows) {
            score_tile<2>(keys, block.q + r, width, scale, to + r * kAttentionChunk);
            r += 2;
        }
        if (r < block.rows) score_tile<1>(keys, block.q + r, width, scale, to + r * kAttentionChunk);
    }
}

// Scores become weights exp(score - top), zero up to a whole vector. A NaN is not the top, but stays a NaN.
inline void soften(float* weights, int64_t count, float* top, float* sum) {
    const int64_t padded = (count + W - 1) / W * W;
    for (int64_t i = count; i < padded; ++i) weights[i] = -__builtin_inff();
    Vec::F highest = Vec::set(-__builtin_inff());
    for (int64_t i = 0; i < padded; i += W) {
        const Vec::F score = Vec::load(weights + i);
        highest = pick(score > highest, score, highest);
    }
    float lanes[W];
    Vec::store(lanes, highest);
    *top = lanes[0];
    for (int64_t i = 1; i < W; ++i)
        if (lanes[i] > *top) *top = lanes[i];
    // Where all is -inf, -inf less itself would be NaN: but a chunk that nobody looks at weighs nothing.
    const Vec::F shift = Vec::set(*top == -__builtin_inff() ? 0.0f : *top);
    Vec::F total = Vec::zero();
    for (int64_t i = 0; i < padded; i += W) {
        const Vec::F weight = vexp(Vec::load(weights + i) - shift);
        Vec::store(weights + i, weight);
        total = Vec::add(total, weight);
    }
    *sum = Vec::sum(total);
}

// values[row] += weights[row][p] * v[p] for positions in order, kColumns vectors wide.
template <int kRows, int kColumns, class T>
inline void mix_tile(const T* v, int64_t width, int64_t positions, const float* weights, float* const* values,
                     int64_t column) {
    Vec::F acc[kRows][kColumns];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < kColumns; ++c) acc[r][c] = Vec::load(values[r] + column + c * W);
    for (int64_t p = 0; p < positions; ++p) {
        const T* from = v + p * width + column;
        Vec::F factor[kRows];
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) factor[r] = Vec::set(weights[r * kAttentionChunk + p]);
#pragma GCC unroll 8
        for (int c = 0; c < kColumns; ++c) {
            const Vec::F value = Vec::load(from + c * W);
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) acc[r][c] = Vec::fma(factor[r], value, acc[r][c]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < kColumns; ++c) Vec::store(values[r] + column + c * W, acc[r][c]);
}

template <int kRows, class T>
inline void mix_rows(const T* v, int64_t width, int64_t positions, const float* weights, float* const* values) {
    constexpr int kWide = kRows == 1 ? 8 : 4;
    int64_t c = 0;
    for (; c + kWide * W <= width; c += kWide * W) mix_tile<kRows, kWide>(v, width, positions, weights, values, c);
    for (; c + 2 * W <= width; c += 2 * W) mix_tile<kRows, 2>(v, width, positions, weights, values, c);
    for (; c + W <= width; c += W) mix_tile<kRows, 1>(v, width, positions, weights, values, c);
    for (int r = 0; c < width && r < kRows; ++r) {
        Vec::F acc = load_part(values[r] + c, width - c);
        for (int64_t p = 0; p < positions; ++p)
            acc = Vec::fma(Vec::set(weights[r * kAttentionChunk + p]), load_part(v + p * width + c, width - c), acc);
        store_part(values[r] + c, acc, width - c);
    }
}

template <class T>
inline void mix_block(const T* v, int64_t width, int64_t positions, const Stream& stream, const QueryBlock& block) {
    const int64_t row_bytes = width * static_cast<int64_t>(sizeof(T));
    for (int64_t at = 0; at < positions; at += kMixBlock) {
        const int64_t stop = at + kMixBlock < positions ? at + kMixBlock : positions;
        stream.prefetch(at * row_bytes, (stop - at) * row_bytes);
        const T* from = v + at * width;
        int64_t r = 0;
        // Rows see ever more positions: the first of a tile decides.
        for (; r + kTileRows <= block.rows; r += kTileRows)
            if (block.count[r] >= stop)
                mix_rows<kTileRows>(from, width, stop - at, block.weights + r * kAttentionChunk + at, block.values + r);
            else
                for (int64_t one = r; one < r + kTileRows; ++one) {
                    const int64_t end = block.count[one] < stop ? block.count[one] : stop;
                    mix_rows<1>(from, width, end - at, block.weights + one * kAttentionChunk + at, block.values + one);
                }
        for (; r < block.rows; ++r) {
            const int64_t end = block.count[r] < stop ? block.count[r] : stop;
            mix_rows<1>(from, width, end - at, block.weights + r * kAttentionChunk + at, block.values + r);
        }
    }
}

// Fills a block with the rows from `row` on that see something of a chunk; returns the row after them.
inline int64_t gather_rows(const AttentionArgs& a, const AttentionParts& parts, int64_t kv_head, int64_t chunk,
                           int64_t row, QueryBlock& block) {
    const int64_t group = a.heads / a.kv_heads, begin = chunk * kAttentionChunk;
    block.rows = 0;
    for (; row < a.tokens * group && block.rows < kRowBlock; ++row) {
        const int64_t token = row / group, sees = a.length - a.tokens + 1 + token - begin;
        if (sees <= 0) continue;
        const int64_t out_row = token * a.heads + kv_head * group + row % group;
        block.q[block.rows] = a.q + out_row * a.width;
        block.part[block.rows] = out_row * parts.chunks + chunk;
        block.values[block.rows] = parts.values + block.part[block.rows] * a.width;
        block.count[block.rows] = sees < kAttentionChunk ? sees : kAttentionChunk;
        ++block.rows;
    }
    return row;
}

template <class T>
void attend_chunks(const AttentionArgs& a, const AttentionParts& parts, int64_t first, int64_t last) {
    const int64_t rows = a.tokens * (a.heads / a.kv_heads);
    const auto offset_of = [&](int64_t item) {
        return (item / parts.chunks * a.capacity + item % parts.chunks * kAttentionChunk) * a.width;
    };
    QueryBlock block;
    for (int64_t item = first; item < last; ++item) {
        const int64_t kv_head = item / parts.chunks, chunk = item % parts.chunks;
        const int64_t left = a.length - chunk * kAttentionChunk;
        const int64_t positions = left < kAttentionChunk ? left : kAttentionChunk;
        const T* k = static_cast<const T*>(a.k) + offset_of(item);
        const T* v = static_cast<const T*>(a.v) + offset_of(item);
        const T* next = item + 1 < last ? static_cast<const T*>(a.k) + offset_of(item + 1) : nullptr;
        const int64_t bytes = positions * a.width * static_cast<int64_t>(sizeof(T));
        const Stream keys{reinterpret_cast<const char*>(k), bytes, reinterpret_cast<const char*>(v)};
        const Stream values{reinterpret_cast<const char*>(v), bytes, reinterpret_cast<const char*>(next)};
        for (int64_t row = 0; row < rows;) {
            row = gather_rows(a, parts, kv_head, chunk, row, block);
            score_block(k, a.width, positions, a.scale, keys, block);
            for (int64_t r = 0; r < block.rows; ++r) {
                float* weights = block.weights + r * kAttentionChunk;
                soften(weights, block.count[r], parts.tops + block.part[r], parts.sums + block.part[r]);
                __builtin_memset(block.values[r], 0, static_cast<size_t>(a.width) * sizeof(float));
            }
            mix_block(v, a.width, positions, values, block);
        }
    }
}

void attend(const AttentionArgs& a, const AttentionParts& parts, int64_t first, int64_t last) {
    if (a.type == Type::f16)
        attend_chunks<F16>(a, parts, first, last);
    else
        attend_chunks<float>(a, parts, first, last);
}

// out[row] = sum over its chunks, in order, of exp(top - highest top) * values, over the same of the sums.
void combine(const AttentionArgs& a, const AttentionParts& parts, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
        const int64_t sees = a.length - a.tokens + 1 + row / a.heads;
        const int64_t chunks = (sees + kAttentionChunk - 1) / kAttentionChunk;
        float* tops = parts.tops + row * parts.chunks;  // become factors
        const float* sums = parts.sums + row * parts.chunks;
        float highest = tops[0];
        for (int64_t c = 1; c < chunks; ++c)
            if (tops[c] > highest) highest = tops[c];
        double total = 0.0;
        for (int64_t c = 0; c < chunks; c += W) {
            const int64_t count = chunks - c < W ? chunks - c : W;
            store_part(tops + c, vexp(load_part(tops + c, count) - Vec::set(highest)), count);
            for (int64_t i = c; i < c + count; ++i) total += static_cast<double>(tops[i]) * sums[i];
        }
        const Vec::F divisor = Vec::set(static_cast<float>(total));
        const float* values = parts.values + row * parts.chunks * a.width;
        float* out = a.out + row * a.width;
        int64_t i = 0;
        for (; i + W <= a.width; i += W) {
            Vec::F acc = Vec::zero();
            for (int64_t c = 0; c < chunks; ++c)
                acc = Vec::fma(Vec::set(tops[c]), Vec::load(values + c * a.width + i), acc);
            Vec::store(out + i, acc / divisor);
        }
        if (i == a.width) continue;
        Vec::F acc = Vec::zero();
        for (int64_t c = 0; c < chunks; ++c)
            acc = Vec::fma(Vec::set(tops[c]), load_part(values + c * a.width + i, a.width - i), acc);
        store_part(out + i, acc / divisor, a.width - i);
    }
}
