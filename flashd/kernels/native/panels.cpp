#include "panels.hpp"

namespace flashd {
namespace {

// Items for each thread, so that all finish at about the same time.
constexpr int64_t kItemsPerThread = 4;
// Steps that a thread packs at a time.
constexpr int64_t kPackSteps = 64;

// Floats of tokens packed at a time.
constexpr int64_t kPackedFloats = 4 << 20;

PanelPlan plan_of(const PanelVerbs& verbs, const Product& product, int64_t tokens, int workers) {
    PanelPlan plan{};
    plan.tokens = tokens;
    plan.steps = product.steps;
    plan.outputs = product.outputs;
    plan.width = verbs.width;
    plan.vectors = divide_up(tokens, verbs.width);
    plan.blocks = divide_up(plan.vectors, verbs.vectors);
    // Many tokens share the weights that a thread converts, and many outputs the tokens that it reads: as long as
    // there is work for all.
    plan.item_blocks = plan.blocks < kPanelBlocks ? plan.blocks : kPanelBlocks;
    plan.item_outputs = product.most_outputs;
    const auto count = [&] {
        plan.output_items = divide_up(plan.outputs, plan.item_outputs);
        plan.items = plan.output_items * divide_up(plan.blocks, plan.item_blocks);
        return plan.items;
    };
    const int64_t wanted = workers > 1 ? kItemsPerThread * workers : 1;
    while (count() < wanted && plan.item_blocks > 1) plan.item_blocks = divide_up(plan.item_blocks, 2);
    while (count() < wanted && plan.item_outputs % 12 == 0) plan.item_outputs /= 2;
    return plan;
}

}  // namespace

int64_t slice_of(const PanelVerbs& verbs, const Product& product) {
    const int64_t unit = kPanelBlocks * verbs.vectors * verbs.width;
    const int64_t units = kPackedFloats / (unit * (product.steps > 0 ? product.steps : 1));
    const int64_t slice = units > 1 ? units * unit : unit;
    return slice < product.tokens ? slice : product.tokens;
}

PanelPlan pack_slice(const PanelVerbs& verbs, const Product& product, int64_t first, int64_t tokens, int workers,
                     float* packed) {
    PanelPlan plan = plan_of(verbs, product, tokens, workers);
    plan.packed = packed;
    const PackArgs args{product.x + first * product.columns, product.listed, product.columns, packed};
    parallel_for([&](int64_t begin, int64_t end, int) { verbs.pack(args, plan, begin, end); }, plan.steps, kPackSteps,
                 workers);
    return plan;
}

}  // namespace flashd
