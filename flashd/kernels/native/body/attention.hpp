// Attention of few queries over a KV cache: decoding.
//
// An item is one KV head's chunk of positions. All query rows that read this head go through it while
// it lies in the caches: scores, weights exp(score - highest), weighted values. Every number is summed
// in one order, whatever shares its tile: a score over the lanes of one accumulator, a value over the
// positions of the chunk, a row over its chunks.

constexpr int64_t kRowBlock = 16;                // query rows at a time: their scores stay in the L1 cache
constexpr int64_t kSegment = 16;                 // positions that stay there for all rows of a block
constexpr int64_t kTileRows = W > 8 ? W / 4 : 2;  // query rows of a tile: its accumulators fill the registers

// The hardware follows a stream only after its first misses, and not across pages. What is a segment ahead
// comes to the L1 cache, what is some kilobytes ahead to the L2.
constexpr int64_t kFarBytes = 8192;

// Where to look ahead from some place; null: nowhere.
struct Ahead {
    const char* near;
    const char* far;

    Ahead operator+(int64_t bytes) const { return near ? Ahead{near + bytes, far + bytes} : *this; }

    // Asks for kBytes from a place on. A line at a time between the products: a burst would stop them
    // until memory has answered.
    template <int64_t kBytes>
    FLASHD_INLINE void prefetch(int64_t offset) const {
        if (!near) return;
#pragma GCC unroll 16
        for (int64_t i = 0; i < kBytes; i += 64) {
            __builtin_prefetch(near + offset + i);
            __builtin_prefetch(far + offset + i, 0, 2);
        }
    }
};

// What a thread reads next: the rest of one array, then the start of another.
struct Stream {
    const char* from;
    int64_t bytes;
    const char* then;  // null: nothing more

    const char* at(int64_t offset) const {
        return offset < bytes ? from + offset : then ? then + (offset - bytes) : nullptr;
    }
    // In whole segments, so that what lies behind the end is not asked for.
    Ahead ahead_of(int64_t offset, int64_t segment_bytes) const {
        const int64_t segments = kFarBytes > 2 * segment_bytes ? divide_up(kFarBytes, segment_bytes) : 2;
        const char* near = at(offset + segment_bytes);
        const char* far = at(offset + segments * segment_bytes);
        return Ahead{near, far ? far : near};
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

template <int64_t kCount>
struct RowTile {
    static constexpr int64_t kRows = kCount;
};

// Calls use(tile, first row) for tiles of up to kTileRows rows; a group of three is common enough for its own.
template <class Use>
inline void for_row_tiles(int64_t rows, Use use) {
    int64_t r = 0;
    for (; rows - r >= kTileRows && rows - r != 3; r += kTileRows) use(RowTile<kTileRows>{}, r);
    if (rows - r == 3) use(RowTile<3>{}, r);
    if (rows - r == 2) use(RowTile<2>{}, r);
    if (rows - r == 1) use(RowTile<1>{}, r);
}

// acc[p][r] = the products of keys[p] and q[r], summed but for the lanes.
template <int kRows, class T>
FLASHD_INLINE void score_tile(const T* const* keys, const float* const* q, int64_t width, Ahead ahead,
                          Vec::F (&acc)[kPositions][kRows]) {
    constexpr int64_t kItemBytes = kPositions * static_cast<int64_t>(sizeof(T));
#pragma GCC unroll 4
    for (int p = 0; p < kPositions; ++p)
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) acc[p][r] = Vec::zero();
    int64_t i = 0;
    for (; i + W <= width; i += W) {
        ahead.prefetch<W * kItemBytes>(i * kItemBytes);
        Vec::F query[kRows];
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) query[r] = Vec::load(q[r] + i);
#pragma GCC unroll 4
        for (int p = 0; p < kPositions; ++p) {
            const Vec::F key = in_register(Vec::load(keys[p] + i));
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) acc[p][r] = Vec::fma(key, query[r], acc[p][r]);
        }
    }
    for (int p = 0; i < width && p < kPositions; ++p) {
        const Vec::F key = load_part(keys[p] + i, width - i);
        for (int r = 0; r < kRows; ++r) acc[p][r] = Vec::fma(key, load_part(q[r] + i, width - i), acc[p][r]);
    }
}

