// What the verbs of one SIMD level share: parts of vectors at the end of a row, and choosing by weight type.

constexpr int64_t W = Vec::kWidth;

// What is used several times. GCC would sooner load it again for every product.
FLASHD_INLINE Vec::F in_register(Vec::F value) {
#if defined(__x86_64__)
    asm("" : "+v"(value));
#endif
    return value;
}

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

// Lanes as whole numbers. Unsigned, so that what overflows wraps; signed to shift or compare.
using LaneU = uint32_t __attribute__((vector_size(sizeof(Vec::F))));
using LaneI = int32_t __attribute__((vector_size(sizeof(Vec::F))));

inline LaneU lane_bits(Vec::F value) { return reinterpret_cast<LaneU>(value); }
inline Vec::F lane_floats(LaneU bits) { return reinterpret_cast<Vec::F>(bits); }

// Per lane; `mask` is what a comparison gives.
template <class Mask>
inline Vec::F pick(Mask mask, Vec::F yes, Vec::F no) {
    const LaneU bits = reinterpret_cast<LaneU>(mask);
    return lane_floats((bits & lane_bits(yes)) | (~bits & lane_bits(no)));
}

// e^r for x = n ln 2 + r, n whole. ln 2 is in two parts, of which n times the first is exact.
// Polynomial: Cephes, expf.
inline Vec::F exp_rest(Vec::F x, Vec::F n) {
    const Vec::F r = Vec::fma(n, Vec::set(2.12194440e-4f), Vec::fma(n, Vec::set(-0.693359375f), x));
    Vec::F p = Vec::set(1.9875691500e-4f);
    p = Vec::fma(p, r, Vec::set(1.3981999507e-3f));
    p = Vec::fma(p, r, Vec::set(8.3334519073e-3f));
    p = Vec::fma(p, r, Vec::set(4.1665795894e-2f));
    p = Vec::fma(p, r, Vec::set(1.6666665459e-1f));
    p = Vec::fma(p, r, Vec::set(5.0000001201e-1f));
    return Vec::add(Vec::fma(p, r * r, r), Vec::set(1.0f));
}

constexpr float kLog2E = 1.44269504088896341f;

// exp(x) within 2 ulp: exactly 0 from -inf to -87.5 (results below 1e-38: denormal weights would cost
// much and change nothing), +inf above the largest float, NaN for NaN.
inline Vec::F vexp(Vec::F x) {
    const Vec::F low = Vec::set(-87.5f), high = Vec::set(89.0f);
    const Vec::F y = pick(x > high, high, x);
    // Adding 1.5 * 2^23 leaves the rounded n in the low bits.
    const Vec::F magic = Vec::set(0x1.8p23f);
    const Vec::F shifted = Vec::fma(y, Vec::set(kLog2E), magic);
    const Vec::F p = exp_rest(y, shifted - magic);
    // Times 2^n in two steps, because 2^128 is no float.
    const LaneU power = lane_bits(shifted) - lane_bits(magic);
    const LaneU half = reinterpret_cast<LaneU>(reinterpret_cast<LaneI>(power) >> 1);
    const Vec::F value = p * lane_floats((half + 127u) << 23) * lane_floats((power - half + 127u) << 23);
    return pick(x < low, Vec::zero(), value);
}

// The same for x <= 0 in fewer steps; results below 2e-38 become 0.
inline Vec::F vexp_negative(Vec::F x) {
    // 127 more makes the low bits the exponent of 2^n.
    const Vec::F shift = Vec::set(0x1.8p23f + 127.0f);
    const Vec::F shifted = Vec::fma(x, Vec::set(kLog2E), shift);
    const Vec::F p = exp_rest(x, shifted - shift);
    return pick(x < Vec::set(-87.0f), Vec::zero(), p * lane_floats(lane_bits(shifted) << 23));
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
