// Causal attention of the many tokens of a prompt over a KV cache.
//
// The lanes are queries: tokens, and within a token the heads that share keys and values, so that
// positions ascend. Keys pass in blocks at fixed positions with a running maximum (Milakov and
// Gimelshein, "Online normalizer calculation for softmax", 2018): a query's bits depend on its own
// keys alone.

struct Queries {
    int64_t fetched = 0;
    int64_t kv_head, next_head, group, vectors, lanes, first, count;  // of tokens * group queries
    float* weights;   // keys or values as float32
    float* queries;   // [width, lanes], scaled
    float* scores;    // [keys of a block, lanes]
    float* mixed;     // [width, lanes]
    float* highest;   // [lanes]
    float* totals;    // [lanes]
    int64_t* limits;  // [lanes]: keys that a query sees, ascending

    Queries(const AttentionArgs& a, int64_t heads_at_once, int64_t item, float* scratch) {
        group = a.heads / a.kv_heads;
        const int64_t total = a.tokens * group;
        const int64_t all = divide_up(total, W);
        const int64_t blocks = divide_up(all, Vec::kPanelVectors);
        const int64_t start = item / (heads_at_once * blocks) * heads_at_once;  // the first of these heads
        const int64_t heads = start + heads_at_once < a.kv_heads ? heads_at_once : a.kv_heads - start;
        const int64_t turn = item - start * blocks;
        kv_head = start + turn % heads;
        next_head = kv_head + heads_at_once;
        const int64_t block = blocks - 1 - turn / heads;  // the longest first
        first = block * all / blocks * W;
        vectors = (block + 1) * all / blocks - block * all / blocks;
        lanes = vectors * W;
        count = first + lanes < total ? lanes : total - first;
        weights = scratch;
        queries = weights + kPanelOutputs * kPanelSteps;
        scores = queries + a.width * lanes;
        mixed = scores + (kPanelSteps + kPanelSpare) * lanes;
        highest = mixed + (a.width + kPanelSpare) * lanes;
        totals = highest + lanes;
        limits = reinterpret_cast<int64_t*>(totals + lanes);
    }

    int64_t offset(const AttentionArgs& a, int64_t lane) const { return offset_of(a, kv_head, first + lane); }
    int64_t offset_of(const AttentionArgs& a, int64_t head, int64_t query) const {
        return (query / group * a.heads + head * group + query % group) * a.width;
    }

    // Some of what will be written at the end of this item, and of the queries of the next.
    void fetch_ahead(const AttentionArgs& a) {
        for (const int64_t stop = fetched + 4; fetched < stop && fetched < count; ++fetched) {
            fetch<1>(a.out + offset(a, fetched), a.width);
            if (first > 0)
                fetch<0>(a.q + offset_of(a, kv_head, first - 1 - fetched % first), a.width);
            else if (next_head < a.kv_heads)
                fetch<0>(a.q + offset_of(a, next_head, a.tokens * group - 1 - fetched), a.width);
        }
    }
    // The first vector with a query that sees `key`; `vectors` when there is none.
    int64_t first_vector(int64_t key) const {
        int64_t v = 0;
        while (v < vectors && limits[v * W + W - 1] <= key) ++v;
        return v;
    }

    void start(const AttentionArgs& a) {
        to_lanes([&](int64_t t) { return a.q + offset(a, t); }, count, nullptr, a.width, queries, lanes);
        const Vec::F scale = Vec::set(a.scale);
        for (int64_t i = 0; i < a.width * lanes; i += W) {
            Vec::store(queries + i, Vec::load(queries + i) * scale);
            Vec::store(mixed + i, Vec::zero());
        }
        for (int64_t t = 0; t < lanes; ++t) {
            const int64_t query = first + (t < count ? t : count - 1);
            limits[t] = a.length - a.tokens + 1 + query / group;
            highest[t] = -__builtin_inff();
            totals[t] = 0.0f;
        }
    }

