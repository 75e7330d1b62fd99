// What the verbs of one SIMD level share: parts of vectors at the end of a row, and choosing by weight type.

constexpr int64_t W = Vec::kWidth;

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

// Lane by lane: integers, and all ones or all zeros from comparisons.
using VecInt = int32_t __attribute__((vector_size(sizeof(Vec::F))));

inline VecInt vec_bits(Vec::F value) { return reinterpret_cast<VecInt>(value); }
inline Vec::F vec_floats(VecInt bits) { return reinterpret_cast<Vec::F>(bits); }
inline Vec::F pick(VecInt mask, Vec::F yes, Vec::F no) {
    return vec_floats((mask & vec_bits(yes)) | (~mask & vec_bits(no)));
}

// e^x within 2 ulp; NaN stays, and what is too small or too large becomes 0 or infinity.
inline Vec::F vexp(Vec::F x) {
    const Vec::F lowest = Vec::set(-104.0f), highest = Vec::set(89.0f);
    x = pick(reinterpret_cast<VecInt>(x < lowest), lowest, x);
    x = pick(reinterpret_cast<VecInt>(x > highest), highest, x);
    // x = n ln 2 + r: adding 1.5 * 2^23 rounds n to an integer, in the low bits.
    const Vec::F shift = Vec::set(0x1.8p23f);
    const Vec::F shifted = Vec::fma(x, Vec::set(1.44269504088896341f), shift);
    const Vec::F n = shifted - shift;
    Vec::F r = Vec::fma(n, Vec::set(-0.693359375f), x);
    r = Vec::fma(n, Vec::set(2.12194440e-4f), r);
    // Coefficients: Cephes, expf.
    Vec::F p = Vec::set(1.9875691500e-4f);
    p = Vec::fma(p, r, Vec::set(1.3981999507e-3f));
    p = Vec::fma(p, r, Vec::set(8.3334519073e-3f));
    p = Vec::fma(p, r, Vec::set(4.1665795894e-2f));
    p = Vec::fma(p, r, Vec::set(1.6666665459e-1f));
    p = Vec::fma(p, r, Vec::set(5.0000001201e-1f));
    p = Vec::add(Vec::fma(p, r * r, r), Vec::set(1.0f));
    // Two factors, because 2^n may be no normal number.
    const VecInt exponent = vec_bits(shifted) - vec_bits(shift);
    const VecInt half = exponent >> 1;
    return p * vec_floats((half + 127) << 23) * vec_floats((exponent - half + 127) << 23);
}

template <class T>
inline const T* at_byte(const T* from, int64_t bytes) {
    return reinterpret_cast<const T*>(reinterpret_cast<const char*>(from) + bytes);
}

// One function for the three weight types.
#define FLASHD_BY_TYPE(function, type, ...)                                  \
    do {                                                                     \
        if ((type) == Type::f16)                                             \
            function<F16>(__VA_ARGS__);                                      \
        else if ((type) == Type::bf16)                                       \
            function<BF16>(__VA_ARGS__);                                     \
        else                                                                 \
            function<float>(__VA_ARGS__);                                    \
    } while (0)
