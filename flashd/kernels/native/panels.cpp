#include "panels.hpp"

#include "pool.hpp"

namespace flashd {
namespace {

// Items for each thread, so that all finish at about the same time.
constexpr int64_t kItemsPerThread = 4;
// Steps that a thread packs at a time.
constexpr int64_t kPackSteps = 64;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

PanelPlan panel_plan(const PanelVerbs& verbs, int64_t tokens, int64_t steps, int64_t outputs, int64_t most_outputs,
                     int workers) {
    PanelPlan plan{};
    plan.tokens = tokens;
    plan.steps = steps;
    plan.outputs = outputs;
    plan.width = verbs.width;
    plan.vectors = divide_up(tokens, verbs.width);
    plan.blocks = blocks_of(plan.vectors, verbs.vectors);
    // Many tokens share the weights that a thread converts, and many outputs the tokens that it reads: as long as
    // there is work for all.
    plan.item_blocks = plan.blocks < kPanelBlocks ? plan.blocks : kPanelBlocks;
    plan.item_outputs = most_outputs;
    const auto count = [&] {
        plan.output_items = divide_up(outputs, plan.item_outputs);
        plan.items = plan.output_items * divide_up(plan.blocks, plan.item_blocks);
        return plan.items;
    };
    const int64_t wanted = workers > 1 ? kItemsPerThread * workers : 1;
    while (count() < wanted && plan.item_blocks > 1) plan.item_blocks = divide_up(plan.item_blocks, 2);
    while (count() < wanted && plan.item_outputs % 12 == 0) plan.item_outputs /= 2;
    return plan;
}

int64_t packed_floats(const PanelPlan& plan) { return plan.vectors * plan.width * plan.steps; }

void panel_pack(const PanelVerbs& verbs, const PackArgs& args, PanelPlan& plan, int workers) {
    plan.packed = args.packed;
    parallel_for([&](int64_t first, int64_t last, int) { verbs.pack(args, plan, first, last); }, plan.steps,
                 kPackSteps, workers);
}

}  // namespace flashd
