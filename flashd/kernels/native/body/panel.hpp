// Products of many tokens: tokens in the lanes of vectors, weights broadcast.
//
// Every result is one chain of fused operations over ascending steps, in a lane of its own: its bits
// depend neither on the tile and the block that it is computed in nor on the other tokens.

// A range of outputs ends with a full tile, unless it is the last; panel_outputs() and panel() know these sizes.
static_assert(kPanelOutputs % Vec::kPanelRows == 0 && Vec::kPanelRows > 4 && Vec::kPanelRows <= kPanelSpare);
static_assert(Vec::kPanelVectors == 2 || Vec::kPanelVectors == 4);

// Weights as float32, in scratch: where output o meets step s is weights[o * kOutput + s * kStep].
struct ByOutput {  // rows of weights are outputs: dot products
    static constexpr int64_t kOutput = kPanelSteps, kStep = 1;
};
struct ByStep {  // rows of weights are steps: sums of rows
    static constexpr int64_t kOutput = 1, kStep = kPanelOutputs;
};

// sums[o, lane] += weights(o, s) * tokens[s, lane] for a tile of outputs and vectors of lanes; fresh sums start at 0.
// Never inlined: the caller's variables would take registers away from it.
template <class Form, int kOutputs, int kVectors>
__attribute__((noinline)) void panel_tile(const float* weights, const float* tokens, int64_t steps, bool fresh,
                                          float* sums, int64_t lanes) {
    Vec::F acc[kOutputs][kVectors];
#pragma GCC unroll 16
    for (int o = 0; o < kOutputs; ++o)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) acc[o][v] = fresh ? Vec::zero() : Vec::load(sums + o * lanes + v * W);
    for (int64_t s = 0; s < steps; ++s) {
        Vec::F token[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) token[v] = Vec::load(tokens + v * W);
#pragma GCC unroll 16
        for (int o = 0; o < kOutputs; ++o) {
            const Vec::F weight = Vec::set(weights[o * Form::kOutput]);
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) acc[o][v] = Vec::fma(weight, token[v], acc[o][v]);
        }
        tokens += lanes;
        weights += Form::kStep;
    }
#pragma GCC unroll 16
    for (int o = 0; o < kOutputs; ++o)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) Vec::store(sums + o * lanes + v * W, acc[o][v]);
}

// The same for up to Vec::kPanelRows outputs; may go on into up to three spare ones.
template <class Form, int kVectors>
inline void panel_outputs(const float* weights, int64_t outputs, const float* tokens, int64_t steps, bool fresh,
                          float* sums, int64_t lanes) {
    if (outputs > 4)
        panel_tile<Form, Vec::kPanelRows, kVectors>(weights, tokens, steps, fresh, sums, lanes);
    else if (outputs > 2)
        panel_tile<Form, 4, kVectors>(weights, tokens, steps, fresh, sums, lanes);
    else
        panel_tile<Form, 2, kVectors>(weights, tokens, steps, fresh, sums, lanes);
}

template <class Form>
inline void panel(const float* weights, int64_t outputs, const float* tokens, int64_t vectors, int64_t steps,
                  bool fresh, float* sums, int64_t lanes) {
    if (vectors == 1)
        panel_outputs<Form, 1>(weights, outputs, tokens, steps, fresh, sums, lanes);
    else if (Vec::kPanelVectors == 2 || vectors == 2)
        panel_outputs<Form, 2>(weights, outputs, tokens, steps, fresh, sums, lanes);
    else if (vectors == 3)
        panel_outputs<Form, 3>(weights, outputs, tokens, steps, fresh, sums, lanes);
    else
        panel_outputs<Form, 4>(weights, outputs, tokens, steps, fresh, sums, lanes);
}

template <class T>
inline void widen_row(const T* from, int64_t count, float* to) {
    int64_t i = 0;
    for (; i + W <= count; i += W) Vec::store(to + i, Vec::load(from + i));
    if (i < count) store_part(to + i, load_part(from + i, count - i), count - i);
}

// Weights come from memory while the tiles before them are computed.
template <int kWrite = 0, class T>
inline void fetch(const T* from, int64_t count) {
    const char* bytes = reinterpret_cast<const char*>(from);
    const int64_t size = count * static_cast<int64_t>(sizeof(T));
    for (int64_t at = 0; at < size; at += 64) __builtin_prefetch(bytes + at, kWrite, 2);
}

