// Conversions between float32 and the weight types.

template <class T>
void widen(const ConvertArgs& a, int64_t first, int64_t last) {
    widen_row(static_cast<const T*>(a.from) + first, last - first, static_cast<float*>(a.to) + first);
}

template <class T>
void narrow(const ConvertArgs& a, int64_t first, int64_t last) {
    const float* from = static_cast<const float*>(a.from);
    T* to = static_cast<T*>(a.to);
    int64_t i = first;
    for (; i + W <= last; i += W) Vec::store(to + i, Vec::load(from + i));
    if (i < last) {
        T padded[W];
        Vec::store(padded, load_part(from + i, last - i));
        __builtin_memcpy(to + i, padded, static_cast<size_t>(last - i) * sizeof(T));
    }
}

void to_f32(const ConvertArgs& a, int64_t first, int64_t last) { FLASHD_BY_TYPE(widen, a.type, a, first, last); }

void from_f32(const ConvertArgs& a, int64_t first, int64_t last) { FLASHD_BY_TYPE(narrow, a.type, a, first, last); }