// Scores of kRows rows with `count` positions; rows of `weights` are kAttentionChunk apart. Few rows take
// several groups of positions together, to fill what is folded.
template <int kRows, class T>
inline void score_rows(const T* k, int64_t width, int64_t count, float scale, const float* const* q,
                       Ahead ahead, float* weights) {
    constexpr int kFolded = W / 4, kGroups = kFolded > kRows ? kFolded / kRows : 1;
    constexpr int kFolds = divide_up(kGroups * kRows, kFolded);
    for (int64_t at = 0; at < count; at += kGroups * kPositions) {
        Vec::F sums[kFolds][kPositions][kFolded];
#pragma GCC unroll 4
        for (int p = 0; p < kPositions; ++p)
#pragma GCC unroll 4
            for (int r = 0; r < kFolded; ++r)
                if ((kFolds - 1) * kFolded + r >= kGroups * kRows) sums[kFolds - 1][p][r] = Vec::zero();
#pragma GCC unroll 4
        for (int g = 0; g < kGroups; ++g) {
            const int64_t first = at + g * kPositions;
            // There may be nothing behind the last position: its key stands in.
            const T* keys[kPositions];
            for (int64_t p = 0; p < kPositions; ++p) keys[p] = k + (first + p < count ? first + p : count - 1) * width;
            const int64_t offset = first * width * static_cast<int64_t>(sizeof(T));
            Vec::F acc[kPositions][kRows];
            score_tile<kRows>(keys, q, width, ahead + offset, acc);
#pragma GCC unroll 4
            for (int p = 0; p < kPositions; ++p)
#pragma GCC unroll 4
                for (int r = 0; r < kRows; ++r)
                    sums[(g * kRows + r) / kFolded][p][(g * kRows + r) % kFolded] = acc[p][r];
        }
        float folded[kFolds * W];
#pragma GCC unroll 4
        for (int f = 0; f < kFolds; ++f) Vec::store(folded + f * W, fold_tile(sums[f]) * Vec::set(scale));
#pragma GCC unroll 4
        for (int i = 0; i < kGroups * kRows; ++i)
            __builtin_memcpy(weights + i % kRows * kAttentionChunk + at + i / kRows * kPositions,
                             folded + i * kPositions, kPositions * sizeof(float));
    }
}