    void finish(const AttentionArgs& a) {
        for (int64_t i = 0; i < lanes; i += W) {
            const Vec::F share = Vec::set(1.0f) / Vec::load(totals + i);
            for (int64_t c = 0; c < a.width; ++c) {
                float* value = mixed + c * lanes + i;
                Vec::store(value, Vec::load(value) * share);
            }
        }
        from_lanes(mixed, lanes, count, nullptr, a.width, [&](int64_t t) { return a.out + offset(a, t); });
    }
};

// Keys or values of one KV head.
template <class T>
struct Rows {
    const T* data;
    int64_t width, count;

    const T* row(int64_t position) const { return data + position * width; }
    void fetch_rows(int64_t first, int64_t last) const {
        if (last > count) last = count;
        if (first < last) fetch(row(first), (last - first) * width);
    }
};

// Scores of `keys` keys from position `at` on.
template <class T>
inline void score(const AttentionArgs& a, Queries& b, const Rows<T>& k, const Rows<T>& v, int64_t at, int64_t keys) {
    for (int64_t c = 0; c < a.width; c += kPanelSteps) {
        const int64_t steps = c + kPanelSteps < a.width ? kPanelSteps : a.width - c;
        for (int64_t start = 0; start < keys; start += kPanelOutputs) {
            const int64_t stop = start + kPanelOutputs < keys ? start + kPanelOutputs : keys;
            for (int64_t s = start; s < stop; ++s)
                widen_row(k.row(at + s) + c, steps, b.weights + (s - start) * kPanelSteps);
            for (int64_t s = start; s < stop; s += Vec::kPanelRows) {
                const int64_t skip = b.first_vector(at + s);
                if (c == 0) {
                    b.fetch_ahead(a);
                    k.fetch_rows(at + s + kPanelOutputs, at + s + kPanelOutputs + Vec::kPanelRows);
                    v.fetch_rows(at + s, at + s + Vec::kPanelRows);
                }
                panel<ByOutput>(b.weights + (s - start) * kPanelSteps, stop - s, b.queries + c * b.lanes + skip * W,
                                b.vectors - skip, steps, c == 0, b.scores + s * b.lanes + skip * W, b.lanes);
            }
        }
    }
}

inline Vec::F greater(Vec::F x, Vec::F other) { return pick(x > other, x, other); }  // NaN never wins

// What `each(s, chain)` is called for: all s < count, in four chains, so that none waits for the one before.
template <class Each>
inline void in_four_chains(int64_t count, Each each) {
    int64_t s = 0;
    for (; s + 4 <= count; s += 4)
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) each(s + j, j);
#pragma GCC unroll 4
    for (int j = 0; j < 3; ++j)
        if (s + j < count) each(s + j, j);
}

// Scores of a vector of queries become exp(score - highest so far); returns what scales all before them.
inline Vec::F exp_lanes(float* scores, int64_t stride, int64_t count, float* highest, float* totals) {
    const Vec::F lowest = Vec::set(-__builtin_inff());
    const Vec::F before = Vec::load(highest);
    Vec::F tops[4] = {before, before, before, before};
    in_four_chains(count, [&](int64_t s, int j) { tops[j] = greater(Vec::load(scores + s * stride), tops[j]); });
    const Vec::F top = greater(greater(tops[0], tops[1]), greater(tops[2], tops[3]));
    Vec::store(highest, top);
    // Nothing but -infinity so far: subtracting 0 gives weights of 0, not NaN.
    const Vec::F base = pick(top == lowest, Vec::zero(), top);
    const Vec::F factor = vexp_negative(before - base);
    Vec::F sums[4] = {Vec::load(totals) * factor, Vec::zero(), Vec::zero(), Vec::zero()};
    in_four_chains(count, [&](int64_t s, int j) {
        const Vec::F weight = vexp_negative(Vec::load(scores + s * stride) - base);
        Vec::store(scores + s * stride, weight);
        sums[j] = Vec::add(sums[j], weight);
    });
    Vec::store(totals, Vec::add(Vec::add(sums[0], sums[1]), Vec::add(sums[2], sums[3])));
    return factor;
}

