// What the verbs for the many tokens of a prompt share: scratch, and how a product is cut into items.
#pragma once

#include <memory>

#include "level.hpp"
#include "pool.hpp"

namespace flashd {

// Floats that start a cache line: a vector of tokens never lies in two. std::bad_alloc if there is no memory.
class Scratch {
public:
    explicit Scratch(int64_t floats) : memory_(new float[static_cast<size_t>(floats + kLine)]) {}

    float* data() const {
        const auto address = reinterpret_cast<uintptr_t>(memory_.get()) / sizeof(float);
        return memory_.get() + (kLine - address % kLine) % kLine;
    }

private:
    static constexpr int64_t kLine = 64 / sizeof(float);

    std::unique_ptr<float[]> memory_;
};

// A product of packed tokens: out[t, o] for `outputs` outputs, each a sum of `steps` steps.
struct Product {
    const float* x;         // [tokens, columns]
    const int64_t* listed;  // [steps] columns of x, ascending, or null: all
    int64_t columns, tokens, steps, outputs;
    int64_t most_outputs;  // of an item
};

// Tokens that are packed at a time: few megabytes, and enough to make reading the weights cheap.
int64_t slice_of(const PanelVerbs& verbs, const Product& product);

// A plan for `tokens` tokens from `first` on and `workers` threads; packs them, with all threads, into `packed`.
PanelPlan pack_slice(const PanelVerbs& verbs, const Product& product, int64_t first, int64_t tokens, int workers,
                     float* packed);

// Calls run(first token, plan, first item, last item, scratch) from all threads.
template <class Run>
void run_product(const PanelVerbs& verbs, const Product& product, Run run) {
    const int workers = thread_count();
    const int64_t slice = slice_of(verbs, product);
    const int64_t share = panel_scratch(verbs.width * verbs.vectors);
    const Scratch scratch(workers * share), packed((slice + verbs.width) * product.steps);
    for (int64_t t = 0; t < product.tokens; t += slice) {
        const int64_t tokens = t + slice < product.tokens ? slice : product.tokens - t;
        const PanelPlan plan = pack_slice(verbs, product, t, tokens, workers, packed.data());
        const auto items = [&](int64_t first, int64_t last, int worker) {
            run(t, plan, first, last, scratch.data() + worker * share);
        };
        parallel_for(items, plan.items, 1, workers);
    }
}

}  // namespace flashd
