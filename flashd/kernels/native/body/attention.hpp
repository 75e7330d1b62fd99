// Attention of few queries over a KV cache: decoding.

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

void attention(const AttentionArgs& a, int64_t first, int64_t last, float* scores) {
    FLASHD_BY_TYPE(attention_heads, a.type, a, first, last, scores);
}
