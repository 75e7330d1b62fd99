// The FFN of a prompt's tokens, more than ffn_dots and ffn_down take together.
#include "panels.hpp"
#include "pool.hpp"
#include "verbs.hpp"

namespace flashd {
namespace {

// Columns of h that a thread looks through at a time.
constexpr int64_t kScanColumns = 1024;

// Columns of h in which any token has something other than zero (NaN counts); returns how many.
int64_t used_columns(const DownArgs& args, uint8_t* flags, int64_t* columns) {
    const auto scan = [&](int64_t first, int64_t last, int) {
        for (int64_t j = first; j < last; ++j) flags[j] = 0;
        for (int64_t t = 0; t < args.batch; ++t)
            for (int64_t j = first; j < last; ++j) flags[j] |= !(args.h[t * args.count + j] == 0.0f);
    };
    parallel_for(scan, args.count, kScanColumns);
    int64_t count = 0;
    for (int64_t j = 0; j < args.count; ++j) {
        columns[count] = j;
        count += flags[j];
    }
    return count;
}

}  // namespace

void ffn_dots_prompt(const DotsArgs& args) {
    const PanelVerbs& verbs = level().panels;
    const int workers = thread_count();
    const int64_t most = args.gated ? kPanelOutputs / 2 : kPanelOutputs;
    PanelPlan plan = panel_plan(verbs, args.batch, args.d, args.count, most, workers);
    const int64_t share = panel_scratch(verbs.width * verbs.vectors);
    const Scratch scratch(workers * share), packed(packed_floats(plan));
    panel_pack(verbs, {args.x, nullptr, args.d, packed.data()}, plan, workers);
    const auto items = [&](int64_t first, int64_t last, int worker) {
        verbs.dots(args, plan, first, last, scratch.data() + worker * share);
    };
    parallel_for(items, plan.items, 1, workers);
}

void ffn_down_prompt(const DownArgs& args) {
    const PanelVerbs& verbs = level().panels;
    const int workers = thread_count();
    const auto size = static_cast<size_t>(args.count) + 1;
    const std::unique_ptr<uint8_t[]> flags(new uint8_t[size]);
    const std::unique_ptr<int64_t[]> columns(new int64_t[size]), rows(new int64_t[size]);
    const int64_t steps = used_columns(args, flags.get(), columns.get());
    for (int64_t i = 0; i < steps; ++i) rows[i] = args.index ? args.index[columns[i]] : columns[i];
    PanelPlan plan = panel_plan(verbs, args.batch, steps, args.d, kPanelOutputs, workers);
    const int64_t share = panel_scratch(verbs.width * verbs.vectors);
    const Scratch scratch(workers * share), packed(packed_floats(plan));
    panel_pack(verbs, {args.h, columns.get(), args.count, packed.data()}, plan, workers);
    const auto items = [&](int64_t first, int64_t last, int worker) {
        verbs.down(args, rows.get(), plan, first, last, scratch.data() + worker * share);
    };
    parallel_for(items, plan.items, 1, workers);
}

}  // namespace flashd
