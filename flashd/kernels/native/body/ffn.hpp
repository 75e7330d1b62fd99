// First half of the sparse FFN of up to 16 sequences over neuron rows: dot products and activation.

inline float activate(Activation activation, float x) {
    switch (activation) {
        case Activation::relu:
            return x <= 0.0f ? 0.0f : x;  // written so that NaN stays NaN
        case Activation::relu2:
            return x <= 0.0f ? 0.0f : x * x;
        case Activation::silu:
            return x / (1.0f + __builtin_expf(-x));
        case Activation::gelu:  // erfc keeps the left tail, where 1 + erf would cancel to nothing
            return 0.5f * x * __builtin_erfcf(-x * 0.70710678118654752440f);
        default:  // (1 + tanh z) / 2 = 1 / (1 + e^-2z), which does not cancel in the left tail
            return x / (1.0f + __builtin_expf(-1.59576912160573071176f * (x + 0.044715f * x * x * x)));
    }
}

inline int64_t listed_row(const RowArgs& a, int64_t listed) { return a.index ? a.index[listed] : listed; }
inline int64_t listed_column(const DotsArgs& a, int64_t listed) { return a.slots ? a.slots[listed] : listed; }

// The hidden unit of one neuron from its dot products, biases added. NaN compares false and stays NaN.
inline float hidden_unit(const DotsArgs& a, float up, float gate) {
    const float value = activate(a.activation, a.gated ? gate : up);
    const float kept = __builtin_fabsf(value) <= a.threshold ? 0.0f : value;
    return a.gated ? kept * up : kept;
}

// The part of `out` of one listed row, from its sums for every sequence.
inline void finish_row(const DotsArgs& a, int64_t listed, const float* ups, const float* gates) {
    const int64_t r = listed_row(a, listed);
    const int64_t column = listed_column(a, listed);
    for (int64_t b = 0; b < a.batch; ++b) {
        const int64_t at = b * a.columns + column;
        const float up = a.up_bias ? ups[b] + a.up_bias[r] : ups[b];
        const float gate = a.gate_bias ? gates[b] + a.gate_bias[r] : gates[b];
        a.out[at] = a.mask && !a.mask[at] ? 0.0f : hidden_unit(a, up, gate);
    }
}

// used[tile * batch + b] = whether sequence b uses any of a tile's rows; returns whether any uses any.
inline bool find_used(const DotsArgs& a, int64_t first, int64_t count, bool* used) {
    bool any = false;
    for (int64_t i = 0; i < count; ++i) {
        bool* tile = used + i / kRowTile * a.batch;
        for (int64_t b = 0; b < a.batch; ++b) {
            const bool uses = a.mask[b * a.columns + listed_column(a, first + i)] != 0;
            tile[b] = uses | (i % kRowTile && tile[b]);
            any |= uses;
        }
    }
    return any;
}

template <class T>
void ffn_dots_rows(const DotsArgs& a, int64_t first, int64_t last) {
    float ups[kGroupRows * kMaxBatch] = {}, gates[kGroupRows * kMaxBatch] = {};
    bool used[kGroupRows / kRowTile * kMaxBatch];
    Group<T> up, gate;
    const Blocks<T> blocks(a.d, a.batch);
    const int64_t most = group_rows(a.d, a.batch);
    const auto row = [&](int64_t listed) {
        return at_byte(reinterpret_cast<const T*>(a.rows), listed_row(a, listed) * a.stride_bytes);
    };
    for (int64_t at = first; at < last; at += most) {
        up.fill(at, last, most, most, row);
        if (a.gated) gate.fill(at, last, most, most, [&](int64_t listed) { return row(listed) + a.d; });
        if (!a.mask || find_used(a, at, up.count, used)) {
            const bool* wanted = a.mask ? used : nullptr;
            group_dots(up.rows, up.count, a.gated ? gate.rows : up.next, a.x, blocks, a.batch, wanted, ups);
            if (a.gated) group_dots(gate.rows, up.count, up.next, a.x, blocks, a.batch, wanted, gates);
        }
        for (int64_t i = 0; i < up.count; ++i) finish_row(a, at + i, ups + i * a.batch, gates + i * a.batch);
    }
}

void ffn_dots(const DotsArgs& a, int64_t first, int64_t last) {
    FLASHD_BY_TYPE(ffn_dots_rows, a.type, a, first, last);
}
