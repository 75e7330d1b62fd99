// out = w x + bias for the many tokens of a prompt.

template <class T>
void gemm_item(const GemmArgs& a, const PanelPlan& p, const Item& item) {
    const T* rows[kPanelOutputs];
    for (int64_t o = 0; o < item.outputs; ++o) rows[o] = static_cast<const T*>(a.w) + (item.first + o) * a.k;
    panel_dots(p, item, rows, item.outputs);
    for (int64_t b = item.first_block; b < item.last_block; ++b) {
        const Block block(p, b);
        float* sums = item.sums_of(p, b);
        for (int64_t o = 0; a.bias && o < item.outputs; ++o) {
            const Vec::F bias = Vec::set(a.bias[item.first + o]);
            float* sum = sums + o * block.lanes;
            for (int64_t i = 0; i < block.lanes; i += W) Vec::store(sum + i, Vec::add(Vec::load(sum + i), bias));
        }
        float* out = a.out + block.first * a.n + item.first;
        from_lanes(sums, block.lanes, block.tokens, nullptr, item.outputs, [&](int64_t t) { return out + t * a.n; });
    }
}

void gemm(const GemmArgs& a, const PanelPlan& p, int64_t first, int64_t last, float* scratch) {
    for (int64_t i = first; i < last; ++i) FLASHD_BY_TYPE(gemm_item, a.type, a, p, Item(p, i, scratch));
}