using Quad = float __attribute__((vector_size(16)));
using QuadInt = int32_t __attribute__((vector_size(16)));

#if defined(__clang__)
#define FLASHD_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define FLASHD_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, QuadInt{__VA_ARGS__})
#endif

inline Quad load_quad(const float* from) {
    Quad value;
    __builtin_memcpy(&value, from, sizeof value);
    return value;
}

inline void store_quad(float* to, Quad value) { __builtin_memcpy(to, &value, sizeof value); }

inline void transpose(Quad (&q)[4]) {
    const Quad low01 = FLASHD_SHUFFLE(q[0], q[1], 0, 4, 1, 5), high01 = FLASHD_SHUFFLE(q[0], q[1], 2, 6, 3, 7);
    const Quad low23 = FLASHD_SHUFFLE(q[2], q[3], 0, 4, 1, 5), high23 = FLASHD_SHUFFLE(q[2], q[3], 2, 6, 3, 7);
    q[0] = FLASHD_SHUFFLE(low01, low23, 0, 1, 4, 5);
    q[1] = FLASHD_SHUFFLE(low01, low23, 2, 3, 6, 7);
    q[2] = FLASHD_SHUFFLE(high01, high23, 0, 1, 4, 5);
    q[3] = FLASHD_SHUFFLE(high01, high23, 2, 3, 6, 7);
}

#undef FLASHD_SHUFFLE

inline int64_t listed_at(const int64_t* listed, int64_t i) { return listed ? listed[i] : i; }
inline bool four_in_a_row(const int64_t* listed, int64_t i) { return !listed || listed[i + 3] == listed[i] + 3; }

inline Quad load_listed(const float* from, const int64_t* listed, int64_t i) {
    if (four_in_a_row(listed, i)) return load_quad(from + listed_at(listed, i));
    return Quad{from[listed[i]], from[listed[i + 1]], from[listed[i + 2]], from[listed[i + 3]]};
}

inline void store_listed(float* to, const int64_t* listed, int64_t i, Quad value) {
    if (four_in_a_row(listed, i))
        store_quad(to + listed_at(listed, i), value);
    else
        for (int j = 0; j < 4; ++j) to[listed[i + j]] = value[j];
}

// lanes[i, lane] = row(lane)[listed[i]] for `tokens` lanes, zeros for the others.
template <class Row>
inline void to_lanes(Row row, int64_t tokens, const int64_t* listed, int64_t count, float* to, int64_t lanes) {
    int64_t t = 0;
    for (; t + 4 <= tokens; t += 4) {
        const float* const from[4] = {row(t), row(t + 1), row(t + 2), row(t + 3)};
        for (int64_t r = t + 4; r < t + 8 && r < tokens; ++r) fetch(row(r) + listed_at(listed, 0), count);
        int64_t i = 0;
        for (; i + 4 <= count; i += 4) {
            Quad q[4];
            for (int r = 0; r < 4; ++r) q[r] = load_listed(from[r], listed, i);
            transpose(q);
            for (int j = 0; j < 4; ++j) store_quad(to + (i + j) * lanes + t, q[j]);
        }
        for (; i < count; ++i)
            for (int r = 0; r < 4; ++r) to[i * lanes + t + r] = from[r][listed_at(listed, i)];
    }
    for (; t < lanes; ++t)
        for (int64_t i = 0; i < count; ++i) to[i * lanes + t] = t < tokens ? row(t)[listed_at(listed, i)] : 0.0f;
}

// The way back: row(lane)[listed[i]] = lanes[i, lane] for `tokens` lanes.
template <class Row>
inline void from_lanes(const float* from, int64_t lanes, int64_t tokens, const int64_t* listed, int64_t count,
                       Row row) {
    int64_t t = 0;
    for (; t + 4 <= tokens; t += 4) {
        float* const to[4] = {row(t), row(t + 1), row(t + 2), row(t + 3)};
        int64_t i = 0;
        for (; i + 4 <= count; i += 4) {
            Quad q[4];
            for (int j = 0; j < 4; ++j) q[j] = load_quad(from + (i + j) * lanes + t);
            transpose(q);
            for (int r = 0; r < 4; ++r) store_listed(to[r], listed, i, q[r]);
        }
        for (; i < count; ++i)
            for (int r = 0; r < 4; ++r) to[r][listed_at(listed, i)] = from[i * lanes + t + r];
    }
    for (; t < tokens; ++t)
        for (int64_t i = 0; i < count; ++i) row(t)[listed_at(listed, i)] = from[i * lanes + t];
}

