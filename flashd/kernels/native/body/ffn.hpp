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
        default:
            return 0.5f * x * (1.0f + __builtin_tanhf(0.79788456080286535588f * (x + 0.044715f * x * x * x)));
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

// used[b] = whether sequence b uses any of the listed rows [first, last); returns whether any does.
inline bool find_used(const DotsArgs& a, int64_t first, int64_t last, bool* used) {
    bool any = false;
    for (int64_t b = 0; b < a.batch; ++b) {
        used[b] = false;
        for (int64_t i = first; i < last; ++i) used[b] |= a.mask[b * a.columns + listed_column(a, i)];
        any |= used[b];
    }
    return any;
}

template <class T>
void ffn_dots_rows(const DotsArgs& a, int64_t first, int64_t last) {
    float ups[kRowTile * kMaxBatch] = {}, gates[kRowTile * kMaxBatch] = {};
    const T *rows[kRowTile], *gate_rows[kRowTile], *next[kRowTile];
    bool used[kMaxBatch];
    const T* base = reinterpret_cast<const T*>(a.rows);
    for (int64_t at = first; at < last; at += kRowTile) {
        const int64_t stop = at + kRowTile < last ? at + kRowTile : last;
        for (int i = 0; i < kRowTile; ++i) {
            // The last tile repeats the last row.
            rows[i] = at_byte(base, listed_row(a, at + i < stop ? at + i : stop - 1) * a.stride_bytes);
            gate_rows[i] = rows[i] + a.d;
            next[i] = stop + i < last ? at_byte(base, listed_row(a, stop + i) * a.stride_bytes) : rows[i];
        }
        if (!a.mask || find_used(a, at, stop, used)) {
            const bool* wanted = a.mask ? used : nullptr;
            tile_dots(rows, a.gated ? gate_rows : next, a.x, a.d, a.batch, wanted, ups);
            if (a.gated) tile_dots(gate_rows, next, a.x, a.d, a.batch, wanted, gates);
        }
        for (int i = 0; at + i < stop; ++i) finish_row(a, at + i, ups + i * a.batch, gates + i * a.batch);
    }
}

void ffn_dots(const DotsArgs& a, int64_t first, int64_t last) {
    FLASHD_BY_TYPE(ffn_dots_rows, a.type, a, first, last);
}
