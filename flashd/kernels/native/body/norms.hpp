// RMSNorm, LayerNorm and rotary position embeddings.

// Statistics and differences are float64: squares of large float32 values overflow, and the rounded mean
// of values far from zero would be off by more than these differ.
using Singles = float __attribute__((vector_size(sizeof(Vec::F) / 2)));
using Doubles = double __attribute__((vector_size(sizeof(Vec::F))));
constexpr int64_t D = W / 2;

FLASHD_INLINE Singles load_singles(const float* from) {
    Singles value;
    __builtin_memcpy(&value, from, sizeof value);
    return value;
}

FLASHD_INLINE Doubles load_doubles(const float* from) {
    return __builtin_convertvector(load_singles(from), Doubles);
}

// Sum of term(x[i]) in one order: four accumulators that take vectors in turn, then what is left.
template <class Term>
inline double sum_of(const float* x, int64_t d, Term term) {
    Doubles sums[4] = {};
    int64_t i = 0;
    for (; i + 4 * D <= d; i += 4 * D)
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) sums[j] += term(load_doubles(x + i + j * D));
    for (; i + D <= d; i += D) sums[0] += term(load_doubles(x + i));
    const Doubles lanes = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    double total = 0.0;
    for (int64_t j = 0; j < D; ++j) total += lanes[j];
    for (; i < d; ++i) total += term(static_cast<double>(x[i]));
    return total;
}

// 1 / sqrt(mean of squared distances from `mean` + eps)
inline double inverse_root(const NormArgs& a, const float* x, double mean) {
    const double squares = sum_of(x, a.d, [&](auto value) { return (value - mean) * (value - mean); });
    return 1.0 / __builtin_sqrt(squares / static_cast<double>(a.d) + a.eps);
}

// out[i] = (x[i] - mean) * factor * weight[i] + bias[i], as far as there is a bias.
inline void scale_token(const NormArgs& a, const float* x, double mean, double factor, float* out) {
    int64_t i = 0;
    for (; i + D <= a.d; i += D) {
        Singles value = __builtin_convertvector((load_doubles(x + i) - mean) * factor, Singles);
        value *= load_singles(a.weight + i);
        if (a.bias) value += load_singles(a.bias + i);
        __builtin_memcpy(out + i, &value, sizeof value);
    }
    for (; i < a.d; ++i) {
        const float value = static_cast<float>((static_cast<double>(x[i]) - mean) * factor) * a.weight[i];
        out[i] = a.bias ? value + a.bias[i] : value;
    }
}

void rmsnorm(const NormArgs& a, int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
        const float* x = a.x + t * a.d;
        scale_token(a, x, 0.0, inverse_root(a, x, 0.0), a.out + t * a.d);
    }
}

// Two passes: the mean of the squares less the square of the mean would cancel for a large mean.
void layernorm(const NormArgs& a, int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
        const float* x = a.x + t * a.d;
        const double mean = sum_of(x, a.d, [](auto value) { return value; }) / static_cast<double>(a.d);
        scale_token(a, x, mean, inverse_root(a, x, mean), a.out + t * a.d);
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