// A block of tokens.
struct Block {
    int64_t first, tokens, lanes;

    Block(const PanelPlan& p, int64_t block) : first(p.first_vector(block) * W), lanes(p.lanes(block)) {
        tokens = first + lanes < p.tokens ? lanes : p.tokens - first;
    }
};

void panel_pack(const PackArgs& a, const PanelPlan& p, int64_t first, int64_t last) {
    for (int64_t b = 0; b < p.blocks; ++b) {
        const Block block(p, b);
        const float* x = a.x + block.first * a.columns + (a.listed ? 0 : first);
        to_lanes([&](int64_t t) { return x + t * a.columns; }, block.tokens, a.listed ? a.listed + first : nullptr,
                 last - first, a.packed + p.block_offset(b, p.steps) + first * block.lanes, block.lanes);
    }
}

// An item of a plan, and a thread's scratch for it.
struct Item {
    int64_t first, outputs;           // of the plan's outputs
    int64_t first_block, last_block;  // of its tokens
    float* weights;
    float* sums;  // by block: [outputs and spare ones, lanes]

    Item(const PanelPlan& p, int64_t item, float* scratch)
        : first(item % p.output_items * p.item_outputs),
          first_block(item / p.output_items * p.item_blocks),
          weights(scratch),
          sums(scratch + kPanelOutputs * kPanelSteps) {
        outputs = first + p.item_outputs < p.outputs ? p.item_outputs : p.outputs - first;
        last_block = first_block + p.item_blocks < p.blocks ? first_block + p.item_blocks : p.blocks;
    }

    float* sums_of(const PanelPlan& p, int64_t block) const {
        const int64_t rows = kPanelOutputs + kPanelSpare;
        return sums + p.block_offset(block, rows) - p.block_offset(first_block, rows);
    }
};

// Adds `steps` steps from `at` on, whose weights are in the scratch, to sums of all blocks. Before each tile of
// the first block, fetch_for(first output, last output).
template <class Form, class Fetch>
inline void add_steps(const PanelPlan& p, const Item& item, int64_t outputs, int64_t at, int64_t steps,
                      bool fresh, Fetch fetch_for) {
    for (int64_t b = item.first_block; b < item.last_block; ++b) {
        const int64_t lanes = p.lanes(b);
        const float* tokens = p.packed + p.block_offset(b, p.steps) + at * lanes;
        float* sums = item.sums_of(p, b);
        for (int64_t o = 0; o < outputs; o += Vec::kPanelRows) {
            const int64_t count = o + Vec::kPanelRows < outputs ? Vec::kPanelRows : outputs - o;
            if (b == item.first_block) fetch_for(o, o + count);
            panel<Form>(item.weights + o * Form::kOutput, count, tokens, lanes / W, steps, fresh, sums + o * lanes,
                        lanes);
        }
    }
}

// sums = rows . tokens, for all blocks of the item.
template <class T>
void panel_dots(const PanelPlan& p, const Item& item, const T* const* rows, int64_t outputs) {
    for (int64_t at = 0; at < p.steps || at == 0; at += kPanelSteps) {  // sums of no steps are 0
        const int64_t next = at + kPanelSteps < p.steps ? at + kPanelSteps : p.steps;
        const int64_t then = next + kPanelSteps < p.steps ? next + kPanelSteps : p.steps;
        for (int64_t o = 0; o < outputs; ++o) widen_row(rows[o] + at, next - at, item.weights + o * kPanelSteps);
        add_steps<ByOutput>(p, item, outputs, at, next - at, at == 0, [&](int64_t first, int64_t last) {
            for (int64_t o = first; o < last; ++o) fetch(rows[o] + next, then - next);
        });
    }
}
