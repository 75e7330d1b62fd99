// Compute-bound verbs: the many tokens of a prompt.
#pragma once

#include "attention.hpp"
#include "rows.hpp"

namespace flashd {

struct GemmArgs {
    const void* w;  // [n, k]
    Type type;
    const float* x;     // [tokens, k]
    float* out;         // [tokens, n]
    const float* bias;  // [n] or null
    int64_t n, k, tokens;
};

// Steps of a sum between two visits of its accumulators to memory; keys between two maxima of a softmax.
constexpr int64_t kPanelSteps = 192;
// Outputs (rows of weights; columns in the down projection) that a thread computes at a time.
constexpr int64_t kPanelOutputs = 96;
// Blocks of tokens that it computes them for.
constexpr int64_t kPanelBlocks = 4;
// Tiles may compute, and never use, outputs behind the last.
constexpr int64_t kPanelSpare = 8;

// A product cut into items, which are a range of outputs for some blocks of tokens, and its packed
// tokens. Vectors of tokens are shared out evenly over blocks, because narrow blocks are slow.
struct PanelPlan {
    int64_t tokens, steps, outputs;
    int64_t width;            // tokens of a vector
    int64_t vectors, blocks;  // of all tokens
    int64_t item_outputs, item_blocks;
    int64_t output_items, items;
    const float* packed;  // by block: [steps, tokens of the block], zeros behind the last token

    FLASHD_INLINE int64_t first_vector(int64_t block) const { return block * vectors / blocks; }
    FLASHD_INLINE int64_t lanes(int64_t block) const { return (first_vector(block + 1) - first_vector(block)) * width; }
    // Where a block starts in a matrix of `rows` rows that lies like `packed`.
    FLASHD_INLINE int64_t block_offset(int64_t block, int64_t rows) const { return first_vector(block) * width * rows; }
};

struct PackArgs {
    const float* x;         // [tokens, columns]
    const int64_t* listed;  // [steps] columns to pack, ascending, or null: all
    int64_t columns;
    float* packed;
};

// Weights of an item, then its accumulators.
FLASHD_INLINE int64_t panel_scratch(int64_t block_lanes) {
    return kPanelOutputs * kPanelSteps + kPanelBlocks * (kPanelOutputs + kPanelSpare) * block_lanes;
}

// Keys or values of a block; then, a row for each query, what Queries lists.
FLASHD_INLINE int64_t attention_scratch(int64_t width, int64_t block_lanes) {
    return kPanelOutputs * kPanelSteps + (2 * (width + kPanelSpare) + kPanelSteps + 4) * block_lanes;
}

struct PanelVerbs {
    int64_t width;    // tokens of a vector
    int64_t vectors;  // of a block, at most
    void (*pack)(const PackArgs&, const PanelPlan&, int64_t first_step, int64_t last_step);
    void (*gemm)(const GemmArgs&, const PanelPlan&, int64_t first_item, int64_t last_item, float* scratch);
    void (*dots)(const DotsArgs&, const PanelPlan&, int64_t first_item, int64_t last_item, float* scratch);
    void (*down)(const DownArgs&, const int64_t* rows, const PanelPlan&, int64_t first_item, int64_t last_item,
                 float* scratch);
    // Items are blocks of the queries of a KV head. `heads_at_once` of these take turns, so that their keys and
    // values stay in the caches of as many threads; their longest blocks come first.
    void (*attend)(const AttentionArgs&, int64_t heads_at_once, int64_t first_item, int64_t last_item,
                   float* scratch);
};

}  // namespace flashd
