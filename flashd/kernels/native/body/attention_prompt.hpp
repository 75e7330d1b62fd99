// Causal attention of the many tokens of a prompt over a KV cache.
//
// The lanes are queries: tokens, and within a token the heads that share keys and values, so that
// positions ascend. Keys pass in blocks at fixed positions with a running maximum (Milakov and
// Gimelshein, "Online normalizer calculation for softmax", 2018): a query's bits depend on its own
// keys alone.

struct Queries {
    int64_t kv_head, group, vectors, lanes, first, count;  // of tokens * group queries
    float* weights;   // keys or values as float32
    float* queries;   // [width, lanes], scaled
    float* scores;    // [keys of a block, lanes]
    float* mixed;     // [width, lanes]
    float* highest;   // [lanes]
    float* totals;    // [lanes]
    int64_t* limits;  // [lanes]: keys that a query sees, ascending

    Queries(const AttentionArgs& a, int64_t item, float* scratch) {
        group = a.heads / a.kv_heads;
        const int64_t total = a.tokens * group;
        const int64_t all = (total + W - 1) / W;
        const int64_t blocks = (all + Vec::kPanelVectors - 1) / Vec::kPanelVectors;
        kv_head = item % a.kv_heads;
        const int64_t block = blocks - 1 - item / a.kv_heads;  // the longest first
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

    int64_t offset(const AttentionArgs& a, int64_t lane) const {
        const int64_t query = first + lane;
        return (query / group * a.heads + kv_head * group + query % group) * a.width;
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

// Scores of `keys` keys from position `at` on.
template <class T>
inline void score(const AttentionArgs& a, const Queries& b, const T* k, int64_t at, int64_t keys) {
    __builtin_memset(b.scores, 0, static_cast<size_t>(keys * b.lanes) * sizeof(float));
    for (int64_t c = 0; c < a.width; c += kPanelSteps) {
        const int64_t steps = c + kPanelSteps < a.width ? kPanelSteps : a.width - c;
        for (int64_t start = 0; start < keys; start += kPanelOutputs) {
            const int64_t stop = start + kPanelOutputs < keys ? start + kPanelOutputs : keys;
            for (int64_t s = start; s < stop; ++s)
                widen_row(k + (at + s) * a.width + c, steps, b.weights + (s - start) * kPanelSteps);
            for (int64_t s = start; s < stop; s += Vec::kPanelRows) {
                const int64_t v = b.first_vector(at + s);
                panel<ByOutput>(b.weights + (s - start) * kPanelSteps, stop - s, b.queries + c * b.lanes + v * W,
                                b.vectors - v, steps, b.scores + s * b.lanes + v * W, b.lanes);
            }
        }
    }
}

// Scores become exp(score - highest so far); what was mixed before is scaled to match.
inline void soften(const AttentionArgs& a, const Queries& b, int64_t at, int64_t keys) {
    const Vec::F infinity = Vec::set(__builtin_inff());
    for (int64_t i = 0; i < b.lanes; i += W) {
        int64_t seen = b.limits[i + W - 1] - at;
        if (seen <= 0) continue;
        if (seen > keys) seen = keys;
        for (int64_t s = b.limits[i] > at ? b.limits[i] - at : 0; s < seen; ++s)
            for (int64_t t = i; t < i + W && b.limits[t] <= at + s; ++t)
                b.scores[s * b.lanes + t] = -__builtin_inff();
        const Vec::F before = Vec::load(b.highest + i);
        Vec::F tops[4] = {before, before, before, before};
        for (int64_t s = 0; s < seen; ++s) {  // NaN never wins, but stays in the scores
            const Vec::F x = Vec::load(b.scores + s * b.lanes + i);
            tops[s % 4] = pick(x > tops[s % 4], x, tops[s % 4]);
        }
        Vec::F top = tops[0];
        for (int j = 1; j < 4; ++j) top = pick(tops[j] > top, tops[j], top);
        Vec::store(b.highest + i, top);
        // Nothing but -infinity so far: subtracting 0 gives weights of 0, not NaN.
        const Vec::F base = pick(top == Vec::zero() - infinity, Vec::zero(), top);
        const Vec::F factor = vexp(before - base);
        Vec::F sums[4] = {Vec::load(b.totals + i) * factor, Vec::zero(), Vec::zero(), Vec::zero()};
        for (int64_t s = 0; s < seen; ++s) {
            float* scores = b.scores + s * b.lanes + i;
            const Vec::F weight = vexp(Vec::load(scores) - base);
            Vec::store(scores, weight);
            sums[s % 4] = Vec::add(sums[s % 4], weight);
        }
        Vec::store(b.totals + i, Vec::add(Vec::add(sums[0], sums[1]), Vec::add(sums[2], sums[3])));
        for (int64_t c = 0; c < a.width; ++c) {
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
inline void mix_block(const AttentionArgs& a, const Queries& b, const T* v, int64_t at, int64_t keys) {
    for (int64_t c = 0; c < a.width; c += kPanelOutputs) {
        const int64_t width = c + kPanelOutputs < a.width ? kPanelOutputs : a.width - c;
        float* mixed = b.mixed + c * b.lanes;
        for (int64_t s = 0; s < keys; ++s) {
            float* values = b.weights + s * kPanelOutputs;
            widen_row(v + (at + s) * a.width + c, width, values);
            if (at + s >= b.limits[0]) add_unseen(b, values, width, at, s, mixed);
        }
        int64_t stop;
        for (int64_t s = 0; s < keys; s = stop) {
            const int64_t first = b.first_vector(at + s);
            const int64_t limit = b.limits[first * W + W - 1] - at;
            stop = limit < keys ? limit : keys;
            for (int64_t o = 0; o < width; o += Vec::kPanelRows)
                panel<ByStep>(b.weights + s * kPanelOutputs + o, width - o, b.scores + s * b.lanes + first * W,
                              b.vectors - first, stop - s, mixed + o * b.lanes + first * W, b.lanes);
        }
    }
}

template <class T>
void attend_item(const AttentionArgs& a, int64_t item, float* scratch) {
    Queries block(a, item, scratch);
    const int64_t head = block.kv_head * a.capacity * a.width;
    block.start(a);
    const int64_t last = block.limits[block.lanes - 1];
    for (int64_t at = 0; at < last; at += kPanelSteps) {
        const int64_t keys = at + kPanelSteps < last ? kPanelSteps : last - at;
        score(a, block, static_cast<const T*>(a.k) + head, at, keys);
        soften(a, block, at, keys);
        mix_block(a, block, static_cast<const T*>(a.v) + head, at, keys);
    }
    block.finish(a);
}

void attention_prompt(const AttentionArgs& a, int64_t first, int64_t last, float* scratch) {
    for (int64_t i = first; i < last; ++i) {
        if (a.type == Type::f16)
            attend_item<F16>(a, i, scratch);
        else
            attend_item<float>(a, i, scratch);
    }
}
