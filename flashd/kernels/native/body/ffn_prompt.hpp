// The FFN of the many tokens of a prompt over neuron rows.

// The same rule as activate(), for many tokens; only the exact GELU goes one by one.
inline Vec::F activate_lanes(Activation activation, Vec::F x) {
    const Vec::F one = Vec::set(1.0f);
    switch (activation) {
        case Activation::relu:
            return pick(x <= Vec::zero(), Vec::zero(), x);
        case Activation::relu2:
            return pick(x <= Vec::zero(), Vec::zero(), x * x);
        case Activation::silu:
            return x / Vec::add(one, vexp(Vec::zero() - x));
        case Activation::gelu_tanh: {  // (1 + tanh z) / 2 = 1 / (1 + e^-2z)
            const Vec::F cubic = Vec::fma(Vec::set(0.044715f) * x * x, x, x);
            return x / Vec::add(one, vexp(Vec::set(-2.0f * 0.79788456080286535588f) * cubic));
        }
        default: {
            float values[W];
            Vec::store(values, x);
            for (int64_t i = 0; i < W; ++i) values[i] = activate(activation, values[i]);
            return Vec::load(values);
        }
    }
}

// hidden_unit() of one neuron for many tokens.
inline Vec::F hidden_lanes(const DotsArgs& a, Vec::F up, Vec::F gate) {
    const Vec::F value = activate_lanes(a.activation, a.gated ? gate : up);
    const Vec::F magnitude = lane_floats(lane_bits(value) & 0x7FFFFFFFu);
    const Vec::F kept = pick(magnitude <= Vec::set(a.threshold), Vec::zero(), value);
    return a.gated ? kept * up : kept;
}

template <class T>
inline const T* neuron_row(const RowArgs& a, int64_t row, int64_t part) {
    return at_byte(reinterpret_cast<const T*>(a.rows), row * a.stride_bytes) + part * a.d;
}

template <class T>
void dots_item(const DotsArgs& a, const PanelPlan& p, const Item& item) {
    const T* rows[kPanelOutputs];  // up, then gate
    for (int64_t o = 0; o < item.outputs; ++o) {
        const int64_t row = listed_at(a.index, item.first + o);
        rows[o] = neuron_row<T>(a, row, 0);
        if (a.gated) rows[item.outputs + o] = neuron_row<T>(a, row, 1);
    }
    panel_dots(p, item, rows, a.gated ? 2 * item.outputs : item.outputs);
    for (int64_t b = item.first_block; b < item.last_block; ++b) {
        const Block block(p, b);
        float* sums = item.sums_of(p, b);
        for (int64_t o = 0; o < item.outputs; ++o) {
            const int64_t row = listed_at(a.index, item.first + o);
            float* up = sums + o * block.lanes;
            const float* gate = a.gated ? up + item.outputs * block.lanes : up;
            const Vec::F up_bias = Vec::set(a.up_bias ? a.up_bias[row] : 0.0f);
            const Vec::F gate_bias = Vec::set(a.gate_bias ? a.gate_bias[row] : 0.0f);
            for (int64_t i = 0; i < block.lanes; i += W)
                Vec::store(up + i, hidden_lanes(a, Vec::add(Vec::load(up + i), up_bias),
                                                Vec::add(Vec::load(gate + i), gate_bias)));
        }
        const int64_t* slots = a.slots ? a.slots + item.first : nullptr;
        const int64_t from = block.first * a.columns + (a.slots ? 0 : item.first);
        from_lanes(sums, block.lanes, block.tokens, slots, item.outputs,
                   [&](int64_t t) { return a.out + from + t * a.columns; });
        for (int64_t t = 0; a.mask && t < block.tokens; ++t)
            for (int64_t o = 0; o < item.outputs; ++o) {
                const int64_t at = from + t * a.columns + listed_at(slots, o);
                a.out[at] = a.mask[at] ? a.out[at] : 0.0f;
            }
    }
}

template <class T>
void down_item(const DownArgs& a, const int64_t* rows, const PanelPlan& p, const Item& item) {
    const auto acc_of = [&](const Block& block) {
        return [&a, at = a.acc + block.first * a.d + item.first](int64_t t) { return at + t * a.d; };
    };
    for (int64_t b = item.first_block; b < item.last_block; ++b) {
        const Block block(p, b);
        to_lanes(acc_of(block), block.tokens, nullptr, item.outputs, item.sums_of(p, b), block.lanes);
    }
    const int64_t part = a.gated ? 2 : 1;
    for (int64_t at = 0; at < p.steps; at += kPanelSteps) {
        const int64_t next = at + kPanelSteps < p.steps ? at + kPanelSteps : p.steps;
        const int64_t then = next + kPanelSteps < p.steps ? next + kPanelSteps : p.steps;
        for (int64_t s = at; s < next; ++s)
            widen_row(neuron_row<T>(a, rows[s], part) + item.first, item.outputs,
                      item.weights + (s - at) * kPanelOutputs);
        add_steps<ByStep>(p, item, item.outputs, at, next - at, [&](int64_t first, int64_t last) {
            // Each tile of outputs fetches its share of the next rows.
            for (int64_t s = next + (then - next) * first / item.outputs;
                 s < next + (then - next) * last / item.outputs; ++s)
                fetch(neuron_row<T>(a, rows[s], part) + item.first, item.outputs);
        });
    }
    for (int64_t b = item.first_block; b < item.last_block; ++b) {
        const Block block(p, b);
        from_lanes(item.sums_of(p, b), block.lanes, block.tokens, nullptr, item.outputs, acc_of(block));
    }
}

void panel_ffn_dots(const DotsArgs& a, const PanelPlan& p, int64_t first, int64_t last, float* scratch) {
    for (int64_t i = first; i < last; ++i) FLASHD_BY_TYPE(dots_item, a.type, a, p, Item(p, i, scratch));
}

void panel_ffn_down(const DownArgs& a, const int64_t* rows, const PanelPlan& p, int64_t first, int64_t last,
                    float* scratch) {
    for (int64_t i = first; i < last; ++i) FLASHD_BY_TYPE(down_item, a.type, a, rows, p, Item(p, i, scratch));
}