inline void exp_block(const AttentionArgs& a, const Queries& b, int64_t at, int64_t keys) {
    for (int64_t i = 0; i < b.lanes; i += W) {
        int64_t seen = b.limits[i + W - 1] - at;
        if (seen <= 0) continue;
        if (seen > keys) seen = keys;
        for (int64_t s = b.limits[i] > at ? b.limits[i] - at : 0; s < seen; ++s)
            for (int64_t t = i; t < i + W && b.limits[t] <= at + s; ++t)
                b.scores[s * b.lanes + t] = -__builtin_inff();
        const Vec::F factor = exp_lanes(b.scores + i, b.lanes, seen, b.highest + i, b.totals + i);
        for (int64_t c = 0; at > 0 && c < a.width; ++c) {
            float* mixed = b.mixed + c * b.lanes + i;
            Vec::store(mixed, Vec::load(mixed) * factor);
        }
    }
}

// A weight of 0 hides no infinity: values that are not finite and that some query must not see leave the
// panel and are added here, to the queries that see them.
inline void add_unseen(const Queries& b, float* values, int64_t width, int64_t at, int64_t key, float* mixed) {
    Vec::F check = Vec::zero();
    int64_t c = 0;
    for (; c + W <= width; c += W) check = Vec::fma(Vec::load(values + c), Vec::zero(), check);
    float rest = Vec::sum(check);
    for (; c < width; ++c) rest += values[c] * 0.0f;
    if (rest == 0.0f) return;
    for (c = 0; c < width; ++c) {
        if (values[c] * 0.0f == 0.0f) continue;
        for (int64_t t = 0; t < b.lanes; ++t)
            if (b.limits[t] > at + key) mixed[c * b.lanes + t] += b.scores[key * b.lanes + t] * values[c];
        values[c] = 0.0f;
    }
}

// Adds the values of `keys` keys, weighted.
template <class T>
inline void mix_block(const AttentionArgs& a, const Queries& b, const Rows<T>& v, int64_t at, int64_t keys) {
    for (int64_t c = 0; c < a.width; c += kPanelOutputs) {
        const int64_t width = c + kPanelOutputs < a.width ? kPanelOutputs : a.width - c;
        float* mixed = b.mixed + c * b.lanes;
        for (int64_t s = 0; s < keys; ++s) {
            float* values = b.weights + s * kPanelOutputs;
            widen_row(v.row(at + s) + c, width, values);
            if (at + s >= b.limits[0]) add_unseen(b, values, width, at, s, mixed);
        }
        int64_t stop;
        for (int64_t s = 0; s < keys; s = stop) {
            const int64_t first = b.first_vector(at + s);
            const int64_t limit = b.limits[first * W + W - 1] - at;
            stop = limit < keys ? limit : keys;
            for (int64_t o = 0; o < width; o += Vec::kPanelRows)
                panel<ByStep>(b.weights + s * kPanelOutputs + o, width - o, b.scores + s * b.lanes + first * W,
                              b.vectors - first, stop - s, false, mixed + o * b.lanes + first * W, b.lanes);
        }
    }
}

template <class T>
void attend_item(const AttentionArgs& a, int64_t heads_at_once, int64_t item, float* scratch) {
    Queries block(a, heads_at_once, item, scratch);
    block.start(a);
    const int64_t last = block.limits[block.lanes - 1];
    const int64_t head = block.kv_head * a.capacity * a.width;
    const Rows<T> k{static_cast<const T*>(a.k) + head, a.width, last};
    const Rows<T> v{static_cast<const T*>(a.v) + head, a.width, last};
    for (int64_t at = 0; at < last; at += kPanelSteps) {
        const int64_t keys = at + kPanelSteps < last ? kPanelSteps : last - at;
        score(a, block, k, v, at, keys);
        exp_block(a, block, at, keys);
        mix_block(a, block, v, at, keys);
    }
    block.finish(a);
}

void attention_prompt(const AttentionArgs& a, int64_t heads_at_once, int64_t first, int64_t last, float* scratch) {
    for (int64_t i = first; i < last; ++i) {
        if (a.type == Type::f16)
            attend_item<F16>(a, heads_at_once, i, scratch);
        else
            attend_item<float>(a, heads_at_once, i, scratch);
    }
}
