// RMSNorm, LayerNorm and rotary position embeddings.

// Sum of term(x[i]) in one order: four accumulators that take vectors in turn. term(fill) is zero.
template <class Term>
inline float sum_of(const float* x, int64_t d, float fill, Term term) {
    Vec::F sums[4] = {Vec::zero(), Vec::zero(), Vec::zero(), Vec::zero()};
    int64_t i = 0;
    for (; i + 4 * W <= d; i += 4 * W)
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) sums[j] = term(Vec::load(x + i + j * W), sums[j]);
    for (; i + W <= d; i += W) sums[0] = term(Vec::load(x + i), sums[0]);
    if (i < d) {
        float padded[W];
        Vec::store(padded, Vec::set(fill));
        __builtin_memcpy(padded, x + i, static_cast<size_t>(d - i) * sizeof(float));
        sums[1] = term(Vec::load(padded), sums[1]);
    }
    return Vec::sum(Vec::add(Vec::add(sums[0], sums[1]), Vec::add(sums[2], sums[3])));
}

// out[i] = (x[i] - mean) * factor * weight[i] + bias[i], as far as there is a bias.
inline void scale_token(const NormArgs& a, const float* x, float mean, float factor, float* out) {
    const Vec::F center = Vec::set(mean), scale = Vec::set(factor);
    int64_t i = 0;
    for (; i + W <= a.d; i += W) {
        const Vec::F normal = (Vec::load(x + i) - center) * scale;
        Vec::store(out + i, a.bias ? Vec::fma(normal, Vec::load(a.weight + i), Vec::load(a.bias + i))
                                   : normal * Vec::load(a.weight + i));
    }
    if (i == a.d) return;
    const int64_t rest = a.d - i;
    const Vec::F normal = (load_part(x + i, rest) - center) * scale;
    const Vec::F weight = load_part(a.weight + i, rest);
    store_part(out + i, a.bias ? Vec::fma(normal, weight, load_part(a.bias + i, rest)) : normal * weight, rest);
}

inline float mean_square(const float* x, int64_t d, float mean) {
    const Vec::F center = Vec::set(mean);
    const float squares = sum_of(x, d, mean, [&](Vec::F value, Vec::F sum) {
        const Vec::F distance = value - center;
        return Vec::fma(distance, distance, sum);
    });
    return squares / static_cast<float>(d);
}

void rmsnorm(const NormArgs& a, int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
        const float* x = a.x + t * a.d;
        const float factor = 1.0f / __builtin_sqrtf(mean_square(x, a.d, 0.0f) + a.eps);
        scale_token(a, x, 0.0f, factor, a.out + t * a.d);
    }
}

// Two passes: the mean of the squares less the square of the mean would cancel for a large mean.
void layernorm(const NormArgs& a, int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
        const float* x = a.x + t * a.d;
        const float total = sum_of(x, a.d, 0.0f, [](Vec::F value, Vec::F sum) { return Vec::add(sum, value); });
        const float mean = total / static_cast<float>(a.d);
        const float factor = 1.0f / __builtin_sqrtf(mean_square(x, a.d, mean) + a.eps);
        scale_token(a, x, mean, factor, a.out + t * a.d);
    }
}

// Halves paired as Hugging Face does: (low, high) turns into (low cos - high sin, high cos + low sin).
void rope(const RopeArgs& a, int64_t first, int64_t last) {
    const int64_t half = a.width / 2;
    for (int64_t row = first * a.heads; row < last * a.heads; ++row) {
        float* low = a.x + row * a.width;
        float* high = low + half;
        const float* cos = a.cos + row / a.heads * half;
        const float* sin = a.sin + row / a.heads * half;
        const auto turn = [](Vec::F& x, Vec::F& y, Vec::F c, Vec::F s) {
            const Vec::F before = x;
            x = Vec::fma(x, c, Vec::zero() - y * s);
            y = Vec::fma(y, c, before * s);
        };
        int64_t i = 0;
        for (; i + W <= half; i += W) {
            Vec::F x = Vec::load(low + i), y = Vec::load(high + i);
            turn(x, y, Vec::load(cos + i), Vec::load(sin + i));
            Vec::store(low + i, x);
            Vec::store(high + i, y);
        }
        if (i == half) continue;
        Vec::F x = load_part(low + i, half - i), y = load_part(high + i, half - i);
        turn(x, y, load_part(cos + i, half - i), load_part(sin + i, half - i));
        store_part(low + i, x, half - i);
        store_part(high + i, y, half - i);
    }
}