// Scores become weights exp(score - top), zero up to a whole vector. A NaN is not the top, but stays a NaN.
inline void exp_scores(float* weights, int64_t count, float* top, float* sum) {
    const int64_t padded = round_up(count, W);
    for (int64_t i = count; i < padded; ++i) weights[i] = -__builtin_inff();
    Vec::F highest = Vec::set(-__builtin_inff());
    for (int64_t i = 0; i < padded; i += W) {
        const Vec::F score = Vec::load(weights + i);
        highest = pick(score > highest, score, highest);
    }
    float lanes[W];
    Vec::store(lanes, highest);
#pragma GCC unroll 4
    for (int64_t half = W / 2; half; half /= 2)
#pragma GCC unroll 8
        for (int64_t i = 0; i < half; ++i) lanes[i] = lanes[i + half] > lanes[i] ? lanes[i + half] : lanes[i];
    *top = lanes[0];
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
                     int64_t column, Ahead ahead) {
    constexpr int64_t kItemBytes = sizeof(T);
    Vec::F acc[kRows][kColumns];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < kColumns; ++c) acc[r][c] = Vec::load(values[r] + column + c * W);
    for (int64_t p = 0; p < positions; ++p) {
        const T* from = v + p * width + column;
        ahead.prefetch<kColumns * W * kItemBytes>((p * width + column) * kItemBytes);
        Vec::F factor[kRows];
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) factor[r] = Vec::set(weights[r * kAttentionChunk + p]);
#pragma GCC unroll 8
        for (int c = 0; c < kColumns; ++c) {
            const Vec::F value = in_register(Vec::load(from + c * W));
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
inline void mix_rows(const T* v, int64_t width, int64_t positions, const float* weights, float* const* values,
                     Ahead ahead) {
    constexpr int kWide = kRows == 1 ? 8 : 4;
    int64_t c = 0;
    for (; c + kWide * W <= width; c += kWide * W)
        mix_tile<kRows, kWide>(v, width, positions, weights, values, c, ahead);
    for (; c + 4 * W <= width; c += 4 * W) mix_tile<kRows, 4>(v, width, positions, weights, values, c, ahead);
    for (; c + W <= width; c += W) mix_tile<kRows, 1>(v, width, positions, weights, values, c, ahead);
    for (int r = 0; c < width && r < kRows; ++r) {
        Vec::F acc = load_part(values[r] + c, width - c);
        for (int64_t p = 0; p < positions; ++p)
            acc = Vec::fma(Vec::set(weights[r * kAttentionChunk + p]), load_part(v + p * width + c, width - c), acc);
        store_part(values[r] + c, acc, width - c);
    }
}

// Adds positions at..at + count of a chunk to a block's rows.
template <class T>
inline void mix_segment(const T* v, int64_t width, int64_t at, int64_t count, const QueryBlock& block,
                        Ahead ahead) {
    const auto mix = [&](auto tile, int64_t r, int64_t positions, Ahead next) {
        mix_rows<tile.kRows>(v, width, positions, block.weights + r * kAttentionChunk + at, block.values + r, next);
    };
    for_row_tiles(block.rows, [&](auto tile, int64_t r) {
        const Ahead next = r ? Ahead{} : ahead;
        // Rows see ever more positions: the first of a tile decides.
        if (block.count[r] >= at + count) return mix(tile, r, count, next);
        for (int64_t one = r; one < r + tile.kRows; ++one)
            mix(RowTile<1>{}, one, block.count[one] < at + count ? block.count[one] - at : count, Ahead{});
    });
}

// The chunk's keys, the softmax of its part, and its values, for a block's rows.
template <class T>
inline void attend_block(const AttentionArgs& a, const AttentionParts& parts, const T* k, const T* v,
                         int64_t positions, const Stream& keys, const Stream& values, QueryBlock& block) {
    const int64_t row_bytes = a.width * static_cast<int64_t>(sizeof(T));
    const auto for_segments = [&](const Stream& stream, auto use) {
        for (int64_t at = 0; at < positions; at += kSegment)
            use(at, at + kSegment < positions ? kSegment : positions - at,
                stream.ahead_of(at * row_bytes, kSegment * row_bytes));
    };
    for_segments(keys, [&](int64_t at, int64_t count, Ahead ahead) {
        for_row_tiles(block.rows, [&](auto tile, int64_t r) {
            score_rows<tile.kRows>(k + at * a.width, a.width, count, a.scale, block.q + r, r ? Ahead{} : ahead,
                                   block.weights + r * kAttentionChunk + at);
        });
    });
    for (int64_t r = 0; r < block.rows; ++r) {
        float* weights = block.weights + r * kAttentionChunk;
        exp_scores(weights, block.count[r], parts.tops + block.part[r], parts.sums + block.part[r]);
        __builtin_memset(block.values[r], 0, static_cast<size_t>(a.width) * sizeof(float));
    }
    for_segments(values, [&](int64_t at, int64_t count, Ahead ahead) {
        mix_segment(v + at * a.width, a.width, at, count, block, ahead);
    });
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
    const int64_t row_bytes = a.width * static_cast<int64_t>(sizeof(T));
    QueryBlock block;
    for (int64_t item = first; item < last; ++item) {
        const int64_t kv_head = item / parts.chunks, chunk = item % parts.chunks;
        const int64_t left = a.length - chunk * kAttentionChunk;
        const int64_t positions = left < kAttentionChunk ? left : kAttentionChunk;
        const T* k = static_cast<const T*>(a.k) + offset_of(item);
        const T* v = static_cast<const T*>(a.v) + offset_of(item);
        const T* next = item + 1 < last ? static_cast<const T*>(a.k) + offset_of(item + 1) : nullptr;
        const Stream keys{reinterpret_cast<const char*>(k), positions * row_bytes, reinterpret_cast<const char*>(v)};
        const Stream values{reinterpret_cast<const char*>(v), positions * row_bytes,
                            reinterpret_cast<const char*>(next)};
        for (int64_t row = 0; row < rows;) {
            row = gather_rows(a, parts, kv_head, chunk, row, block);
            attend_block(a, parts, k, v, positions, keys, values, block);
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
        const int64_t chunks = divide_up(sees, kAttentionChunk);
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
