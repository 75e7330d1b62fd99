// out = w x + bias for up to 16 sequences.

template <class T>
void gemv_rows(const GemvArgs& a, int64_t first, int64_t last) {
    const int64_t stride_bytes = a.k * static_cast<int64_t>(sizeof(T));
    for_each_row(static_cast<const T*>(a.w), stride_bytes, a.x, a.k, a.batch, first, last,
                 [&](int64_t r, const float* sums) {
                     for (int64_t b = 0; b < a.batch; ++b)
                         a.out[b * a.n + r] = a.bias ? sums[b] + a.bias[r] : sums[b];
                 });
}

void gemv(const GemvArgs& a, int64_t first, int64_t last) { FLASHD_BY_TYPE(gemv_rows, a.type, a, first, last); }
