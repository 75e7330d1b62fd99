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
